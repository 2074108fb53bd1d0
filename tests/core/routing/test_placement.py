"""Where requests go, what is known of prefixes, and what a tenant may use."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.engine.change_journal import CachedKeysChanged
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import FinishReason, frozen_tokens
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.config import RouterConfig, RoutingPolicy
from baton.core.routing.events import Heartbeat, HeartbeatCame, InstanceLost, SendAttempt, Session
from baton.core.routing.prefix_directory import ASSUMED_US, PrefixDirectory
from baton.core.routing.rate_limits import TENANTS_MAX, RateLimits, TokenBucket
from tests.support.routing import BLOCK_SIZE, PREEMPTED, SECRET, Bench, ended, facts, submission

A, B, C = Session(1), Session(2), Session(3)


def keys(first: int, tokens: int) -> tuple[bytes, ...]:
    index = PrefixIndex(SECRET, b"model", 0)
    return tuple(index.keys_of(frozen_tokens(range(first, first + tokens)), b"", BLOCK_SIZE)[1:])


def placed(bench: Bench, first: int, tokens: int = 160) -> str:
    bench.arrive(submission(f"r{bench.now_us}/{bench._bodies}", tokens, first=first))
    return str(bench.router.fleet.members[bench.sent().session].name)


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_goes_where_its_prefix_is() -> None:
    bench = Bench()
    for name in "abc":
        bench.join(facts(name))
    bench.named("b", *keys(7, 160)[:6])
    bench.named("c", *keys(7, 160)[:3])
    assert placed(bench, 7) == "b"


def test_a_prefix_does_not_outweigh_a_long_line() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(facts(name))
    bench.named("b", *keys(7, 160)[:3])
    for number in range(4):
        bench.named("b", *keys(1000 * number + 1000, 160))
        assert placed(bench, 1000 * number + 1000) == "b", "session affinity"
    assert placed(bench, 7) == "a"


def test_what_was_placed_somewhere_is_expected_to_be_there() -> None:
    bench = Bench()
    for name in "abc":
        bench.join(facts(name))
    first = placed(bench, 7)
    other = placed(bench, 5000)
    assert other != first
    assert placed(bench, 7) == first


def test_prefill_that_waits_at_an_instance_weighs_until_its_first_token_comes() -> None:
    bench = Bench()
    bench.join(facts("a"))
    bench.join(facts("b"))
    bench.arrive(submission("long", 900, first=10))
    long = bench.sent()
    assert {placed(bench, 3000 + number * 500) for number in range(2)} == {"b"}
    bench.take(long)
    bench.came(long, 1)
    assert [view.prefill_tokens for view in bench.router.views()] == [0, 320]
    assert placed(bench, 9000) == "a"


def test_a_pool_that_cannot_hold_it_is_avoided() -> None:
    bench = Bench()
    for name in "ab":
        bench.join(facts(name))
    bench.named("a", *keys(7, 160)[:8])
    bench.tell(
        HeartbeatCame(
            bench.sessions["a"], Heartbeat(SchedulerGauges(free_blocks=0, evictable_blocks=1, running_blocks=255), 0, True)
        )
    )
    assert placed(bench, 7) == "b"


POOLS = st.tuples(st.integers(0, 6), st.integers(0, 1))
"""Free blocks, and requests that wait for some. 40 tokens and an answer of one take three."""


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(home=POOLS, others=st.lists(POOLS, min_size=2, max_size=2), excludes=st.booleans())
def test_who_had_to_yield_goes_where_there_is_room_or_back(
    home: tuple[int, int], others: list[tuple[int, int]], excludes: bool
) -> None:
    bench = Bench(RouterConfig(preempt_retry_exclude_decode=excludes, policy=RoutingPolicy.ROUND_ROBIN))
    for name in "abc":
        bench.join(facts(name))
    pools = dict(zip("abc", [home, *others], strict=True))
    _, send = bench.open(submission("x"))
    assert send.session == bench.sessions["a"]
    bench.ledgers = {
        name: SchedulerGauges(free_blocks=free, running_blocks=256 - free, waiting=waits)
        for name, (free, waits) in pools.items()
    }
    bench.came(send, 1, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
    bench.pass_us(1_000_000)
    went = next(name for name, session in bench.sessions.items() if session == bench.sent().session)
    roomy = [name for name, (free, waits) in pools.items() if free >= 3 and not waits and not (excludes and name == "a")]
    assert went in (roomy or ["a"])


def test_a_prompt_goes_only_where_it_fits_and_the_largest_says_why_if_nowhere() -> None:
    bench = Bench()
    bench.join(facts("a", context=128))
    bench.join(facts("b", context=512))
    bench.arrive(*[submission("x", 40, max_tokens=100)] * 1)
    assert bench.sent().session == bench.sessions["b"]
    bench.arrive(submission("y", 600, max_tokens=100))
    assert bench.sent().session == bench.sessions["b"]


def test_ties_go_to_whoever_was_chosen_least_recently() -> None:
    bench = Bench(RouterConfig(ahead=100))
    for name in "abc":
        bench.join(facts(name, slots=100))
    assert [placed(bench, 1000 * number) for number in range(6)] == list("abcabc")


def test_round_robin_goes_round_whatever_is_known() -> None:
    bench = Bench(RouterConfig(policy=RoutingPolicy.ROUND_ROBIN))
    for name in "abc":
        bench.join(facts(name))
    bench.named("a", *keys(7, 160))
    assert [placed(bench, 7) for _ in range(6)] == list("abcabc")


@pytest.mark.parametrize("policy", [RoutingPolicy.RANDOM, RoutingPolicy.POWER_OF_TWO])
def test_draws_are_spread_and_the_same_again(policy: RoutingPolicy) -> None:
    def run() -> list[str]:
        bench = Bench(RouterConfig(policy=policy, ahead=100))
        for name in "abcd":
            bench.join(facts(name, slots=64))
        return [placed(bench, 7) for _ in range(200)]

    order = run()
    assert order == run()
    spread = Counter(order)
    assert min(spread.values()) > 30, spread
    if policy is RoutingPolicy.POWER_OF_TWO:
        assert max(spread.values()) - min(spread.values()) <= 10, "the less loaded of two"


def test_who_prefills_is_chosen_by_prefix_and_by_what_waits_there() -> None:
    bench = Bench()
    bench.join(facts("d", "decode", slots=16))
    bench.join(facts("p", "prefill"))
    bench.join(facts("q", "prefill"))
    bench.named("q", *keys(7, 160)[:8])

    def giver(first: int) -> str:
        bench.arrive(submission(f"r{bench._bodies}", 160, first=first))
        return bench.sent().group[0].prefill_at

    assert giver(7) == "q:7000"
    assert giver(3000) == "p:7000"
    assert giver(6000) == "q:7000", "160 tokens wait at p, and 32 at q"


def test_a_mixed_instance_competes_with_those_that_decode_for_it() -> None:
    bench = Bench()
    bench.join(facts("d", "decode"))
    bench.join(facts("m"))
    bench.join(facts("p", "prefill"))
    bench.named("m", *keys(7, 160))
    assert placed(bench, 7) == "m"
    bench.tell(InstanceLost(bench.sessions["m"], "reset"))
    assert placed(bench, 7) == "d"


def test_decoders_without_anybody_who_prefills_do_it_themselves() -> None:
    bench = Bench()
    bench.join(facts("d", "decode"))
    bench.arrive(submission("x"))
    assert bench.sent().group[0].prefill_at == ""
    assert [view.prefill_tokens for view in bench.router.views()] == [40]


@pytest.mark.parametrize("code", [PdCode.TIMEOUT, PdCode.NOT_DELIVERED])
def test_after_two_hand_overs_in_vain_a_request_is_prefilled_where_it_decodes(code: PdCode) -> None:
    bench = Bench()
    bench.join(facts("d", "decode"))
    bench.join(facts("p", "prefill"))
    bench.open(submission("x"))
    late = ended(FinishReason.RESCHEDULE, PdFault(code, PdStage.PREFILL, "no KV came"))

    def prefilled_at() -> str:
        (send,) = list(bench.of(SendAttempt)) or [i for i in bench.pass_us(10**6) if isinstance(i, SendAttempt)]
        bench.take(send)
        bench.came(send, end=late)
        return send.group[0].prefill_at

    bench.came(bench.ever(SendAttempt)[-1], end=late)
    assert [prefilled_at(), prefilled_at()] == ["p:7000", ""]


def test_a_preemption_is_no_hand_over_in_vain() -> None:
    bench = Bench()
    bench.join(facts("d", "decode"))
    bench.join(facts("p", "prefill"))
    _, send = bench.open(submission("x"))
    for token in (1, 2):
        bench.came(send, token, end=ended(FinishReason.RESCHEDULE, PREEMPTED))
        (send,) = [item for item in bench.pass_us(10**6) if isinstance(item, SendAttempt)]
        bench.take(send)
        assert send.group[0].prefill_at == "p:7000"


def test_a_body_that_fits_nowhere_yet_does_not_hold_up_those_behind_it() -> None:
    bench = Bench(RouterConfig(ahead=1))
    bench.join(facts("small", slots=1, context=128))
    bench.join(facts("big", slots=1, context=512))
    bench.arrive(submission("a", 300))
    bench.arrive(submission("b", 300))
    assert not bench.of(SendAttempt)
    bench.arrive(submission("c", 20, max_tokens=10))
    assert bench.sent().session == bench.sessions["small"]


# ── holdings ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def holdings(*sessions: Session, blocks: int = 100) -> PrefixDirectory:
    held = PrefixDirectory()
    for session in sessions:
        held.open(session, blocks)
    return held


def test_one_walk_finds_the_longest_prefix_of_everybody() -> None:
    held, names = holdings(A, B, C), [bytes([n]) for n in range(6)]
    held.hear(A, CachedKeysChanged(named=tuple(names[:4])))
    held.hear(B, CachedKeysChanged(named=(names[0], names[1], names[3])))
    held.hear(C, CachedKeysChanged(named=(names[1],)))
    assert held.longest(names) == {A: 4, B: 2}
    assert held.longest(names[:2]) == {A: 2, B: 2}
    assert held.longest([]) == {}
    assert held.longest(names[5:]) == {}


def test_what_is_forgotten_said_afresh_or_of_an_ended_session_is_not_believed() -> None:
    held, names = holdings(A, B), [bytes([n]) for n in range(4)]
    held.hear(A, CachedKeysChanged(named=tuple(names)))
    held.hear(B, CachedKeysChanged(named=tuple(names)))
    held.hear(A, CachedKeysChanged(forgotten=(names[2], b"never said")))
    assert held.longest(names) == {A: 2, B: 4}
    held.hear(B, CachedKeysChanged(fresh=True, named=(names[0],)))
    assert held.longest(names) == {A: 2, B: 1}
    held.close(A)
    assert held.longest(names) == {B: 1}
    held.close(B)
    assert len(held) == 0
    held.open(C, 10)
    assert held.longest(names) == {}, "a bit is used again, what it meant is not"


def test_an_instance_is_believed_to_hold_no_more_than_its_pool() -> None:
    held, names = holdings(A, blocks=3), [bytes([n]) for n in range(5)]
    held.hear(A, CachedKeysChanged(named=tuple(names)))
    assert len(held) == 3
    assert [bool(held.longest([name])) for name in names] == [False, False, True, True, True]
    held.assume(A, names, 0)
    assert [bool(held.longest([name])) for name in names] == [True, True, True, True, True]
    held.assume(A, [b"x", b"y"], 0)
    assert held.longest([b"x"]) == {}


def test_an_assumption_is_over_in_time_unless_it_was_made_again() -> None:
    held, names = holdings(A, B), [bytes([n]) for n in range(3)]
    held.assume(A, names, 0)
    held.assume(B, names[:2], 0)
    held.assume(A, names[:1], 500)
    held.hear(B, CachedKeysChanged(named=(names[0],)))
    held.expire(ASSUMED_US - 1)
    assert held.longest(names) == {A: 3, B: 2}
    held.expire(ASSUMED_US)
    assert held.longest(names) == {A: 1, B: 1}
    held.close(A)
    held.expire(ASSUMED_US + 500)
    assert held.longest(names) == {B: 1}


# ── quota ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_may_be_overdrawn_and_is_paid_back_by_waiting() -> None:
    bucket = TokenBucket(10, 2, now_us=0)
    bucket.take(16, 0)
    assert bucket.debt_us(0) == 3_000_000
    assert bucket.debt_us(1_000_000) == 2_000_000
    assert bucket.level(4_000_000) == 2
    assert bucket.level(3_000_000) == 2, "time never runs back"
    assert bucket.level(60_000_000) == 10


def test_a_declined_body_is_not_charged() -> None:
    quota = RateLimits(RouterConfig(key_tokens_per_minute=100))
    assert quota.admit("t", 1, 100, 0) is None
    refusal = quota.admit("t", 1, 1, 0)
    assert refusal is not None
    assert refusal.code is RefusalCode.RATE_LIMITED
    quota.give_back("t", 100)
    quota.close("t", 0, 0)
    assert quota.admit("t", 1, 100, 0) is None
    assert quota._tenants["t"].open == 1


def test_tenants_without_limits_are_not_remembered_and_others_are_bounded() -> None:
    free = RateLimits(RouterConfig())
    assert free.admit("t", 99, 10**9, 0) is None
    assert not free._tenants
    bound = RateLimits(RouterConfig(key_concurrency=1))
    for number in range(TENANTS_MAX + 100):
        assert bound.admit(f"t{number}", 1, 1, 0) is None
        if number:
            bound.close(f"t{number}", 1, 0)
    assert len(bound._tenants) <= TENANTS_MAX
    assert bound.admit("t0", 1, 1, 0) is not None
