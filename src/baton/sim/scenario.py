"""Scenarios of fuzzed worlds: drawn from a seed, less what a user or the shrinker leaves out.

Owns the draw of a cluster, its load and its faults. `fuzzed_run` runs it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from baton.core.config import (
    DECODE,
    MIXED,
    PREFILL,
    BringBack,
    HandoverConfig,
    OnPreempt,
    PrefillPath,
    ReservePolicy,
    Role,
    TierConfig,
    VictimPolicy,
    WorkerConfig,
)
from baton.core.engine.progress_watch import STALL_US
from baton.core.routing.config import RouterConfig, RoutingPolicy
from baton.executor.constraints.scripted_backend import ScriptedBackend
from baton.sim.client_requests import VOCABULARY, ClientRequest, draw_ask, restricted, with_prompt_logprobs
from baton.sim.faults import CLASSES, OF_COPIES, OF_STORAGE, FaultRates, draw_classes, draw_rates
from baton.sim.faulty_transfers import KvTimes
from baton.sim.instance_host import instance_name
from baton.sim.line_times import LineTimes
from baton.sim.storage_copies import CopyTimes
from baton.sim.store import StoreTimes
from baton.sim.world import stream_of

WITHOUT_ROUTER = (0, 1, 5)
"""Last digits of the seeds whose worlds have no router."""
BUNCHED_SHARE = 0.7
PROMPT_LOGPROBS_SHARE = 0.2
"""Share of worlds in which requests may ask for log-probabilities of their prompts."""
RESTRICTED_SHARE = 0.3
"""Worlds in which requests have constraints, allowed tokens or bad words."""
OTHER_BACKEND_VERSION = "2"
HOST_SHARE = 0.5
"""Share of worlds in which instances have host memory."""
STORE_SHARE = 0.6
"""Share of those that also have a store."""
ASKED_AGAIN_SHARE = 0.8
"""Share of requests that repeat one of a few prompts, in worlds with host memory."""
MIXED_SHARE = 0.4
"""Share of worlds in which all instances are mixed."""
SPLITS = (
    (DECODE, PREFILL, DECODE),
    (DECODE, PREFILL, PREFILL),
    (DECODE, PREFILL, MIXED),
    (DECODE, PREFILL, DECODE, DECODE),
    (DECODE, PREFILL, DECODE, PREFILL),
    (DECODE, PREFILL, DECODE, MIXED),
)
"""PREFILL comes second, so that a world trimmed to two instances still has both roles."""
HANDED_OVER_TOKENS = 20
"""A prompt long enough that an instance with a prefill peer does not prefill it itself."""
PLAIN_COPIES = CopyTimes(begin_us=100, block_us=20, jitter_us=0, stage_us=100, fence_us=500)
RENEWAL_SENT_US = 5_000
"""Allowance for a renewal of a lease to reach the other side."""
PLAIN_STORE = StoreTimes(delay_us=500, jitter_us=0, objects_max=1024)


@dataclass(frozen=True, slots=True)
class ScenarioTrim:
    """The fault classes, requests and instances to keep of a seed's world. None: all."""

    classes: tuple[str, ...] | None = None
    asks: tuple[int, ...] | None = None
    instances: int | None = None


@dataclass(frozen=True, slots=True)
class UserPlan:
    """One user: the time of the first request, and whether each prompt continues the conversation before it."""

    at_us: int
    converses: bool
    asks: tuple[ClientRequest, ...]


@dataclass(frozen=True, slots=True)
class FlatTimes:
    base_us: int
    token_us: int

    def step_us(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:  # noqa: ARG002
        return self.base_us + self.token_us * (decodes + prefill_tokens)


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    roles: tuple[Role, ...]
    classes: tuple[str, ...]
    rates: FaultRates
    config: WorkerConfig
    """Of the instances that serve clients."""
    giver: WorkerConfig
    """Of the instances that prefill for them."""
    kv: KvTimes
    layers: int
    times: FlatTimes
    line: LineTimes
    span_us: int
    users: tuple[UserPlan, ...]
    router: RouterConfig | None = None
    """None: clients use the simple front end."""
    copies: CopyTimes = PLAIN_COPIES
    """Between device and host memory, if there is any."""
    store: StoreTimes = PLAIN_STORE
    """Used only if `has_store`."""
    stall_us: int = STALL_US
    """Least limit for a step that does not end, behind a router."""

    @property
    def instances(self) -> int:
        return len(self.roles)

    def config_of(self, number: int) -> WorkerConfig:
        role = self.roles[number]
        config = replace(self.giver if role.gives else self.config, role=role)
        if not self.has_other_version(number):
            return config
        return replace(config, constraint_backends=((ScriptedBackend.name, OTHER_BACKEND_VERSION),))

    def has_other_version(self, number: int) -> bool:
        """Whether an instance has another version of the backend for constraints than clients' requests name."""
        skew, role = self.rates.version_skew, self.roles[number]
        return bool(skew) and (skew > 1 or number % 2 == 1) and not (role.gives or role.takes)

    def peers_of(self, number: int) -> tuple[str, ...]:
        """Every instance that takes hand-overs is a peer of every instance that gives them."""
        role = self.roles[number]
        return tuple(
            instance_name(other)
            for other, its in enumerate(self.roles)
            if (role.takes and its.gives) or (role.gives and its.takes)
        )

    def can_hand_over(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is always prefilled by a peer when there is no fault."""
        giver, handover, protected = self.giver, self.config.handover, not self.config.max_preemptions
        step_us = self.times.step_us(0, 0, min(tokens, giver.step_tokens), 0)
        steps = -(-tokens // giver.step_tokens) + giver.depth + 2
        pieces = -(-tokens // giver.block_size) * self.layers
        takes_us = 2 * steps * step_us + 2 * pieces * self.kv.piece_us
        in_time = takes_us + 50_000 < handover.deadline_us
        # A renewal that becomes due during a step is sent when the step ends.
        is_renewed = giver.handover.renew_us + step_us + RENEWAL_SENT_US <= handover.lease_us
        return tokens < giver.context_tokens and not protected and in_time and is_renewed

    @property
    def has_store(self) -> bool:
        return self.config.tiers.store or self.giver.tiers.store

    @property
    def looks_in_store(self) -> bool:
        """Whether every prefill of a new prompt looks in the store first, whatever it costs."""
        prefilling = [self.config_of(number) for number in range(self.instances)]
        return all(
            config.tiers.store and config.tiers.bring_back is BringBack.ALWAYS and config.context_tokens > HANDED_OVER_TOKENS
            for config in prefilling
        )

    @property
    def asks(self) -> tuple[int, ...]:
        """Indices of all requests."""
        return tuple(ask.index for user in self.users for ask in user.asks)


def draw_scenario(seed: int, trim: ScenarioTrim | None = None) -> Scenario:
    trim = trim or ScenarioTrim()
    stream = stream_of(seed, "scenario")
    roles = _draw_roles(seed)
    has_router = seed % 10 not in WITHOUT_ROUTER
    plain, splits = _draw_config(seed), any(role.takes for role in roles)
    config = _with_tiers(seed, plain, "of those that serve", optional=splits)
    giver = _with_tiers(seed, _draw_giver(seed, plain), "of those that prefill", optional=splits)
    classes = draw_classes(
        stream,
        splits,
        stream_of(seed, "of router") if has_router else None,
        _of_storage(seed, config, giver),
    )
    classes = classes if trim.classes is None else trim.classes
    rates = draw_rates({name: stream_of(seed, f"rates {name}") for name in CLASSES}, classes)
    span_us = stream.randint(400_000, 1_600_000)
    users = _draw_users(seed, config, rates, span_us)
    if trim.asks is not None:
        users = _only(users, trim.asks)
    shape = stream_of(seed, "times")
    carrying, stall_us = _draw_carrying(seed, classes)
    return Scenario(
        seed=seed,
        roles=_trimmed(roles, trim.instances),
        classes=classes,
        rates=rates,
        config=config,
        giver=giver,
        kv=_draw_kv_times(seed),
        layers=stream_of(seed, "layers").choice((1, 2, 2, 3)) if splits else 1,
        times=FlatTimes(shape.randint(3_000, 20_000), shape.randint(10, 500)),
        line=_draw_line(seed, classes, has_router=has_router),
        span_us=span_us,
        users=users,
        router=carrying if has_router else None,
        copies=_draw_copy_times(seed),
        store=_draw_store_times(seed),
        stall_us=stall_us,
    )


def _of_storage(seed: int, config: WorkerConfig, giver: WorkerConfig) -> tuple[random.Random, Sequence[str]] | None:
    """The stream and the names to draw storage fault classes from; None: no instance has host memory."""
    if not (config.tiers.host_rows or giver.tiers.host_rows):
        return None
    has_store = config.tiers.store or giver.tiers.store
    return stream_of(seed, "of storage"), OF_STORAGE if has_store else OF_COPIES


def _draw_carrying(seed: int, classes: tuple[str, ...]) -> tuple[RouterConfig, int]:
    """The configuration of the router, and the limit of its instances for a step that does not end."""
    stream = stream_of(seed, "router")
    crowded, ahead = stream.choice((4.0, 16.0)), stream.choice((0.5, 1.0, 2.0))
    drawn: dict[str, Any] = {
        "policy": stream.choice(tuple(RoutingPolicy)),
        "preempt_retry_count": stream.choice((0, 1, 3, 3, 16)),
        "preempt_retry_exclude_decode": stream.random() < 0.7,
        "loss_retry_count": stream.choice((0, 1, 8, 8, 8)),
        "backoff_us": stream.choice((1_000, 5_000, 20_000)),
        "backoff_us_max": stream.choice((20_000, 200_000)),
        "deadline_us": stream.choice((500_000, *(30_000_000,) * 7)),
        "absent_us": stream.choice((50_000, 500_000, 2_000_000, 2_000_000)),
        "waiting_max": stream.choice((4, 16, 1024)),
        "ahead": crowded if "crowding" in classes else ahead,
        "retry_rate": stream.choice((20.0, 200.0)),
        "retry_burst": stream.choice((1, 512, 512)),
        "suspect_us": stream.choice((400_000, 600_000)),
        "deaf_us": 700_000,
        "stall_us": stream.choice((50_000, 1_000_000)),
        "drain_us": stream.choice((20_000, 200_000, 1_000_000)),
        "orphan_grace_us": stream.choice((100_000, 600_000, 1_500_000)),
        "key_concurrency": stream.choice((*(None,) * 9, 6)),
        "key_tokens_per_minute": stream.choice((*(None,) * 9, 6_000)),
    }
    stall_us = drawn.pop("stall_us")
    return RouterConfig(**drawn), stall_us


def _draw_roles(seed: int) -> tuple[Role, ...]:
    stream = stream_of(seed, "roles")
    mixed, split = (MIXED,) * stream.choice((3, 3, 4)), stream.choice(SPLITS)
    return mixed if stream.random() < MIXED_SHARE else split


def _trimmed(roles: tuple[Role, ...], instances: int | None) -> tuple[Role, ...]:
    """The first `instances` roles; beyond their number, the last role is repeated."""
    return roles if instances is None else (roles + roles[-1:] * instances)[:instances]


def _draw_giver(seed: int, config: WorkerConfig) -> WorkerConfig:
    """The configuration of instances that prefill: other sizes, the same block size, at times a shorter context."""
    stream = stream_of(seed, "giver")
    slots, short = stream.randint(1, 6), stream.random() < 0.1
    context = config.context_tokens // 2 if short else config.context_tokens
    return replace(
        config,
        slots=slots,
        context_tokens=context,
        blocks=int(-(-context // config.block_size) * stream.choice((1.0, 1.1, 1.6, 3.0))),
        step_tokens=slots * config.burst + stream.choice((0, 2, 8, 32)),
        constrained_burst=0,
        depth=stream.randint(1, 3),
        waiting_max=stream.choice((1, 3, 64)),
        prefix_cache=stream.random() < 0.8,
        prefill_path=stream.choice(tuple(PrefillPath)),
    )


def _with_tiers(seed: int, config: WorkerConfig, who: str, *, optional: bool) -> WorkerConfig:
    """Add host memory of 0.1 to 4 times the pool, and time limits that hold without faults but not with them.

    `optional`: other instances of the world may have host memory instead.
    """
    world, stream = stream_of(seed, "storage"), stream_of(seed, f"tiers {who}")
    has_host, has_store = world.random() < HOST_SHARE, world.random() < STORE_SHARE
    without, rows = stream.random() < 0.1 and optional, int(config.blocks * stream.choice((0.1, 0.4, 1.0, 2.0, 4.0)))
    retry_us = stream.choice((5_000, 50_000, 200_000))
    tiers = TierConfig(
        host_rows=max(1, rows),
        store=has_store,
        save_preempted=stream.random() < 0.9,
        save_finished=stream.random() < 0.8,
        cache_outputs=stream.random() < 0.8,
        bring_back=stream.choice((BringBack.ALWAYS, BringBack.ALWAYS, BringBack.ALWAYS, BringBack.CHEAPEST)),
        transfer_blocks=stream.choice((1, 4, 8, 16)),
        transfers_max=stream.choice((1, 2, 8)),
        copy_us=stream.choice((5_000, 30_000, 200_000)),
        look_us=stream.choice((3_000, 10_000, 50_000)),
        get_us=stream.choice((5_000, 20_000, 100_000)),
        put_us=stream.choice((5_000, 30_000, 300_000)),
        depart_us=stream.choice((3_000, 20_000, 100_000)),
        failures_max=stream.choice((1, 2, 3, 3)),
        retry_us=retry_us,
        retry_us_max=retry_us * stream.choice((1, 4)),
    )
    pools = (1.1, 1.4, 10.0) if optional else (1.0, 1.0, 1.05, 1.2)
    narrow = int(-(-config.context_tokens // config.block_size) * stream.choice(pools))
    if without or not has_host:
        return config
    return replace(config, prefix_cache=True, tiers=tiers, blocks=min(config.blocks, narrow))


def _draw_copy_times(seed: int) -> CopyTimes:
    stream = stream_of(seed, "copy times")
    return CopyTimes(
        begin_us=stream.choice((20, 100, 1_000)),
        block_us=stream.choice((2, 20, 200)),
        jitter_us=stream.choice((0, 500, 5_000)),
        stage_us=stream.choice((50, 1_000)),
        fence_us=stream.choice((100, 1_000, 5_000)),
    )


def _draw_store_times(seed: int) -> StoreTimes:
    stream = stream_of(seed, "store times")
    return StoreTimes(
        delay_us=stream.choice((100, 500, 2_000)),
        jitter_us=stream.choice((0, 1_000, 5_000)),
        objects_max=stream.choice((8, 64, 1_024)),
    )


def _draw_handover(seed: int) -> HandoverConfig:
    stream = stream_of(seed, "hand-over")
    lease_us = stream.choice((40_000, 120_000, 400_000, 1_000_000))
    renew_us = lease_us // stream.choice((2, 4))
    deadline_us = stream.choice((150_000, 600_000, 2_000_000, 60_000_000))
    stream.choice((1_000, 20_000, 100_000))  # unused; without this draw all recorded seeds would be of other worlds
    local_tokens = stream.choice((0, 0, 1, 4, 16))
    return HandoverConfig(lease_us=lease_us, renew_us=renew_us, deadline_us=deadline_us, local_tokens=local_tokens)


def _draw_kv_times(seed: int) -> KvTimes:
    stream = stream_of(seed, "kv times")
    return KvTimes(
        delay_us=stream.choice((50, 300, 2_000)),
        jitter_us=stream.choice((0, 500, 5_000)),
        piece_us=stream.choice((5, 50, 500)),
        burst=stream.choice((1, 4, 16)),
        verify_us=stream.choice((10, 1_000)),
        fence_us=stream.choice((100, 1_000, 5_000)),
        pulls=stream.random() < 0.5,
    )


def _draw_line(seed: int, classes: tuple[str, ...], *, has_router: bool) -> LineTimes:
    """Limits long enough to fail only on a reset, or short ones; narrow lines hold a few frames."""
    stream = stream_of(seed, "line")
    narrow = stream.choice((200, 500, 2_000)), stream.choice((6_000, 12_000, 40_000))
    wide = stream.choice((1 << 14, 1 << 16)), 1 << 20
    window_bytes, unread_bytes_max = narrow if "narrow-line" in classes else wide
    return LineTimes(
        handshake_us=stream.choice((100_000, 300_000)),
        heartbeat_us=80_000,
        silent_us=stream.choice((200_000, 300_000, 800_000)),
        unacknowledged_us=stream.choice((300_000, 1_500_000, 1_500_000) if has_router else (150_000, 300_000, 1_000_000)),
        connect_us=stream.choice((50_000, 200_000)),
        window_bytes=window_bytes,
        unread_bytes_max=unread_bytes_max,
        retry_us=stream.choice((2_000, 10_000)),
        retry_us_max=stream.choice((20_000, 80_000)),
    )


def _draw_config(seed: int) -> WorkerConfig:
    stream = stream_of(seed, "config")
    block_size = stream.choice((1, 2, 4, 4, 8))
    burst = stream.choice((1, 1, 1, 2, 3))
    burst = min(burst, block_size)
    slots = stream.randint(2, 6)
    context = stream.randint(32, 56)
    whole = -(-context // block_size)
    return _with_forced_tokens(
        seed,
        WorkerConfig(
            slots=slots,
            blocks=int(whole * stream.choice((1.0, 1.05, 1.1, 1.3, 1.6, 3.0))),
            block_size=block_size,
            context_tokens=context,
            step_tokens=slots * burst + stream.choice((0, 2, 8, 32)),
            burst=burst,
            constraint_backends=((ScriptedBackend.name, ScriptedBackend.version),),
            depth=stream.randint(1, 3),
            waiting_max=stream.choice((3, 8, 64)),
            prefix_cache=stream.random() < 0.8,
            reserve=stream.choice(tuple(ReservePolicy)),
            ratio_decay=stream.choice((0.001, 0.02)),
            victims=stream.choice(tuple(VictimPolicy)),
            max_preemptions=stream.randint(0, 8),
            on_preempt=stream.choice((OnPreempt.RESUME, OnPreempt.RESUME, OnPreempt.RESCHEDULE)),
            handover=_draw_handover(seed),
        ),
    )


def _with_forced_tokens(seed: int, config: WorkerConfig) -> WorkerConfig:
    """At times more tokens a step for requests with a constraint, as far as blocks and steps have room for them."""
    drawn = stream_of(seed, "forced").choice((0, 2, 3, 4))
    return replace(config, constrained_burst=min(drawn, config.block_size, config.step_tokens // config.slots))


def _draw_users(seed: int, config: WorkerConfig, rates: FaultRates, span_us: int) -> tuple[UserPlan, ...]:
    """At least 40 requests: an open loop, users who wait for each answer, and conversations."""
    stream = stream_of(seed, "users")
    indices = count()

    def asks(number: int) -> tuple[ClientRequest, ...]:
        drawn = (draw_ask(stream_of(seed, f"ask {index}"), index, config, rates, seed) for index in islice(indices, number))
        asked: Iterable[ClientRequest] = drawn
        if stream_of(seed, "prompts").random() < PROMPT_LOGPROBS_SHARE:
            asked = (with_prompt_logprobs(ask, stream_of(seed, f"prompt {ask.index}")) for ask in drawn)
        if stream_of(seed, "restricted").random() >= RESTRICTED_SHARE:
            return tuple(asked)
        return tuple(restricted(stream_of(seed, f"restricted {ask.index}"), ask) for ask in asked)

    arrivals_us = 0.7 * span_us / rates.overload
    passing = [UserPlan(at_us, False, asks(1)) for at_us in _arrivals(stream, int(arrivals_us))]
    patient = [UserPlan(stream.randrange(span_us // 4), False, asks(4)) for _ in range(2)]
    talking = [UserPlan(stream.randrange(span_us // 3), True, asks(4)) for _ in range(2)]
    if not config.tiers.host_rows:
        return (*passing, *patient, *talking)
    again = _asking_again(stream_of(seed, "asked again"), [*passing, *patient], config.sequence_tokens_max)
    return (*again, *talking)


def _asking_again(stream: random.Random, users: list[UserPlan], longest: int) -> list[UserPlan]:
    """Repeat a few long prompts, together larger than a pool, so that saved KV is used again."""
    tokens = min(20, longest // 2)
    prompts = [tuple(stream.randrange(VOCABULARY) for _ in range(tokens)) for _ in range(stream.randint(2, 4))]

    def like_others(ask: ClientRequest, prompt: tuple[int, ...], drawn: float) -> ClientRequest:
        if ask.impossible or drawn > ASKED_AGAIN_SHARE:
            return ask
        room = longest - tokens
        return replace(ask, prompt=prompt, max_tokens=min(room, ask.max_tokens or room))

    return [
        replace(user, asks=tuple(like_others(ask, stream.choice(prompts), stream.random()) for ask in user.asks))
        for user in users
    ]


def _arrivals(stream: random.Random, span_us: int) -> list[int]:
    """Arrival times of an open loop: uniform, or in bunches as from batch jobs."""
    # `random`, not `randrange`: the number of draws must not depend on the span.
    bunches = [int(stream.random() * span_us) for _ in range(stream.randint(2, 4))]
    bunched = stream.random() < BUNCHED_SHARE
    times = [
        (int(stream.random() * span_us), stream.choice(bunches) + stream.randrange(20_000))
        for _ in range(stream.randint(24, 27))
    ]
    return [in_bunch if bunched else evenly for evenly, in_bunch in times]


def _only(users: tuple[UserPlan, ...], kept: tuple[int, ...]) -> tuple[UserPlan, ...]:
    left = (replace(user, asks=tuple(ask for ask in user.asks if ask.index in kept)) for user in users)
    return tuple(user for user in left if user.asks)
