"""What the scheduler promises, with the scripted executor as the witness: wrong blocks or lost tokens change its output."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from baton.core.config import BadConfig, WorkerConfig
from baton.core.engine.orders import Drain
from baton.core.engine.plan import RowOutcome
from baton.core.engine.request import TRANSITIONS, FinishReason, Move, Phase, Sampling
from baton.core.engine.worker import Deliver, StepDone, Tick
from baton.core.errors import IllegalTransition, InvariantViolated, RefusalCode
from baton.core.state_machine import StateMachine
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, Driver, submission

GREEDY = Sampling(seed=0, temperature=0.0)


def config(**changes: int | bool) -> WorkerConfig:
    settings: dict[str, int | bool] = {
        "slots": 4, "blocks": 64, "block_size": 4, "context_tokens": 128, "step_tokens": 32, "depth": 2,
    }  # fmt: skip
    settings.update(changes)
    return WorkerConfig(**settings)


def expected(prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    return undisturbed(prompt, sampling, max_tokens, VOCABULARY)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("burst", [1, 2, 4])
def test_a_request_yields_exactly_the_undisturbed_tokens(depth: int, burst: int) -> None:
    driver = Driver(config(depth=depth, burst=burst))
    prompt = list(range(50))
    (serial,) = driver.submit(submission(prompt, 20))
    driver.run()
    assert driver.outputs[serial] == expected(prompt, 20)
    assert driver.ended[serial].reason is FinishReason.LENGTH
    assert driver.ended[serial].generated_tokens == 20


def test_a_long_prompt_is_prefilled_in_chunks_within_the_token_budget() -> None:
    driver = Driver(config(step_tokens=8))
    (serial,) = driver.submit(submission(list(range(60)), 3))
    driver.run()
    assert driver.outputs[serial] == expected(list(range(60)), 3)
    assert all(launch.plan.tokens <= 8 for launch in driver.plans)
    assert sum(len(launch.plan.chunks) for launch in driver.plans) == 8


def test_decodes_come_before_prefills_in_every_step() -> None:
    driver = Driver(config(step_tokens=8, depth=1))
    driver.submit(submission([1, 2, 3], 30, name="a"))
    driver.tick(), driver.settle_one()
    driver.submit(submission(list(range(64)), 2, name="b"))
    driver.tick()
    plan = driver.plans[-1].plan
    assert len(plan.decode_slots) == 1
    assert plan.chunks[0].end - plan.chunks[0].begin == 7
    driver.run()


def test_length_stops_are_never_planned_past() -> None:
    driver = Driver(config(depth=3))
    driver.submit(submission([5, 6, 7], 6))
    driver.run()
    assert sum(len(launch.plan.decode_slots) for launch in driver.plans) == 5


def test_a_stop_token_ends_the_request_and_at_most_depth_minus_one_ghosts_follow() -> None:
    prompt = [9, 8, 7]
    free = expected(prompt, 40)
    sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(free[10],))
    driver = Driver(config(depth=2))
    (serial,) = driver.submit(submission(prompt, 40, sampling=sampling))
    driver.run()
    first = free.index(free[10])
    assert driver.outputs[serial] == free[: first + 1]
    assert driver.ended[serial].reason is FinishReason.STOP
    assert driver.worker.gauges().stale_results <= 1


def test_a_stop_token_inside_a_burst_drops_the_rest_of_the_burst() -> None:
    prompt = [3, 1, 4, 1, 5]
    for stop in range(VOCABULARY):
        sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(stop,))
        driver = Driver(config(burst=4))
        (serial,) = driver.submit(submission(prompt, 24, sampling=sampling))
        driver.run()
        assert driver.outputs[serial] == expected(prompt, 24, sampling)


def test_token_zero_is_an_ordinary_token() -> None:
    sampling = Sampling(seed=0, temperature=0.0)
    zeros = [
        (prompt, expected(prompt, 60))
        for prompt in ([a, b] for a in range(8) for b in range(8))
        if 0 in expected(prompt, 60)
    ]
    prompt, tokens = zeros[0]
    driver = Driver(config())
    (serial,) = driver.submit(submission([0, 0, *prompt], 60, sampling=sampling))
    (other,) = driver.submit(submission(prompt, 60, sampling=sampling))
    driver.run()
    assert driver.outputs[other] == tokens
    assert driver.outputs[serial] == expected([0, 0, *prompt], 60)


def test_min_tokens_keeps_a_stop_token_from_stopping_early() -> None:
    prompt = [2, 7, 1]
    for minimum in (1, 5, 20):
        sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=tuple(range(0, VOCABULARY, 2)), min_tokens=minimum)
        driver = Driver(config(burst=2))
        (serial,) = driver.submit(submission(prompt, 30, sampling=sampling))
        driver.run()
        assert len(driver.outputs[serial]) >= minimum
        assert driver.outputs[serial] == expected(prompt, 30, sampling)


def test_a_second_request_with_the_same_prompt_hits_the_cache_but_computes_the_last_token() -> None:
    driver = Driver(config())
    prompt = list(range(16))
    driver.submit(submission(prompt, 4))
    driver.run()
    (again,) = driver.submit(submission(prompt, 4))
    driver.run()
    assert driver.ended[again].cached_tokens == 12
    assert driver.outputs[again] == expected(prompt, 4)


def test_outputs_are_cached_but_never_the_block_of_the_last_sampled_token() -> None:
    driver = Driver(config())
    prompt = [1, 2, 3, 4]
    (first,) = driver.submit(submission(prompt, 8))
    driver.run()
    whole = prompt + driver.outputs[first]
    (second,) = driver.submit(submission([*whole, 1], 4))
    driver.run()
    assert len(whole) == 12
    assert driver.ended[second].cached_tokens == 8  # positions 0..10 have KV: two whole blocks, not three
    assert driver.outputs[second] == expected([*whole, 1], 4)


def test_different_salts_share_nothing() -> None:
    driver = Driver(config())
    prompt = list(range(20))
    driver.submit(submission(prompt, 4, salt=b"a"))
    driver.run()
    (other,) = driver.submit(submission(prompt, 4, salt=b"b"))
    driver.run()
    assert driver.ended[other].cached_tokens == 0


def test_choices_share_the_prompt_blocks_and_copy_the_partial_one() -> None:
    driver = Driver(config(slots=8))
    prompt = list(range(30))
    samplings = [Sampling(seed=7, choice=choice) for choice in range(4)]
    group = [submission(prompt, 12, name=f"r{i}", sampling=s, leader="r0" if i else None) for i, s in enumerate(samplings)]
    serials = driver.submit(*group)
    driver.run()
    for serial, sampling in zip(serials, samplings, strict=True):
        assert driver.outputs[serial] == expected(prompt, 12, sampling)
    assert [driver.ended[serial].cached_tokens for serial in serials] == [0, 29, 29, 29]
    assert sum(len(launch.plan.copies) for launch in driver.plans) == 3


def test_choices_of_a_leader_that_is_gone_still_finish() -> None:
    driver = Driver(config(step_tokens=8))
    prompt = list(range(30))
    serials = driver.submit(submission(prompt, 6, name="a"), submission(prompt, 6, name="b", leader="a"))
    driver.tick()
    driver.cancel(serials[0])
    driver.run()
    assert driver.ended[serials[0]].reason is FinishReason.ABORT
    assert driver.outputs[serials[1]] == expected(prompt, 6)


def test_a_follower_can_be_cancelled_while_its_leader_prefills() -> None:
    driver = Driver(config(step_tokens=8))
    prompt = list(range(30))
    serials = driver.submit(submission(prompt, 6, name="a"), submission(prompt, 6, name="b", leader="a"))
    driver.tick()
    driver.cancel(serials[1])
    assert driver.ended[serials[1]].reason is FinishReason.ABORT
    driver.run()
    assert driver.outputs[serials[0]] == expected(prompt, 6)


def test_an_abort_gives_nothing_back_before_the_executor_acknowledged() -> None:
    driver = Driver(config(depth=2))
    (serial,) = driver.submit(submission(list(range(10)), 50))
    driver.tick(), driver.tick()
    driver.cancel(serial)
    assert driver.worker.scheduler.requests()[0].phase is Phase.PREEMPTING
    held = driver.worker.gauges().blocks.running
    assert held > 0
    driver.settle_one()
    assert driver.worker.gauges().blocks.running == held
    assert serial not in driver.ended
    driver.run()
    assert driver.ended[serial].reason is FinishReason.ABORT
    assert driver.worker.gauges().blocks.running == 0


def test_no_token_is_delivered_after_an_abort() -> None:
    driver = Driver(config(depth=3))
    (serial,) = driver.submit(submission([1, 2, 3], 50))
    driver.tick(), driver.settle_one(), driver.tick(), driver.tick(), driver.tick()
    before = list(driver.outputs[serial])
    driver.cancel(serial)
    driver.run()
    assert driver.outputs[serial] == before


def test_a_stop_found_by_the_front_end_counts_only_what_is_kept() -> None:
    driver = Driver(config())
    (serial,) = driver.submit(submission([1, 2, 3], 50))
    while len(driver.outputs[serial]) < 5:
        driver.tick(), driver.settle_one()
    driver.stop_found(serial, keep=3)
    driver.run()
    assert driver.ended[serial].reason is FinishReason.STOP
    assert driver.ended[serial].generated_tokens == 3


def test_a_finished_or_unknown_request_can_be_cancelled_again_without_effect() -> None:
    driver = Driver(config())
    (serial,) = driver.submit(submission([1, 2, 3], 5))
    driver.run()
    driver.cancel(serial)
    driver.cancel(type(serial)(999))
    assert driver.ended[serial].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        (0, 5, RefusalCode.EMPTY_PROMPT),
        (100, 29, RefusalCode.CONTEXT_EXCEEDED),
        (128, None, RefusalCode.CONTEXT_EXCEEDED),
        (10, 10**9, RefusalCode.CONTEXT_EXCEEDED),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt: int, max_tokens: int | None, code: RefusalCode) -> None:
    driver = Driver(config())
    assert driver.submit(submission(list(range(prompt)), max_tokens)) == ()
    assert driver.refusals[0].code is code
    assert driver.worker.is_idle


def test_a_request_over_the_whole_pool_is_refused_with_the_limit_named() -> None:
    driver = Driver(config(blocks=8))
    assert driver.submit(submission(list(range(30)), 10)) == ()
    assert driver.refusals[0].code is RefusalCode.POOL_EXCEEDED
    assert "32" in driver.refusals[0].message


def test_an_absent_max_tokens_is_cut_to_what_fits() -> None:
    driver = Driver(config(blocks=8))
    (serial,) = driver.submit(submission(list(range(20)), None))
    driver.run()
    assert len(driver.outputs[serial]) == 12


def test_a_full_queue_refuses_a_whole_group_and_says_when_to_come_back() -> None:
    driver = Driver(config(waiting_max=3))
    driver.submit(submission([1], 5, name="a"), submission([1], 5, name="b"))
    assert driver.submit(submission([1], 5, name="c"), submission([1], 5, name="d")) == ()
    assert driver.refusals[0].code is RefusalCode.QUEUE_FULL
    assert driver.refusals[0].retry_after_s == 1
    driver.run()
    assert len(driver.ended) == 2


def test_a_draining_worker_refuses_and_finishes_what_it_has() -> None:
    driver = Driver(config())
    (serial,) = driver.submit(submission([1, 2], 5))
    driver.send(Drain())
    assert driver.submit(submission([3], 5)) == ()
    assert driver.refusals[0].code is RefusalCode.DRAINING
    driver.run()
    assert len(driver.outputs[serial]) == 5


def test_eviction_takes_the_least_recently_used_chain_and_its_leaves_first() -> None:
    driver = Driver(config(blocks=12, slots=1))
    old, recent = list(range(16)), list(range(30, 46))
    for prompt in (old, recent):
        driver.submit(submission(prompt, 1))
        driver.run()
    driver.submit(submission(list(range(50, 70)), 4))  # needs 6 of the 4 free and 8 cached blocks
    driver.run()
    (again,) = driver.submit(submission([*recent, 1], 1))
    driver.run()
    assert driver.ended[again].cached_tokens == 16
    (older,) = driver.submit(submission([*old, 1], 1))
    driver.run()
    assert driver.ended[older].cached_tokens == 8


def test_a_caller_cannot_change_a_prompt_after_submission() -> None:
    prompt = np.arange(10, dtype=np.int32)
    item = submission(prompt, 4)  # type: ignore[arg-type]
    prompt[:] = 0
    driver = Driver(config())
    (serial,) = driver.submit(item)
    driver.run()
    assert driver.outputs[serial] == expected(list(range(10)), 4)
    with pytest.raises(ValueError, match="read-only"):
        item.prompt[0] = 1


def test_an_executor_that_counts_differently_ends_that_request_and_no_other() -> None:
    driver = Driver(config(depth=1))
    bad, good = driver.submit(submission([1, 2, 3], 9, name="a"))[0], driver.submit(submission([4, 5, 6], 9, name="b"))[0]
    driver.tick(), driver.settle_one(), driver.tick()
    result = driver.executor.collect()
    driver.in_flight.popleft()
    known = result.known.copy()
    known[0] += 1
    driver.send(StepDone(replace(result, known=known)))
    assert driver.worker.scheduler.broken_rows == 1
    driver.run()
    assert driver.ended[bad].reason is FinishReason.ERROR
    assert driver.outputs[good] == expected([4, 5, 6], 9)
    assert driver.worker.gauges().blocks.running == 0


def test_what_a_broken_chunk_left_behind_is_never_cached() -> None:
    driver = Driver(config(depth=1))
    prompt = list(range(16))
    (bad,) = driver.submit(submission(prompt, 4))
    driver.tick()
    result = driver.executor.collect()
    driver.in_flight.popleft()
    outcomes, counts = result.outcomes.copy(), result.counts.copy()
    outcomes[0], counts[0] = RowOutcome.NOTHING_OUT_OF_BLOCKS, 0
    driver.send(StepDone(replace(result, outcomes=outcomes, counts=counts, tokens=result.tokens[:0])))
    driver.run()
    assert driver.ended[bad].reason is FinishReason.ERROR
    (good,) = driver.submit(submission(prompt, 4))
    driver.run()
    assert driver.ended[good].cached_tokens == 0
    assert driver.outputs[good] == expected(prompt, 4)


def test_an_abort_stays_an_abort_when_a_burst_runs_over_a_stop_token() -> None:
    for stop in range(VOCABULARY):
        sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(stop,))
        driver = Driver(config(burst=4, depth=3))
        (serial,) = driver.submit(submission([3, 1, 4], 40, sampling=sampling))
        for _ in range(4):
            driver.tick()
        driver.settle_one()
        was_over = serial in driver.ended
        driver.cancel(serial)
        driver.run()
        assert driver.ended[serial].reason is (FinishReason.STOP if was_over else FinishReason.ABORT)


def test_a_slot_that_answers_its_stop_with_something_else_ends_that_request_only() -> None:
    driver = Driver(config(depth=1))
    bad, good = driver.submit(submission([1, 2], 20, name="a"))[0], driver.submit(submission([3, 4], 9, name="b"))[0]
    driver.tick(), driver.settle_one()
    driver.worker.scheduler.order_stop(bad, FinishReason.ABORT, 0)
    driver.tick()
    result = driver.executor.collect()
    driver.in_flight.popleft()
    outcomes = result.outcomes.copy()
    outcomes[0] = RowOutcome.NOTHING_EMPTY_SLOT
    driver.send(StepDone(replace(result, outcomes=outcomes)))
    driver.run()
    assert driver.worker.scheduler.broken_rows == 1
    assert driver.outputs[good] == expected([3, 4], 9)
    assert driver.worker.gauges().blocks.running == 0


def test_a_result_out_of_order_or_with_foreign_rows_is_a_broken_law() -> None:
    driver = Driver(config())
    driver.submit(submission([1, 2, 3], 9))
    driver.tick(), driver.tick()
    first = driver.executor.collect()
    with pytest.raises(InvariantViolated, match="names other rows"):
        driver.worker.scheduler.settle(replace(first, slots=first.slots + 1), 0)
    with pytest.raises(InvariantViolated, match="was due"):
        driver.worker.scheduler.settle(first, 0)


def test_a_result_of_an_old_epoch_is_dropped_and_counted() -> None:
    driver = Driver(config(depth=1))
    (serial,) = driver.submit(submission([1, 2, 3], 9))
    driver.tick(), driver.settle_one(), driver.tick()
    slots = driver.worker.scheduler.slots
    request = driver.worker.scheduler.request(serial)
    assert request is not None
    slots.epoch[request.slot] += 1
    request.epoch += 1
    driver.worker.scheduler.running._decoding = None  # as every move does
    before = list(driver.outputs[serial])
    driver.settle_one()
    assert driver.outputs[serial] == before
    assert driver.worker.gauges().stale_results == 1


def test_an_illegal_move_names_both_sides() -> None:
    with pytest.raises(IllegalTransition, match=r"WAITING.*ACK_END"):
        StateMachine(TRANSITIONS, "a request").after(Phase.WAITING, Move.ACK_END)


def test_every_move_is_counted_and_those_never_taken_are_told_too() -> None:
    driver = Driver(config(depth=1))
    (finishes,) = driver.submit(submission([1, 2, 3], 4, name="a"))
    driver.run()
    (aborted,) = driver.submit(submission([4, 5, 6], 9, name="b"))
    driver.tick(), driver.settle_one()
    driver.cancel(aborted)
    (withdrawn,) = driver.submit(submission([7, 8, 9], 9, name="c"))
    driver.cancel(withdrawn)
    driver.run()
    assert set(driver.ended) == {finishes, aborted, withdrawn}
    moves = driver.worker.scheduler.moves()
    assert set(moves) == set(TRANSITIONS)
    assert {move: taken for move, taken in moves.items() if taken} == {
        (Phase.WAITING, Move.ADMIT): 2,
        (Phase.RUNNING_PREFILL, Move.PREFILL_PLANNED): 2,
        (Phase.RUNNING_DECODE, Move.FINISH): 1,
        (Phase.RUNNING_DECODE, Move.ORDER_STOP): 1,
        (Phase.PREEMPTING, Move.ACK_END): 1,
        (Phase.WAITING, Move.FINISH): 1,
    }


def test_plans_with_the_same_decodes_share_arrays_that_nobody_can_write() -> None:
    driver = Driver(config(depth=1))
    driver.submit(submission([1, 2, 3], 9, name="a"), submission([4, 5, 6], 9, name="b"))
    for _ in range(3):
        driver.tick(), driver.settle_one()
    one, other = (launch.plan for launch in driver.plans[-2:])
    assert one.decode_slots is other.decode_slots
    with pytest.raises(ValueError, match="read-only"):
        one.decode_slots[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        one.decode_epochs[0] = 1
    driver.run()


def test_every_phase_can_reach_finished() -> None:
    reached = {Phase.FINISHED}
    for _ in Phase:
        reached |= {phase for (phase, _), target in TRANSITIONS.items() if target in reached}
    assert reached == set(Phase)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"slots": 0}, "slots"), ({"burst": 5}, "burst"), ({"step_tokens": 3}, "step_tokens"), ({"blocks": -1}, "blocks")],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, int], named: str) -> None:
    with pytest.raises(BadConfig, match=named):
        config(**changes)


def test_nothing_is_due_when_nothing_is_open() -> None:
    driver = Driver(config())
    assert driver.worker.next_deadline() is None
    driver.submit(submission([1], 2))
    assert driver.worker.next_deadline() is not None
    driver.run()
    assert driver.worker.next_deadline() is None
    assert driver.send(Tick()) == []


def test_a_delivery_carries_whole_rows() -> None:
    driver = Driver(config(burst=4, depth=1))
    driver.submit(submission([1, 2, 3], 20, name="a"))
    driver.submit(submission([4, 5, 6], 20, name="b"))
    driver.tick(), driver.settle_one(), driver.tick()
    driver.in_flight.popleft()
    (effect,) = driver.send(StepDone(driver.executor.collect()))
    assert isinstance(effect, Deliver)
    assert int(effect.settled.counts.sum()) == len(effect.settled.tokens)
    driver.run()


def test_outcomes_name_every_way_a_step_can_go() -> None:
    assert {outcome.name for outcome in RowOutcome} == {
        "TOKENS", "NOTHING_CHUNK_UNFINISHED", "NOTHING_EMPTY_SLOT", "NOTHING_OUT_OF_BLOCKS", "PREEMPTED",
        "CONSTRAINT_FAILED", "SAT_OUT",
    }  # fmt: skip
