"""Bugs planted in the core, one at a time: the laws and the scripted tokens must catch each.

A check that nothing can fail proves nothing. Each bug replaces one function of the core for the time of one run; the run is
the same random load that the preemption laws use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.engine.blocks import BlockPool
from baton.core.engine.ended import EndedRequest
from baton.core.engine.plan import Int64s, StepResult
from baton.core.engine.prefix_publisher import Namer
from baton.core.engine.records import Flight, Request
from baton.core.engine.request import Move
from baton.core.engine.reserve import Promises
from baton.core.engine.running_set import StepBuilder
from baton.core.engine.scheduler import Scheduler
from baton.core.engine.slots import PAD, Slots
from baton.core.engine.worker import Worker
from baton.core.errors import BatonError
from tests.core.engine import test_preemption, test_reserve, test_scheduler
from tests.laws.test_preemption_laws import Machine

SEEDS = 10

Plant = Callable[[pytest.MonkeyPatch], None]
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


def requeue_before_the_ack(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._preempt

    def preempt(self: Scheduler, step: StepBuilder, victim: int, asker: int) -> None:
        original(self, step, victim, asker)
        request = self._occupant(victim)
        request.outputs = self.slots.outputs(victim)
        known = np.concatenate((request.submission.prompt, request.outputs))
        request.keys = self.pool.prefix.keys_of(known, request.submission.salt, self.config.block_size)
        self._waiting.push(request)

    def requeue(self: Scheduler, request: Request) -> None:
        self._move(request, Move.ACK_PREEMPTION)

    patch.setattr(Scheduler, "_preempt", preempt)
    patch.setattr(Scheduler, "_requeue", requeue)


def free_blocks_at_the_order(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._order_stop

    def order_stop(self: Scheduler, request: Request, move: Move) -> None:
        original(self, request, move)
        slot = self._slot_of(request)
        self.pool.drop(self.slots.blocks(slot))
        self.slots.held[slot] = 0

    patch.setattr(Scheduler, "_order_stop", order_stop)


def treat_token_zero_as_no_token(patch: pytest.MonkeyPatch) -> None:
    original = Slots.append

    def append(self: Slots, rows: Int64s, tokens: np.ndarray) -> None:
        original(self, rows[tokens != 0], tokens[tokens != 0])

    patch.setattr(Slots, "append", append)


def cache_the_last_sampled_tokens_block(patch: pytest.MonkeyPatch) -> None:
    original = Namer.unnamed

    def unnamed(self: Namer, at: Int64s) -> tuple[Int64s, Int64s]:
        slots = self._slots
        computed = slots.computed[at].copy()
        slots.computed[at] = np.where(slots.known[at] > slots.prompt[at], slots.known[at], computed)
        return original(self, at)

    patch.setattr(Namer, "unnamed", unnamed)


def count_the_asker_in_its_own_reserve(patch: pytest.MonkeyPatch) -> None:
    original = Promises.kept
    patch.setattr(Promises, "kept", lambda self, slots, asker=None: original(self, slots))


def decay_only_when_something_ran(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._note_pass

    def note_pass(self: Scheduler, step: StepBuilder) -> None:
        if step.chunks or len(step.decodes.slots):
            original(self, step)

    patch.setattr(Scheduler, "_note_pass", note_pass)


def append_a_stale_result(patch: pytest.MonkeyPatch) -> None:
    def fence(self: Scheduler, flight: Flight) -> Int64s:
        return np.arange(flight.stops, len(flight.crew.slots))

    patch.setattr(Scheduler, "_fence", fence)


def choose_a_prefilling_victim(patch: pytest.MonkeyPatch) -> None:
    def candidates(slots: Slots, asker: int) -> Int64s:
        rows = slots.running()
        return rows[~slots.protected[rows]]

    patch.setattr("baton.core.engine.victims.candidates", candidates)


def forget_what_was_delivered_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._requeue

    def requeue(self: Scheduler, request: Request) -> None:
        original(self, request)
        request.outputs = request.outputs[:-1]

    patch.setattr(Scheduler, "_requeue", requeue)


def leak_a_block_at_the_ack(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.drop
    patch.setattr(BlockPool, "drop", lambda self, blocks: original(self, blocks[1:]))


def never_release_followers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_release_followers", lambda self, leader: None)


def no_pass_is_due_after_an_idle_one(patch: pytest.MonkeyPatch) -> None:
    original = Worker.next_deadline
    patch.setattr(Worker, "next_deadline", lambda self: None if self._planned_out else original(self))


def let_growth_touch_what_is_promised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promises, "promised", lambda self, slots: 0)


def end_a_request_twice(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._end

    def end(self: Scheduler, request: Request, reason: object, move: Move, ended: list[EndedRequest]) -> None:
        original(self, request, reason, move, ended)  # type: ignore[arg-type]
        ended.append(ended[-1])

    patch.setattr(Scheduler, "_end", end)


def match_the_padding_of_stop_ids(patch: pytest.MonkeyPatch) -> None:
    original = Slots.draws_stop

    def draws_stop(self: Slots, rows: Int64s, tokens: np.ndarray) -> np.ndarray:
        return original(self, rows, np.where(tokens == 7, PAD, tokens))

    patch.setattr(Slots, "draws_stop", draws_stop)


def cache_what_a_broken_chunk_left(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._split_broken

    def split(self: Scheduler, flight: Flight, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        self._note_chunks(flight, live)
        sound, broken = original(self, flight, result, live)
        self._name_full_blocks(flight.crew.slots[broken])
        return sound, broken

    patch.setattr(Scheduler, "_split_broken", split)


def remember_the_crew_across_moves(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._move

    def move(self: Scheduler, request: Request, move: Move) -> None:
        crew = self._crew
        original(self, request, move)
        self._crew = crew

    patch.setattr(Scheduler, "_move", move)


BY_LOAD: list[Plant] = [
    requeue_before_the_ack,
    free_blocks_at_the_order,
    treat_token_zero_as_no_token,
    cache_the_last_sampled_tokens_block,
    append_a_stale_result,
    choose_a_prefilling_victim,
    forget_what_was_delivered_at_a_restart,
    leak_a_block_at_the_ack,
    never_release_followers,
    let_growth_touch_what_is_promised,
    end_a_request_twice,
    match_the_padding_of_stop_ids,
    remember_the_crew_across_moves,
]


@pytest.mark.parametrize("plant", BY_LOAD, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught_by_the_laws(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((BatonError, AssertionError, RuntimeError, KeyError)):
        _load()


BY_CASE: list[tuple[Plant, Case]] = [
    (count_the_asker_in_its_own_reserve, test_reserve.test_the_asker_is_not_in_its_own_reserve),
    (cache_what_a_broken_chunk_left, test_scheduler.test_what_a_broken_chunk_left_behind_is_never_cached),
    (decay_only_when_something_ran, test_preemption.test_a_pass_that_schedules_nothing_lowers_the_ratio_too),
    (no_pass_is_due_after_an_idle_one, test_preemption.test_a_pass_is_always_due_while_requests_wait_and_lowers_the_ratio),
]


@pytest.mark.parametrize(("plant", "case"), BY_CASE, ids=lambda value: value.__name__)
def test_a_planted_bug_is_caught_by_its_case(
    plant: Plant, case: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case()
    plant(monkeypatch)
    with pytest.raises((BatonError, AssertionError, RuntimeError)):
        case()


def test_without_a_planted_bug_the_same_load_passes() -> None:
    _load()
