"""An answer that began under another version of its constraint's backend is continued where the masks agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.constrained_submissions import asked, constraint, of_another_version

from baton.core.engine.orders import Submit
from baton.core.engine.request import Submission
from baton.core.engine.submission_checks import refuse_constraint
from baton.core.errors import RefusalCode
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.mask_digest import mask_digest
from baton.executor.constraints.scripted_backend import ScriptedBackend, allowed_after
from baton.executor.constraints.version_skew import continued_here, digest_after, has_other_version

VOCABULARY = 64
COMPILED = CompiledConstraints([ScriptedBackend()])


def answer(seed: int, tokens: int) -> list[int]:
    """Tokens that the constraint of this seed permits."""
    made: list[int] = []
    for nth in range(tokens):
        allowed = allowed_after(constraint(seed).source, made, VOCABULARY)
        made.append(allowed[(seed + nth) % len(allowed)])
    return made


def moved(seed: int, outputs: list[int], digest: bytes) -> Submission:
    return of_another_version(asked("x", seed).group[0], outputs, digest)


def is_taken(item: Submission) -> bool:
    made = continued_here(Submit(0, (item,)), COMPILED, VOCABULARY).group[0]
    return refuse_constraint(made, COMPILED.versions) is None


@given(seed=st.integers(0, 1 << 20), tokens=st.integers(1, 12), other=st.integers(0, 1 << 20))
def test_it_is_taken_exactly_where_the_masks_agree(seed: int, tokens: int, other: int) -> None:
    outputs = answer(seed, tokens)
    ours = digest_after(COMPILED, constraint(seed), outputs, VOCABULARY)
    theirs = digest_after(COMPILED, constraint(other), answer(other, tokens), VOCABULARY)
    assert ours is not None
    assert theirs is not None
    assert is_taken(moved(seed, outputs, ours))
    assert is_taken(moved(seed, outputs, theirs)) == (ours == theirs)
    assert is_taken(moved(seed, outputs, b"")), "nobody has that mask any more, and this version permits the outputs"


def test_outputs_that_this_version_does_not_permit_are_never_continued() -> None:
    outputs = answer(7, 3)
    allowed = allowed_after(constraint(7).source, outputs, VOCABULARY)
    wrong = [*outputs, next(token for token in range(VOCABULARY) if token not in allowed)]
    assert digest_after(COMPILED, constraint(7), wrong, VOCABULARY) is None
    assert not is_taken(moved(7, wrong, b""))


def test_without_a_mask_to_compare_it_is_refused_by_its_version() -> None:
    item = asked("x", 7, began_under="another", outputs=answer(7, 3)).group[0]
    made = continued_here(Submit(0, (item,)), COMPILED, VOCABULARY).group[0]
    refusal = refuse_constraint(made, COMPILED.versions)
    assert refusal is not None
    assert refusal.code is RefusalCode.OTHER_BACKEND_VERSION


def test_a_mask_of_another_place_is_not_compared() -> None:
    outputs = answer(7, 3)
    digest = digest_after(COMPILED, constraint(7), outputs[:2], VOCABULARY)
    assert digest is not None
    item = moved(7, outputs[:2], digest)
    longer = of_another_version(item, outputs, digest)
    assert is_taken(item)
    assert not is_taken(longer) or digest == digest_after(COMPILED, constraint(7), outputs, VOCABULARY)


def test_what_begins_here_under_another_version_is_prefilled_here() -> None:
    new = asked("x", 7, began_under="another")
    assert has_other_version(new, COMPILED.versions)
    made = continued_here(new, COMPILED, VOCABULARY).group[0]
    assert made.prefills_in_place, "a peer would draw its first token by its own version"
    assert refuse_constraint(made, COMPILED.versions) is None
    ours = asked("x", 7)
    assert not has_other_version(ours, COMPILED.versions)
    assert not continued_here(ours, COMPILED, VOCABULARY).group[0].prefills_in_place


@pytest.mark.parametrize("padding", [0, 1, 9])
def test_a_digest_does_not_depend_on_how_far_a_mask_goes_beyond_its_tokens(padding: int) -> None:
    assert mask_digest(b"\x05\x80" + bytes(padding)) == mask_digest(b"\x05\x80")
    assert mask_digest(b"\x05\x80") != mask_digest(b"\x05\x00\x80")
