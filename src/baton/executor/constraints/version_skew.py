"""Answers that began under another version of a constraint's backend than this instance has.

Two versions may allow different tokens, so an answer is continued under another one only where that has the same mask after
the outputs so far (`MaskReference`); or, where no instance with that mask is left, where it permits the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from baton.core.engine.orders import Submit
from baton.core.engine.request import Constraint, Submission
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import ConstraintError, words_of
from baton.executor.constraints.mask_digest import mask_digest


def has_other_version(submit: Submit, versions: Sequence[tuple[str, str]]) -> bool:
    """Whether a constraint of the group was compiled by another version of its backend than these."""
    return any(_is_of_another(item, versions) for item in submit.group)


def continued_here(submit: Submit, compiled: CompiledConstraints, vocabulary: int) -> Submit:
    """The same group; answers that this instance may continue have its own version in their constraints, and what begins
    under that version is prefilled here, since peers may have another one."""
    return replace(submit, group=tuple(_continued(item, compiled, vocabulary) for item in submit.group))


def digest_after(
    compiled: CompiledConstraints, constraint: Constraint, outputs: Sequence[int], vocabulary: int
) -> bytes | None:
    """Digest of the mask after these outputs; None where they are not permitted, or the constraint cannot be compiled."""
    words = np.zeros(words_of(vocabulary), dtype="<u4")
    try:
        compiled.matcher(constraint, np.asarray(outputs, dtype=np.int32)).mask(words)
    except ConstraintError:
        return None
    return mask_digest(words.tobytes())


def _is_of_another(item: Submission, versions: Sequence[tuple[str, str]]) -> bool:
    constraint = item.sampling.constraint
    return constraint is not None and (constraint.backend, constraint.began_under) not in versions


def _continued(item: Submission, compiled: CompiledConstraints, vocabulary: int) -> Submission:
    constraint = item.sampling.constraint
    if constraint is None or not _is_of_another(item, compiled.versions):
        return item
    if not len(item.generated):
        return replace(item, prefills_in_place=True)
    ours, reference = dict(compiled.versions).get(constraint.backend), constraint.version
    if ours is None or isinstance(reference, str) or reference.outputs != len(item.generated):
        return item
    digest = digest_after(compiled, constraint, item.generated.tolist(), vocabulary)
    if digest is None or reference.digest not in (b"", digest):
        return item
    return replace(item, sampling=replace(item.sampling, constraint=replace(constraint, version=ours)))
