"""Bugs planted in the core, one at a time: the laws and the scripted tokens must catch each.

A check that nothing can fail proves nothing. Most bugs are those of `tests.sim.planted`; the run is the random load of the
preemption laws, or one test of a case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.engine.passes import GeneralPass
from baton.core.engine.plan import Int64s, StepResult
from baton.core.engine.recovery_cost import WayBack
from baton.core.engine.settling import StepSettling
from baton.core.engine.slots import PAD, Slots
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.step_rows import InFlightStep
from baton.core.errors import BatonError
from tests.core.engine import test_preemption, test_reserve, test_scheduler
from tests.core.tiers import test_offload
from tests.laws.test_preemption_laws import Machine
from tests.sim import planted
from tests.sim.planted import Plant
from tests.support import planting
from tests.support.planting import Patch

SEEDS = 10

Case = Callable[[], None]


def _shapes() -> list[WorkerConfig]:
    base = {"blocks": 14, "block_size": 4, "context_tokens": 48, "step_tokens": 40, "slots": 6, "depth": 3}
    return [
        WorkerConfig(**base, reserve=ReservePolicy.NONE, prefix_cache=True),
        WorkerConfig(**base, reserve=ReservePolicy.NEW_TOKEN_RATIO, victims=VictimPolicy.CHEAPEST, burst=3),
        WorkerConfig(**{**base, "blocks": 13, "step_tokens": 12}, reserve=ReservePolicy.NONE, max_preemptions=1),
    ]


def _load() -> None:
    """The random loads; raises whatever law, comparison or time limit finds."""
    for seed in range(SEEDS):
        for shape in _shapes():
            Machine(shape, seed, Counter()).run()


def count_the_asker_in_its_own_reserve(patch: Patch) -> None:
    before = patch.original("BlockPromises.kept")
    patch.set("BlockPromises.kept", lambda self, slots, asker=None: before(self, slots))


def decay_only_when_something_ran(patch: Patch) -> None:
    before = patch.original("GeneralPass._note")

    def note(self: GeneralPass, step: StepBuilder) -> None:
        if step.chunks or len(step.decodes.slots):
            before(self, step)

    patch.set("GeneralPass._note", note)


def match_the_padding_of_stop_ids(patch: Patch) -> None:
    before = patch.original("draws_stop")

    def draws_stop(self: Slots, rows: Int64s, tokens: np.ndarray) -> np.ndarray:
        return before(self, rows, np.where(tokens == 7, PAD, tokens))

    patch.set("draws_stop", draws_stop)


def cache_what_a_broken_chunk_left(patch: Patch) -> None:
    before = patch.original("_split_broken")

    def split(self: StepSettling, step: InFlightStep, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        self._note_chunks(step, live)
        sound, broken = before(self, step, result, live)
        self._running.publish_full_blocks(step.rows.slots[broken])
        return sound, broken

    patch.set("_split_broken", split)


def bring_back_from_the_host_memory_that_it_leaves(patch: Patch) -> None:
    """Costs as if a request that moves could still be copied from the host memory it leaves behind."""
    patch.set("RecoveryCost._leaves", lambda self, rows: np.zeros(len(rows), dtype=np.bool_))


def let_everybody_move_again(patch: Patch) -> None:
    """Costs as if a request could still move that is on its last move."""
    patch.set("RecoveryCost._leaves", lambda self, rows: np.ones(len(rows), dtype=np.bool_))


def reckon_with_computing_alone(patch: Patch) -> None:
    """Ignores that copying, fetching or moving a victim may take less."""
    patch.set("RecoveryCost.bring_back_us", lambda self, rows: self.costs_us(rows)[WayBack.COMPUTE])


BY_LOAD: list[Plant] = [
    match_the_padding_of_stop_ids,
    planted.append_a_stale_result,
    planted.cache_the_last_sampled_tokens_block,
    planted.choose_a_prefilling_victim,
    planted.drop_token_zero,
    planted.end_a_request_twice,
    planted.forget_a_token_at_a_restart,
    planted.free_blocks_at_the_order,
    planted.leak_a_block_at_the_ack,
    planted.let_growth_touch_what_is_promised,
    planted.never_release_followers,
    planted.remember_the_crew_over_a_move,
    planted.requeue_before_the_ack,
]


@pytest.mark.parametrize("plant", BY_LOAD, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught_by_the_laws(plant: Plant) -> None:
    with planting.planted(plant.__name__, plant), pytest.raises((BatonError, AssertionError, RuntimeError, KeyError)):
        _load()


BY_CASE: list[tuple[Plant, Case]] = [
    (count_the_asker_in_its_own_reserve, test_reserve.test_the_asker_is_not_in_its_own_reserve),
    (cache_what_a_broken_chunk_left, test_scheduler.test_what_a_broken_chunk_left_behind_is_never_cached),
    (decay_only_when_something_ran, test_preemption.test_a_pass_that_schedules_nothing_lowers_the_ratio_too),
    (
        bring_back_from_the_host_memory_that_it_leaves,
        test_offload.test_a_victim_is_not_brought_back_from_a_store_that_failed_nor_from_host_memory_once_it_moves,
    ),
    (
        let_everybody_move_again,
        test_offload.test_a_victim_on_its_last_move_comes_back_from_host_memory_and_does_not_move,
    ),
    (reckon_with_computing_alone, test_offload.test_the_cheapest_victim_is_the_one_whose_copy_is_quickest),
    (
        planted.never_be_due_after_an_idle_pass,
        test_preemption.test_a_pass_is_always_due_while_requests_wait_and_lowers_the_ratio,
    ),
]


@pytest.mark.parametrize(("plant", "case"), BY_CASE, ids=lambda value: value.__name__)
def test_a_planted_bug_is_caught_by_its_case(plant: Plant, case: Case) -> None:
    case()
    with planting.planted(plant.__name__, plant), pytest.raises((BatonError, AssertionError, RuntimeError)):
        case()


def test_without_a_planted_bug_the_same_load_passes() -> None:
    _load()
