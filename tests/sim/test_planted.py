"""The simulator's laws are themselves checked: bugs planted in core and wire, each caught by the law on record.

Which seed catches which bug is in `catches.json`. When scenarios or laws change, `python -m tests.sim.search_planted` finds
them anew.
"""

from __future__ import annotations

from functools import cache

import pytest

from baton.core.engine.laws import LAWS
from baton.sim import law_names
from baton.sim.fuzzed_run import WorldVerdict, run_seed
from tests.sim import planted_peers, planted_routing, planted_tiers
from tests.sim.planted import Bug, Catch, read_catches
from tests.sim.planted_constraints import BUGS
from tests.sim.test_fuzz import SEEDS
from tests.support.planting import Patch, planted
from tests.support.quick_sample import one_in

CATCHES = read_catches()
NAMED = [*LAWS, *(value for name, value in vars(law_names).items() if name.isupper() and isinstance(value, str))]
"""The laws of a worker, then those of worlds."""
WITHOUT_A_BUG = {
    "prefills": "nearly always one prefill at most has begun and is not whole; an admission that looks at its first chunk "
    "only, or at nothing that is kept, breaks a promise or asks for blocks that are not there before two lack too many",
}
"""Laws that catch no planted bug, each with the reason."""
HINT = "search again: python -m tests.sim.search_planted --names {}"


@cache
def _replayed(name: str) -> WorldVerdict:
    with BUGS[name].planted():
        return run_seed(CATCHES[name].seed)


def test_the_registry_is_large_enough_and_every_bug_is_on_record() -> None:
    layers = [bug.layer for bug in BUGS.values()]
    of_peers = [bug for bug in BUGS.values() if bug.plant.__module__ == planted_peers.__name__]
    of_routers = [bug for bug in BUGS.values() if bug.plant.__module__ == planted_routing.__name__]
    of_tiers = [bug for bug in BUGS.values() if bug.plant.__module__ == planted_tiers.__name__]
    assert len(BUGS) >= 297
    assert len(of_tiers) >= 30
    assert len(of_peers) >= 40
    assert len(of_routers) >= 40
    assert layers.count("core") >= 12
    assert layers.count("executor") >= 3
    assert layers.count("wire") >= 6
    assert list(CATCHES) == list(BUGS), HINT.format("…")


@pytest.mark.parametrize("law", NAMED)
def test_every_law_catches_a_planted_bug(law: str) -> None:
    """A law that nothing breaks may be one that nothing can break."""
    caught = [name for name, catch in CATCHES.items() if catch.law == law]
    hint = "plant a bug that it catches, and search for a seed with --law"
    assert bool(caught) is (law not in WITHOUT_A_BUG), f"{law}: it catches {caught}; {hint}"


def test_the_laws_without_a_planted_bug_are_laws() -> None:
    assert WITHOUT_A_BUG.keys() <= {*NAMED}


@pytest.mark.parametrize("bug", BUGS.values(), ids=list(BUGS))
def test_a_bug_is_planted_in_production_code_and_leaves_nothing_behind(bug: Bug) -> None:
    with bug.planted() as patch:
        replaced = patch.replaced
        assert patch.touched
        assert all(module.startswith(f"baton.{bug.layer}.") for module in patch.touched), patch.touched
    for owner, name, value in replaced:
        assert owner.__dict__[name] is value


@pytest.mark.parametrize(
    ("name", "used_by"), [("no_such_function", None), ("next_deadline", None), ("no_such_global", "message_of")]
)
def test_a_bug_for_what_is_not_there_or_not_unique_says_its_name(name: str, used_by: str | None) -> None:
    def plant(patch: Patch) -> None:
        patch.set(name, None, used_by=used_by)

    with pytest.raises(LookupError, match=rf"planted bug lose_it: .*{name}"), planted("lose_it", plant):
        pass


@pytest.mark.parametrize("name", one_in(5, BUGS))
def test_a_planted_bug_breaks_the_law_on_record(name: str) -> None:
    broken = _replayed(name).broken
    assert broken is not None, f"{BUGS[name].story}: no law broke with seed {CATCHES[name].seed}; {HINT.format(name)}"
    assert broken.law == CATCHES[name].law, f"{broken}; {HINT.format(name)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({catch.seed for catch in CATCHES.values() if catch.seed >= SEEDS}))
def test_without_the_bug_the_same_seed_is_clean(seed: int) -> None:
    """That the seeds below SEEDS are clean is shown by `test_worlds_with_faults_break_no_law`."""
    broken = run_seed(seed).broken
    assert broken is None, f"seed {seed}: {broken}"


def test_say_what_caught_what(capsys: pytest.CaptureFixture[str]) -> None:
    widest = max(map(len, BUGS))
    rows = [_row(bug, catch, widest) for name, catch in CATCHES.items() if (bug := BUGS.get(name)) is not None]
    laws = {catch.law for catch in CATCHES.values()}
    with capsys.disabled():
        print(f"\n\n{'planted bug':<{widest}}  layer   seed  law that breaks", *rows, sep="\n")
        print(f"{len(rows)} planted bugs, {len(laws)} laws that caught them")
    assert len(rows) == len(BUGS)


def _row(bug: Bug, catch: Catch, width: int) -> str:
    return f"{bug.name:<{width}}  {bug.layer:<5} {catch.seed:>6}  {catch.law}"
