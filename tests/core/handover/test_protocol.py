"""What giver and taker promise, with the scripted executor as the witness: a wrong block or token changes what follows."""

from __future__ import annotations

import random

import pytest

from baton.core.config import BadConfig, HandoverConfig, OnPreempt, PrefillPath, ReservePolicy
from baton.core.engine.passes import BlocksNotHeld
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import FinishReason, Phase, Sampling, Serial
from baton.core.engine.scheduler import prefill_scheduler
from baton.core.errors import IllegalTransition, RefusalCode
from baton.core.handover.decode_side import DECODE_TRANSITIONS, DecodeHandoverMove, DecodeHandoverState
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import Offer, PeerId, Release
from baton.core.handover.prefill_handovers import PREFILL_TRANSITIONS, PrefillHandoverMove, PrefillHandoverState
from baton.core.handover.prefill_peers import BELIEF_HALVES_US
from baton.core.state_machine import StateMachine
from baton.executor.scripted import undisturbed
from tests.support.driver import VOCABULARY, submission
from tests.support.quick_sample import one_in
from tests.support.workers import Cluster, Node, Rates, decode_config, prefill_config

GREEDY = Sampling(seed=0, temperature=0.0)
NO_LOCAL = HandoverConfig(local_tokens=0)


def expected(prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    return undisturbed(prompt, sampling, max_tokens, VOCABULARY)


def prompt_of(stream: random.Random, most: int = 60) -> list[int]:
    return [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, most))]


@pytest.mark.parametrize("path", PrefillPath)
def test_a_request_prefilled_elsewhere_yields_exactly_the_undisturbed_tokens(path: PrefillPath) -> None:
    cluster = Cluster(1, [prefill_config(prefill_path=path)], [decode_config()])
    (d,), (p,) = cluster.ds, cluster.ps
    prompt = list(range(50))
    (serial,) = d.submit(submission(prompt, 20))
    cluster.run()
    assert d.outputs[serial] == expected(prompt, 20)
    assert p.worker.gauges().handovers.made == d.worker.gauges().handovers.made == 1
    assert not any(launch.plan.chunks for launch in d.plans), "D computed part of the prompt"
    assert d.ended[serial].bill.attempts == 1
    cluster.nothing_is_held()


def test_the_second_turn_sends_only_what_the_taker_lacks() -> None:
    cluster = Cluster(2, [prefill_config()], [decode_config()])
    (d,), (p,) = cluster.ds, cluster.ps
    first = list(range(40))
    (one,) = d.submit(submission(first, 4, name="one"))
    cluster.run()
    sent = sum(len(way.sent) for way in p.outgoing.values())
    second = first + d.outputs[one] + [7] * 20
    (two,) = d.submit(submission(second, 4, name="two"))
    cluster.run()
    assert d.outputs[two] == expected(second, 4)
    more = sum(len(way.sent) for way in p.outgoing.values()) - sent
    assert more < sent, "the whole prompt was sent again"
    assert d.ended[two].bill.cached_tokens > 0, "P found nothing of the first turn"


def test_sibling_choices_share_the_prompt_that_came_from_elsewhere() -> None:
    cluster = Cluster(3, [prefill_config()], [decode_config()])
    (d,), (p,) = cluster.ds, cluster.ps
    prompt, seeded = list(range(33)), [Sampling(seed=5, choice=choice) for choice in range(3)]
    group = [
        submission(prompt, 6, name=str(n), sampling=sampling, leader="0" if n else None) for n, sampling in enumerate(seeded)
    ]
    serials = d.submit(*group)
    cluster.run()
    for serial, sampling in zip(serials, seeded, strict=True):
        assert d.outputs[serial] == expected(prompt, 6, sampling)
    assert p.worker.gauges().handovers.made == 1
    assert sum(chunk.end - chunk.begin for launch in d.plans for chunk in launch.plan.chunks) <= 2 * d.config.block_size


def test_short_prompts_are_prefilled_where_they_decode() -> None:
    cluster = Cluster(4, [prefill_config()], [decode_config()])
    (serial,) = cluster.ds[0].submit(submission(list(range(16)), 4))
    cluster.run()
    assert cluster.ds[0].outputs[serial] == expected(list(range(16)), 4)
    assert cluster.ps[0].worker.gauges().handovers.made == 0


def test_without_a_peer_the_taker_prefills_itself() -> None:
    cluster = Cluster(5, [], [decode_config()])
    (serial,) = cluster.ds[0].submit(submission(list(range(50)), 4))
    cluster.run()
    assert cluster.ds[0].outputs[serial] == expected(list(range(50)), 4)


def test_a_giver_refuses_clients() -> None:
    cluster = Cluster(6, [prefill_config()], [decode_config()])
    cluster.ps[0].submit(submission([1, 2, 3]))
    assert [refusal.code for refusal in cluster.ps[0].refusals] == [RefusalCode.WRONG_ROLE]


def test_a_first_token_that_ends_the_answer_needs_no_step_at_the_taker() -> None:
    prompt = list(range(40))
    (first,) = expected(prompt, 1)
    cluster = Cluster(7, [prefill_config()], [decode_config()])
    (d,) = cluster.ds
    stop = Sampling(seed=0, temperature=0.0, stop_token_ids=(first,))
    (by_stop,) = d.submit(submission(prompt, 9, name="stop", sampling=stop))
    (by_length,) = d.submit(submission(prompt, 1, name="length"))
    cluster.run()
    assert d.outputs[by_stop] == d.outputs[by_length] == [first]
    assert (d.ended[by_stop].reason, d.ended[by_length].reason) == (FinishReason.STOP, FinishReason.LENGTH)
    cluster.nothing_is_held()


@pytest.mark.parametrize("turns", range(0, 60, 3))
@pytest.mark.parametrize("on_preempt", OnPreempt)
def test_a_lost_peer_at_any_moment_costs_nothing_but_the_attempt(turns: int, on_preempt: OnPreempt) -> None:
    cluster = Cluster(turns, [prefill_config()], [decode_config(on_preempt=on_preempt)])
    (d,), (p,) = cluster.ds, cluster.ps
    prompt = list(range(50))
    (serial,) = d.submit(submission(prompt, 5))
    for _ in range(turns):
        cluster.turn()
    cluster.lose(p, d)
    cluster.run()
    ended = d.ended[serial]
    if ended.reason is FinishReason.RESCHEDULE:
        assert on_preempt is OnPreempt.RESCHEDULE
        assert ended.fault is not None
        assert ended.fault.code in (PdCode.TIMEOUT, PdCode.NOT_DELIVERED)
        assert ended.fault.message.startswith("PD Error")
        assert d.outputs[serial] == []
    else:
        assert d.outputs[serial] == expected(prompt, 5)
    cluster.nothing_is_held()


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_cancel_at_any_moment_leaves_nothing_on_either_side(turns: int) -> None:
    cluster = Cluster(turns, [prefill_config()], [decode_config()])
    (d,) = cluster.ds
    (serial,) = d.submit(submission(list(range(50)), 5))
    for _ in range(turns):
        cluster.turn()
    d.cancel(serial)
    cluster.run()
    assert d.ended[serial].reason in (FinishReason.ABORT, FinishReason.LENGTH)
    cluster.nothing_is_held()


def test_asking_twice_gets_the_same_grant_and_ending_twice_is_ending_once() -> None:
    cluster = Cluster(9, [prefill_config()], [decode_config()], Rates(repeated=1.0))
    (d,) = cluster.ds
    (serial,) = d.submit(submission(list(range(50)), 5))
    cluster.run()
    assert d.outputs[serial] == expected(list(range(50)), 5)
    cluster.nothing_is_held()


def test_an_offer_of_nobody_knows_what_is_released_and_a_release_of_it_is_nothing() -> None:
    cluster = Cluster(10, [prefill_config()], [decode_config()])
    (d,), (p,) = cluster.ds, cluster.ps
    cluster.post(p, d.name, Offer(99, 1, 50))
    cluster.post(d, p.name, Release(98, 1, "nothing"))
    cluster.run()
    cluster.nothing_is_held()


@pytest.mark.parametrize("seed", one_in(5, range(30)))
def test_a_taker_without_room_refuses_at_once_and_asks_again_when_there_is_room(seed: int) -> None:
    """Its reserve is the running requests'; the offer was made when they were smaller."""
    config = decode_config(blocks=24, slots=2, reserve=ReservePolicy.NONE, handover=NO_LOCAL)
    cluster = Cluster(seed, [prefill_config()], [config])
    (d,) = cluster.ds
    prompts = [prompt_of(random.Random(f"{seed}{n}"), 50) for n in range(6)]
    serials = [d.submit(submission(prompt, 30, name=str(n)))[0] for n, prompt in enumerate(prompts)]
    cluster.run()
    for serial, prompt in zip(serials, prompts, strict=True):
        assert d.outputs[serial] == expected(prompt, 30)
    cluster.nothing_is_held()


def test_a_silent_giver_costs_a_lease_and_no_more() -> None:
    lease = HandoverConfig(lease_us=1_000_000, renew_us=100_000)
    cluster = Cluster(11, [prefill_config()], [decode_config(handover=lease)])
    (d,), (p,) = cluster.ds, cluster.ps
    (serial,) = d.submit(submission(list(range(50)), 5))
    while not d.worker.gauges().blocks.leased:
        cluster.turn()
    granted_us = cluster.now_us
    cluster.cut.add(frozenset((p.name, d.name)))  # nothing of it passes any more, and nobody says so
    while d.worker.gauges().blocks.leased or d.worker.gauges().blocks.receiving:
        if not cluster.turn():
            cluster.now_us = min(at for node in (p, d) if (at := node.worker.next_deadline()) is not None)
    assert cluster.now_us - granted_us <= lease.lease_us
    cluster.run()
    assert d.outputs[serial] == expected(list(range(50)), 5)
    assert d.worker.gauges().handovers.timed_out + d.worker.gauges().handovers.not_delivered == 1
    cluster.nothing_is_held()


def test_a_preempted_request_is_rescheduled_with_everything_it_was_given() -> None:
    config = decode_config(blocks=24, reserve=ReservePolicy.NONE, on_preempt=OnPreempt.RESCHEDULE, handover=NO_LOCAL)
    rescheduled = 0
    for seed in range(10):
        cluster = Cluster(seed, [prefill_config()], [config])
        (d,) = cluster.ds
        prompts = [prompt_of(random.Random(f"{seed}/{n}"), 40) for n in range(4)]
        serials = [d.submit(submission(prompt, 40, name=str(n)))[0] for n, prompt in enumerate(prompts)]
        cluster.run()
        for serial, prompt in zip(serials, prompts, strict=True):
            ended, answer = d.ended[serial], expected(prompt, 40)
            assert d.outputs[serial] == answer[: ended.generated_tokens]
            if ended.reason is FinishReason.RESCHEDULE:
                rescheduled += 1
                assert ended.fault is not None
                assert ended.fault.code in (PdCode.PREEMPTED, PdCode.REFUSED)
            else:
                assert d.outputs[serial] == answer
        cluster.nothing_is_held()
    assert rescheduled


def test_the_short_path_raises_by_name_where_its_precondition_is_broken() -> None:
    config = prefill_config()
    scheduler, held = prefill_scheduler(config, PrefixIndex(b"", b"", config.blocks))
    asked = submission(list(range(40)))
    serial = held.hold(asked, scheduler.keys_of(asked, asked.prompt), 41, 0)
    assert serial is not None
    slot = scheduler.request(serial).slot  # type: ignore[union-attr]
    scheduler.slots.held[slot] -= 1
    held.begin(serial)
    with pytest.raises(BlocksNotHeld, match="9 blocks of 4 for a prompt of 40 tokens"):
        scheduler.plan(0)


def test_the_whole_token_budget_goes_to_chunks_in_the_order_of_their_grants() -> None:
    config = prefill_config(step_tokens=32)
    scheduler, held = prefill_scheduler(config, PrefixIndex(b"", b"", config.blocks))
    for n in range(3):
        asked = submission([n] * 40, name=str(n))
        serial = held.hold(asked, scheduler.keys_of(asked, asked.prompt), 41, 0)
        assert serial is not None
        held.begin(serial)
    plans = [scheduler.plan(0) for _ in range(4)]
    chunks = [(chunk.slot, chunk.begin, chunk.end) for plan in plans if plan is not None for chunk in plan.chunks]
    assert [plan.tokens for plan in plans if plan is not None] == [32, 32, 32, 24]
    assert chunks == [(0, 0, 32), (0, 32, 40), (1, 0, 24), (1, 24, 40), (2, 0, 16), (2, 16, 40)]


@pytest.mark.parametrize("path", PrefillPath)
def test_only_tokens_that_are_not_cached_count_as_work_ahead(path: PrefillPath) -> None:
    """On both paths: else one of them offers fewer requests ahead, and fills its steps less."""
    config = prefill_config(prefill_path=path)
    scheduler, held = prefill_scheduler(config, PrefixIndex(b"", b"", config.blocks))
    asked = submission(list(range(40)))
    keys, cached = scheduler.keys_of(asked, asked.prompt), scheduler.pool.take(8)
    scheduler.pool.publish(keys[1:9], keys[:8], cached.tolist())
    scheduler.pool.drop(cached)
    serial = held.hold(asked, keys, 41, 0)
    assert serial is not None
    assert scheduler.unplanned(serial) == 40 - 8 * config.block_size


def test_a_state_refuses_moves_that_its_table_does_not_have() -> None:
    taker, giver = StateMachine(DECODE_TRANSITIONS, "a hand-over"), StateMachine(PREFILL_TRANSITIONS, "a hand-over")
    with pytest.raises(IllegalTransition, match="a hand-over in ASKED cannot take the move COMMIT"):
        taker.after(DecodeHandoverState.ASKED, DecodeHandoverMove.COMMIT)
    with pytest.raises(IllegalTransition, match="a hand-over in QUEUED cannot take the move COMMIT"):
        giver.after(PrefillHandoverState.QUEUED, PrefillHandoverMove.COMMIT)


def test_a_config_whose_renewals_cannot_save_a_lease_is_refused() -> None:
    with pytest.raises(BadConfig, match="renew_us"):
        HandoverConfig(lease_us=100, renew_us=60)


WORST = Rates(repeated=0.3, late=0.3, failed=0.08, flipped=0.01, torn=0.01)


def _random_world(seed: int) -> None:
    stream = random.Random(seed)
    handover = HandoverConfig(
        lease_us=stream.choice((50_000, 2_000_000)),
        renew_us=10_000,
        deadline_us=stream.choice((200_000, 60_000_000)),
        local_tokens=stream.choice((0, 4, 16)),
    )
    size = stream.choice((2, 4, 8))
    shape = {
        "block_size": size,
        "depth": stream.randint(1, 3),
        "step_tokens": stream.choice((8, 16, 64)),
        "handover": handover,
    }
    ps = [
        prefill_config(**shape, blocks=stream.choice((96, 160)) // size, prefill_path=stream.choice(tuple(PrefillPath)))
        for _ in range(stream.randint(1, 2))
    ]
    on_preempt = stream.choice(tuple(OnPreempt))
    ds = [
        decode_config(
            **shape, blocks=stream.choice((100, 160, 400)) // size, reserve=stream.choice(tuple(ReservePolicy)),
            on_preempt=on_preempt, prefix_cache=stream.random() < 0.8, max_preemptions=stream.choice((0, 2, 8)),
        )
        for _ in range(stream.randint(1, 3))
    ]  # fmt: skip
    cluster = Cluster(seed, ps, ds, WORST if stream.random() < 0.7 else None)
    asked: list[tuple[Node, Serial, list[int], Sampling]] = []
    common = prompt_of(stream, 30)
    for n in range(stream.randint(4, 12)):
        d = stream.choice(cluster.ds)
        prompt = ((common if stream.random() < 0.5 else []) + prompt_of(stream, 40))[:60]
        sampling = Sampling(seed=n, stop_token_ids=(1,) if stream.random() < 0.3 else ())
        samplings = [sampling] if stream.random() < 0.7 else [Sampling(n, choice) for choice in range(2)]
        group = [
            submission(prompt, stream.randint(1, 24), name=f"{n}.{c}", sampling=each, leader=f"{n}.0" if c else None)
            for c, each in enumerate(samplings)
        ]
        serials = d.submit(*group)
        asked += [(d, serial, prompt, item.sampling) for serial, item in zip(serials, group, strict=True)]
        for _ in range(stream.randint(0, 60)):
            cluster.turn()
        if stream.random() < 0.15:
            d.cancel(asked[-1][1])
        if stream.random() < 0.15:
            p, peer = stream.choice(cluster.ps), stream.choice(cluster.ds)
            cluster.lose(p, peer)
            if stream.random() < 0.7:
                cluster.join(p, peer)
    cluster.run()
    for d, serial, prompt, sampling in asked:
        ended = d.ended[serial]
        answer = expected(prompt, 24, sampling)
        assert d.outputs[serial] == answer[: len(d.outputs[serial])]
        assert ended.reason is not FinishReason.ERROR
        if ended.reason is FinishReason.RESCHEDULE:
            assert on_preempt is OnPreempt.RESCHEDULE
            assert ended.fault is not None
    cluster.nothing_is_held()


@pytest.mark.parametrize("seed", one_in(5, range(80)))
def test_any_mix_of_repeated_late_failed_and_spoilt_things_keeps_the_laws(seed: int) -> None:
    """Each event is followed by an audit of every law; the answers are exact, and at the end nothing is held."""
    _random_world(seed)


def test_phases_of_a_request_that_is_handed_over() -> None:
    cluster = Cluster(14, [prefill_config()], [decode_config()])
    (d,), (p,) = cluster.ds, cluster.ps
    (serial,) = d.submit(submission(list(range(50)), 5))
    seen: dict[PeerId, list[Phase]] = {p.name: [], d.name: []}
    while not d.worker.is_idle:
        cluster.turn()
        for node in (p, d):
            for request in node.worker.scheduler.requests():
                if not seen[node.name] or seen[node.name][-1] is not request.phase:
                    seen[node.name].append(request.phase)
    assert seen[d.name][1:3] == [Phase.RECEIVING, Phase.RUNNING_DECODE]
    assert seen[p.name][:2] == [Phase.RUNNING_PREFILL, Phase.HANDING_OVER]
    assert d.outputs[serial] == expected(list(range(50)), 5)


def test_takers_that_know_nothing_ask_one_giver_after_the_other() -> None:
    cluster = Cluster(31, [prefill_config(), prefill_config(), prefill_config()], [decode_config()])
    (d,) = cluster.ds
    for number in range(6):
        d.submit(submission(list(range(number, number + 50)), 2, name=str(number)))
        cluster.run()
    assert [p.worker.gauges().handovers.made for p in cluster.ps] == [2, 2, 2]


def test_a_giver_that_said_how_busy_it_is_is_asked_last_until_that_is_long_ago() -> None:
    cluster = Cluster(32, [prefill_config(), prefill_config()], [decode_config()])
    (d,), (busy, free) = cluster.ds, cluster.ps
    cluster.post(busy, d.name, Offer(99, 1, 50, queued_tokens=1_000_000))
    cluster.run()

    def made_after(*prompts: list[int]) -> tuple[int, int]:
        for prompt in prompts:
            d.submit(submission(prompt, 2, name=str(prompt[0])))
            cluster.run()
        return busy.worker.gauges().handovers.made, free.worker.gauges().handovers.made

    assert made_after(*([number] * 50 for number in range(3))) == (0, 3)
    cluster.now_us += 30 * BELIEF_HALVES_US
    assert made_after([7] * 50)[0] == 1
