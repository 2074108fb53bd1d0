"""One fuzzed world: everything about it follows from a seed, less what a user (or the shrinker) leaves out.

Owns the draw of a cluster, its load and its faults, the two phases, and the verdict:

    chaos    requests arrive, faults happen; safety laws after each event
    heal     no fault any more; every open request must end within a bound, every instance must serve again (each is
             asked one more question), and then nothing may be held
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice

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
from baton.core.routing.events import Policy, RouterConfig
from baton.core.tiers.transfers import Haul
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor
from baton.sim.asks import VOCABULARY, Ask, draw_ask, probe_ask
from baton.sim.chaos import Chaos
from baton.sim.clients import Entrance, User
from baton.sim.faults import CLASSES, OF_COPIES, OF_STORAGE, Fault, Rates, draw_classes, draw_rates
from baton.sim.fleets import Fleet
from baton.sim.front import Front, OneInstance
from baton.sim.gate import Gate
from baton.sim.instance import Instance, InstanceSpec
from baton.sim.judge import Judge, as_law
from baton.sim.laws import DEADLOCK, LIVENESS, RECOVERY, LawBroken
from baton.sim.legs import LegBook
from baton.sim.lines import LineEnd, Links
from baton.sim.network import Network
from baton.sim.porters import CopyTimes, Depot
from baton.sim.seats import FRONT, Seat, seat_name
from baton.sim.store import Store, StoreTimes
from baton.sim.transfer import Fabric, KvTimes
from baton.sim.upheaval import Upheaval
from baton.sim.world import Host, World, stream_of
from baton.wire.link import LinkConfig

EVENTS_MAX = 200_000
BOOTED_US = 30_000
"""Nobody asks before the instances had time to start."""
HEALED_WITHIN_US = 20_000_000
RECOVERED_WITHIN_US = 10_000_000
QUIET_WITHIN_US = 10_000_000
STANDSTILL_US = 3_000_000
"""Nothing but signs of life for so long, while somebody waits, is a deadlock."""
PEER_DEAD_US = 3_000_000
"""So long after an instance died nothing may be held for it."""
WITHOUT_ROUTER = (0, 1, 5)
"""Seeds that end so have a world without a router."""
BUNCHED_SHARE = 0.7
HOST_SHARE = 0.5
"""Of worlds: instances have host memory."""
STORE_SHARE = 0.6
"""Of those: there is a store behind it."""
ASKED_AGAIN_SHARE = 0.8
"""Of questions where there is host memory: somebody else has asked, or will ask, the same."""
MIXED_SHARE = 0.4
"""Of worlds in which nobody prefills for anybody."""
SPLITS = (
    (DECODE, PREFILL, DECODE),
    (DECODE, PREFILL, PREFILL),
    (DECODE, PREFILL, MIXED),
    (DECODE, PREFILL, DECODE, DECODE),
    (DECODE, PREFILL, DECODE, PREFILL),
    (DECODE, PREFILL, DECODE, MIXED),
)
"""Those that prefill come second, so that a world that is cut down to two instances still has both kinds."""
HANDED_OVER_TOKENS = 20
"""A prompt that no instance prefills by itself where another does that for it."""
UNBOUNDED = 1 << 30
SUSPECTED_WITHIN_US = 200_000
"""Beyond the time that a router waits for a sign of life: what was under way arrives late."""
SAID_WITHIN_US = 350_000
IMPATIENT_US = 1_000_000
PLAIN_COPIES = CopyTimes(begin_us=100, block_us=20, jitter_us=0, stage_us=100, fence_us=500)
PLAIN_STORE = StoreTimes(delay_us=500, jitter_us=0, objects_max=1024)
PROBE_FROM = 1_000_000
"""Indices of the questions that are asked when everything has healed."""


@dataclass(frozen=True, slots=True)
class Trim:
    """What to leave out of a seed's world. None: nothing."""

    classes: tuple[str, ...] | None = None
    asks: tuple[int, ...] | None = None
    instances: int | None = None


@dataclass(frozen=True, slots=True)
class UserPlan:
    """A user to be: when the first ask comes, and whether each prompt goes on from the answer before."""

    at_us: int
    converses: bool
    asks: tuple[Ask, ...]


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
    rates: Rates
    config: WorkerConfig
    """Of those that serve clients."""
    giver: WorkerConfig
    """Of those that prefill for them."""
    kv: KvTimes
    layers: int
    times: FlatTimes
    link: LinkConfig
    span_us: int
    users: tuple[UserPlan, ...]
    router: RouterConfig | None = None
    """None: clients speak to the instances, as to a front end that only spreads them."""
    copies: CopyTimes = PLAIN_COPIES
    """Between device and host memory, where there is some."""
    store: StoreTimes = PLAIN_STORE
    """Where there is one."""

    @property
    def instances(self) -> int:
        return len(self.roles)

    def config_of(self, number: int) -> WorkerConfig:
        role = self.roles[number]
        return replace(self.giver if role.gives else self.config, role=role)

    def peers_of(self, number: int) -> tuple[str, ...]:
        """Everybody who takes has to do with everybody who gives."""
        role = self.roles[number]
        return tuple(
            seat_name(other)
            for other, its in enumerate(self.roles)
            if (role.takes and its.gives) or (role.gives and its.takes)
        )

    def can_hand_over(self, tokens: int) -> bool:
        """Whether nothing but a fault can keep a prompt of so many tokens from being prefilled elsewhere."""
        giver, protected = self.giver, not self.config.max_preemptions
        steps = -(-tokens // giver.step_tokens) + giver.depth + 2
        pieces = -(-tokens // giver.block_size) * self.layers
        takes_us = 2 * steps * self.times.step_us(0, 0, min(tokens, giver.step_tokens), 0) + 2 * pieces * self.kv.piece_us
        in_time = takes_us + 50_000 < self.config.handover.deadline_us
        return tokens < giver.context_tokens and not protected and in_time

    @property
    def has_store(self) -> bool:
        return self.config.tiers.store or self.giver.tiers.store

    @property
    def looks_in_store(self) -> bool:
        """Whether whoever prefills something new asks the store for it first, whatever that costs."""
        prefilling = [self.config_of(number) for number in range(self.instances)]
        return all(
            config.tiers.store and config.tiers.bring_back is BringBack.ALWAYS and config.context_tokens > HANDED_OVER_TOKENS
            for config in prefilling
        )

    @property
    def asks(self) -> tuple[int, ...]:
        """Their indices."""
        return tuple(ask.index for user in self.users for ask in user.asks)


@dataclass(frozen=True, slots=True)
class Verdict:
    seed: int
    broken: LawBroken | None
    digest: str
    events: int
    virtual_us: int
    asks: int
    fired: Counter[str]
    moves: Counter[str]
    ends: Counter[str]
    story: tuple[str, ...]
    scenario: Scenario


def draw_scenario(seed: int, trim: Trim | None = None) -> Scenario:
    trim = trim or Trim()
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
    rates = draw_rates({name: stream_of(seed, f"rates {name}") for name in (*CLASSES, "late")}, classes)
    span_us = stream.randint(400_000, 1_600_000)
    users = _draw_users(seed, config, rates, span_us)
    if trim.asks is not None:
        users = _only(users, trim.asks)
    shape = stream_of(seed, "times")
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
        link=_draw_line(seed, classes) if has_router else _draw_link(seed, classes),
        span_us=span_us,
        users=users,
        router=_draw_carrying(seed, classes) if has_router else None,
        copies=_draw_copy_times(seed),
        store=_draw_store_times(seed),
    )


def _of_storage(seed: int, config: WorkerConfig, giver: WorkerConfig) -> tuple[random.Random, Sequence[str]] | None:
    """From what to draw which of the faults of KV outside the pool; None: there is none."""
    if not (config.tiers.host_rows or giver.tiers.host_rows):
        return None
    has_store = config.tiers.store or giver.tiers.store
    return stream_of(seed, "of storage"), OF_STORAGE if has_store else OF_COPIES


def _draw_carrying(seed: int, classes: tuple[str, ...]) -> RouterConfig:
    stream = stream_of(seed, "router")
    crowded, ahead = stream.choice((4.0, 16.0)), stream.choice((0.5, 1.0, 2.0))
    return RouterConfig(
        policy=stream.choice(tuple(Policy)),
        preempt_retry_count=stream.choice((0, 1, 3, 3, 16)),
        preempt_retry_exclude_decode=stream.random() < 0.7,
        loss_retry_count=stream.choice((0, 1, 8, 8, 8)),
        backoff_us=stream.choice((1_000, 5_000, 20_000)),
        backoff_us_max=stream.choice((20_000, 200_000)),
        deadline_us=stream.choice((500_000, *(30_000_000,) * 7)),
        absent_us=stream.choice((50_000, 500_000, 2_000_000, 2_000_000)),
        waiting_max=stream.choice((4, 16, 1024)),
        ahead=crowded if "crowding" in classes else ahead,
        retry_rate=stream.choice((20.0, 200.0)),
        retry_burst=stream.choice((1, 512, 512)),
        suspect_us=stream.choice((400_000, 600_000)),
        stuck_us=stream.choice((300_000, 60_000_000)),
        drain_us=stream.choice((20_000, 200_000, 1_000_000)),
        orphan_grace_us=stream.choice((100_000, 600_000, 1_500_000)),
        key_concurrency=stream.choice((*(None,) * 9, 6)),
        key_tokens_per_minute=stream.choice((*(None,) * 9, 6_000)),
    )


def _draw_roles(seed: int) -> tuple[Role, ...]:
    stream = stream_of(seed, "roles")
    mixed, split = (MIXED,) * stream.choice((3, 3, 4)), stream.choice(SPLITS)
    return mixed if stream.random() < MIXED_SHARE else split


def _trimmed(roles: tuple[Role, ...], instances: int | None) -> tuple[Role, ...]:
    """The first so many; where there are to be more, the last role goes on."""
    return roles if instances is None else (roles + roles[-1:] * instances)[:instances]


def _draw_giver(seed: int, config: WorkerConfig) -> WorkerConfig:
    """An instance that only prefills: other sizes, the same blocks; some cannot hold what others can."""
    stream = stream_of(seed, "giver")
    slots, short = stream.randint(1, 6), stream.random() < 0.1
    context = config.context_tokens // 2 if short else config.context_tokens
    return replace(
        config,
        slots=slots,
        context_tokens=context,
        blocks=int(-(-context // config.block_size) * stream.choice((1.0, 1.1, 1.6, 3.0))),
        step_tokens=slots * config.burst + stream.choice((0, 2, 8, 32)),
        depth=stream.randint(1, 3),
        waiting_max=stream.choice((1, 3, 64)),
        prefix_cache=stream.random() < 0.8,
        prefill_path=stream.choice(tuple(PrefillPath)),
    )


def _with_tiers(seed: int, config: WorkerConfig, who: str, *, optional: bool) -> WorkerConfig:
    """Host memory from next to nothing to more than the pool; time limits that good days keep and bad ones do not.

    `optional`: there are others in the same world who may have some.
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
        haul_blocks=stream.choice((1, 4, 8, 16)),
        hauls_max=stream.choice((1, 2, 8)),
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
    return HandoverConfig(
        lease_us=lease_us,
        renew_us=lease_us // stream.choice((2, 4)),
        deadline_us=stream.choice((150_000, 600_000, 2_000_000, 60_000_000)),
        retry_after_us=stream.choice((1_000, 20_000, 100_000)),
        local_tokens=stream.choice((0, 0, 1, 4, 16)),
    )


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


def _draw_link(seed: int, classes: tuple[str, ...]) -> LinkConfig:
    stream = stream_of(seed, "link")
    narrow, wide = (stream.choice((1, 2, 4)), stream.choice((1, 2, 4))), (stream.choice((16, 64)), 1024)
    window, backlog_max = narrow if "narrow-line" in classes else wide
    return LinkConfig(
        window=window,
        backlog_max=backlog_max,
        ack_every=stream.choice((1, 4, 16)),
        ack_delay_us=stream.choice((500, 2_000, 20_000)),
        resend_burst=stream.choice((1, 8)),
        heartbeat_us=80_000,
        silent_us=stream.choice((150_000, 300_000, 600_000)),
        acceptor_silent_us=stream.choice((150_000, 300_000, 1_000_000)),
    )


def _draw_line(seed: int, classes: tuple[str, ...]) -> LinkConfig:
    """To a router: as patient as a connection that only fails when somebody says so, or not much."""
    stream, link = stream_of(seed, "line"), _draw_link(seed, classes)
    return replace(
        link,
        heartbeat_us=200_000,
        silent_us=stream.choice((300_000, 1_500_000, 1_500_000)),
        acceptor_silent_us=stream.choice((400_000, 1_500_000, 1_500_000)),
    )


def _draw_config(seed: int) -> WorkerConfig:
    stream = stream_of(seed, "config")
    block_size = stream.choice((1, 2, 4, 4, 8))
    burst = stream.choice((1, 1, 1, 2, 3))
    burst = min(burst, block_size)
    slots = stream.randint(2, 6)
    context = stream.randint(32, 56)
    whole = -(-context // block_size)
    return WorkerConfig(
        slots=slots,
        blocks=int(whole * stream.choice((1.0, 1.05, 1.1, 1.3, 1.6, 3.0))),
        block_size=block_size,
        context_tokens=context,
        step_tokens=slots * burst + stream.choice((0, 2, 8, 32)),
        burst=burst,
        depth=stream.randint(1, 3),
        waiting_max=stream.choice((3, 8, 64)),
        prefix_cache=stream.random() < 0.8,
        reserve=stream.choice(tuple(ReservePolicy)),
        ratio_decay=stream.choice((0.001, 0.02)),
        victims=stream.choice(tuple(VictimPolicy)),
        max_preemptions=stream.randint(0, 8),
        on_preempt=stream.choice((OnPreempt.RESUME, OnPreempt.RESUME, OnPreempt.RESCHEDULE)),
        handover=_draw_handover(seed),
    )


def _draw_users(seed: int, config: WorkerConfig, rates: Rates, span_us: int) -> tuple[UserPlan, ...]:
    """At least 40 requests: an open loop, users who wait for their answers, and conversations."""
    stream = stream_of(seed, "users")
    indices = count()

    def asks(number: int) -> tuple[Ask, ...]:
        return tuple(
            draw_ask(stream_of(seed, f"ask {index}"), index, config, rates, seed) for index in islice(indices, number)
        )

    arrivals_us = 0.7 * span_us / rates.overload
    passing = [UserPlan(at_us, False, asks(1)) for at_us in _arrivals(stream, int(arrivals_us))]
    patient = [UserPlan(stream.randrange(span_us // 4), False, asks(4)) for _ in range(2)]
    talking = [UserPlan(stream.randrange(span_us // 3), True, asks(4)) for _ in range(2)]
    if not config.tiers.host_rows:
        return (*passing, *patient, *talking)
    again = _asking_again(stream_of(seed, "asked again"), [*passing, *patient], config.sequence_tokens_max)
    return (*again, *talking)


def _asking_again(stream: random.Random, users: list[UserPlan], longest: int) -> list[UserPlan]:
    """A few long prompts come again and again: more than a pool holds, so that what was put aside is wanted again."""
    tokens = min(20, longest // 2)
    prompts = [tuple(stream.randrange(VOCABULARY) for _ in range(tokens)) for _ in range(stream.randint(2, 4))]

    def like_others(ask: Ask, prompt: tuple[int, ...], drawn: float) -> Ask:
        if ask.impossible or drawn > ASKED_AGAIN_SHARE:
            return ask
        room = longest - tokens
        return replace(ask, prompt=prompt, max_tokens=min(room, ask.max_tokens or room))

    return [
        replace(user, asks=tuple(like_others(ask, stream.choice(prompts), stream.random()) for ask in user.asks))
        for user in users
    ]


def _arrivals(stream: random.Random, span_us: int) -> list[int]:
    """An open loop: evenly, or in bunches, as when a batch job or a page with many boxes calls."""
    # `random`, not `randrange`: how often it draws must not depend on the span.
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


class Run:
    """A scenario under way. Says also what has happened to whom, as the cause of what clients see."""

    def __init__(self, scenario: Scenario, *, tell_story: bool = False, always_audit: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, events_max=EVENTS_MAX, tell_story=tell_story)
        line_max = scenario.link.window + scenario.link.backlog_max + (0 if scenario.router is None else UNBOUNDED)
        self.judge = Judge(self.world, self, VOCABULARY, line_max, always_audit)
        self.network = Network(self.world, scenario.rates.network)
        self._connections = Links(self.network, scenario.link)
        self._front_host = Host(self.world, FRONT)
        self.fabric = Fabric(self.world, scenario.rates.kv, scenario.kv)
        serving = [number for number, role in enumerate(scenario.roles) if role.serves]
        self.front = Front(scenario.instances, serving)
        self.depot = self._make_depot()
        self.when_healed: Callable[[], None] | None = None
        self._lines: list[LineEnd] = []
        self._secret = self.world.stream("key of the fleet").randbytes(32)
        self.seats = [self._seat(number) for number in range(scenario.instances)]
        self.fleet = None if scenario.router is None else self._fleet(scenario.router)
        self.chaos = Chaos(
            self.world, self.network, self._front_host, self.seats, scenario.rates, scenario.span_us, self.fabric, self.depot
        )
        self.depot.when_hasty = self._lose_patience
        entrance = self.front if self.fleet is None else self.fleet.gate
        self.users = [self._user(plan.asks, entrance, plan.converses) for plan in scenario.users]

    def may_be_lost(self, instance: int, accepted: bool) -> bool:
        now_us = self.world.now_us
        noisy = self.scenario.rates.network.may_silence and now_us <= self.scenario.span_us + self._noticed_us
        if noisy or instance >= len(self.seats):  # some are strangers
            return True
        return now_us <= self.seats[instance].troubled_until_us(rolling_too=not accepted) + self._noticed_us

    def may_be_suspected(self, instance: int) -> bool:
        router = self.scenario.router
        if router is None or instance >= len(self.seats):  # some are strangers
            return True
        now_us, noticed_us = self.world.now_us, router.suspect_us + 2 * router.beat_us + SUSPECTED_WITHIN_US
        noisy = self.scenario.rates.network.may_silence and now_us <= self.scenario.span_us + noticed_us
        return noisy or now_us <= self.seats[instance].hurt_until_us() + noticed_us

    def may_be_forgotten(self, origin: bytes, lost_us: int) -> bool:
        return self.fleet is None or self.fleet.may_be_forgotten(origin, lost_us)

    def fire(self, fault: Fault, where: str) -> None:
        self.world.fire(fault, where)

    @property
    def _noticed_us(self) -> int:
        """After so long both sides know of a loss: each may need its whole patience, and packets may come late."""
        return self.scenario.link.silent_us + self.scenario.link.acceptor_silent_us + 500_000

    def verdict(self) -> Verdict:
        broken = self._broken_law()
        self._gather_moves()
        if "overload" in self.scenario.classes:
            self.world.fire(Fault.OVERLOAD, FRONT)
        return Verdict(
            seed=self.scenario.seed,
            broken=broken,
            digest=self.world.digest(),
            events=self.world.events,
            virtual_us=self.world.now_us,
            asks=sum(user.made for user in self.users),
            fired=self.world.fired,
            moves=self.judge.moves,
            ends=self.judge.ends,
            story=tuple(self.world.story),
            scenario=self.scenario,
        )

    def _gather_moves(self) -> None:
        for seat in self.seats:
            if seat.instance is not None:
                self.judge.buried(seat.instance)
            for end in (*seat.lines, *seat.peer_lines):
                self.judge.took_moves("link", end.moves())
            if seat.counter is not None:
                for desk in (seat.counter.desk, *seat.counter.former_desks):
                    self.judge.took_moves("desk", desk.moves())
        for line in self._lines:
            self.judge.took_moves("link", line.moves())
        if self.fleet is not None:
            self.fleet.gather_moves(self.judge)

    def _broken_law(self) -> LawBroken | None:
        try:
            as_law(self._live)
        except LawBroken as broken:
            return broken
        return None

    def _live(self) -> None:
        if self.fleet is None:
            for seat in self.seats:
                seat.boot()
        else:
            self.fleet.boot()
        for line in self._lines:
            line.open()
        for user, plan in zip(self.users, self.scenario.users, strict=True):
            user.start(plan.at_us + BOOTED_US)
        self.chaos.unleash()
        self._until(self.scenario.span_us)
        if self.when_healed is not None:
            self.when_healed()
        self.world.note("world", "heals")
        self.chaos.heal()
        if self.fleet is not None:
            self.fleet.heal()
        for seat in self.seats:
            self._look_for_what_is_held(seat)
        self._audit_all()
        self._until_all_have_ended(self.users, HEALED_WITHIN_US, LIVENESS)
        patience_us = self._noticed_us if self.fleet is None else self.fleet.noticed_us
        self._until(self.world.now_us + patience_us)  # whoever has not noticed a loss yet does now
        self._until_all_serve(self.world.now_us + RECOVERED_WITHIN_US)
        self._ask_each_instance()
        self._until_nothing_is_held(self.world.now_us + QUIET_WITHIN_US)

    def _until(self, until_us: int) -> None:
        while (next_us := self.world.next_us) is not None and next_us < until_us:
            self.world.step()
        self.world.now_us = until_us

    def _until_all_have_ended(self, users: Sequence[User], within_us: int, law: str) -> None:
        bound_us = self.world.now_us + within_us
        self.world.progressed()
        while waiting := [user for user in users if not user.done]:
            client = next((user.client for user in waiting if user.client is not None), None)
            who = f"{len(waiting)} users wait, {client.name if client else 'between two asks'} first"
            if self.world.next_us is None or self.world.now_us - self.world.progress_us > STANDSTILL_US:
                raise LawBroken(DEADLOCK, who)
            if self.world.now_us > bound_us:
                raise LawBroken(law, who)
            for _ in range(32):  # asking everybody after each event would take longer than the event
                if self.world.next_us is not None:
                    self.world.step()

    def _until_all_serve(self, bound_us: int) -> None:
        while absent := [seat.name for seat in self.seats if not (self._serves(seat) and self._knows_its_peers(seat))]:
            if self.world.next_us is None or self.world.now_us > bound_us:
                raise LawBroken(RECOVERY, f"{', '.join(absent)} do not serve")
            self.world.step()

    def _knows_its_peers(self, seat: Seat) -> bool:
        """Every pair has registered with each other in the same session."""
        others = [other for other in self.seats if other.name in seat.peers]
        for other in others:
            if seat.neighbours is None or other.neighbours is None:
                return False
            sessions = seat.neighbours.session_with(other.name), other.neighbours.session_with(seat.name)
            if sessions[0] is None or sessions[0] != sessions[1]:
                return False
        return True

    def _ask_each_instance(self) -> None:
        """Whoever serves again answers one more question, in full."""
        self.judge.calm = True
        if self._may_give_up_questions:
            return
        serving = [seat for seat in self.seats if seat.role.serves]
        probes = [self._user((probe_ask(PROBE_FROM + seat.number),), self._door_of(seat), False) for seat in serving]
        self._until_answered(probes)
        self._ask_for_a_handover()
        self._ask_for_a_look()

    @property
    def _may_give_up_questions(self) -> bool:
        """A narrow line has old signs of life to carry first, and an impatient router does not wait for its turn."""
        router = self.scenario.router
        return router is not None and router.deadline_us < IMPATIENT_US and "narrow-line" in self.scenario.classes

    def _door_of(self, seat: Seat) -> Entrance:
        """Where a question must be asked so that this one answers it; behind a router, somebody does."""
        if self.fleet is not None:
            return self.fleet.gate
        if seat.counter is None:
            raise RuntimeError(f"{seat.name} has no front end and no router")
        return OneInstance(seat.counter)

    def _serves(self, seat: Seat) -> bool:
        return _serves(seat, self._lines[seat.number]) if self.fleet is None else self.fleet.serves(seat)

    def _ask_for_a_handover(self) -> None:
        """Where there are peers again, they prefill again: one question after the other, so that none finds a full queue."""
        if not self.scenario.can_hand_over(HANDED_OVER_TOKENS):
            return
        if self.fleet is not None and MIXED in self.scenario.roles:
            return  # which might be asked instead
        stream = stream_of(self.scenario.seed, "probes")
        for seat in self.seats:
            if not (seat.role.takes and seat.peers) or seat.instance is None:
                continue
            before = self._handovers()
            prompt = tuple(stream.randrange(VOCABULARY) for _ in range(HANDED_OVER_TOKENS))
            ask = probe_ask(PROBE_FROM * 2 + seat.number, prompt)
            self._until_answered([self._user((ask,), self._door_of(seat), False)])
            made = self._handovers()
            if made == before or (self.fleet is None and made[seat.number] == before[seat.number]):
                raise LawBroken(RECOVERY, f"{seat.name} prefilled by itself, though {', '.join(seat.peers)} were there")

    def _ask_for_a_look(self) -> None:
        """A store that is there again is asked again: by the first who prefills something new after it was left alone."""
        store, scenario = self.depot.store, self.scenario
        if store is None or store.is_dead or not scenario.looks_in_store:
            return
        patience_us = max(config.tiers.retry_us_max for config in (scenario.config, scenario.giver))
        self._until(self.world.now_us + patience_us)
        before = self._looks()
        stream = stream_of(scenario.seed, "looks")
        prompt = tuple(stream.randrange(VOCABULARY) for _ in range(HANDED_OVER_TOKENS))
        seat = next(seat for seat in self.seats if seat.role.serves)
        self._until_answered([self._user((probe_ask(PROBE_FROM * 3, prompt),), self._door_of(seat), False)])
        if self._looks() == before:
            raise LawBroken(RECOVERY, "nobody asks the store any more, though it is there again")

    def _looks(self) -> int:
        return sum(0 if seat.instance is None else self.judge.store_looks(seat.instance) for seat in self.seats)

    def _handovers(self) -> list[int]:
        return [0 if seat.instance is None else self.judge.handovers_to(seat.instance) for seat in self.seats]

    def _until_answered(self, probes: list[User]) -> None:
        for probe in probes:
            probe.start(self.world.now_us)
        self._until_all_have_ended(probes, HEALED_WITHIN_US, RECOVERY)

    def _until_nothing_is_held(self, bound_us: int) -> None:
        while not self._nothing_open() and self.world.next_us is not None and self.world.now_us <= bound_us:
            self.world.step()
        if self.fleet is not None:
            self._until(self.world.now_us + SAID_WITHIN_US)  # signs of life say what is cached
        self._audit_all()
        for seat in self.seats:
            if seat.instance is not None:
                self.judge.nothing_held(seat.instance)
            if seat.neighbours is not None:
                self.judge.nothing_lands(seat.name, seat.neighbours.receiver.open, seat.neighbours.sender.open)
        if self.fleet is not None:
            self.fleet.nothing_held(self.judge)
        if self.front.open_requests:
            raise LawBroken(LIVENESS, f"the front end still has {self.front.open_requests} open requests")

    def _nothing_open(self) -> bool:
        workers = [seat.instance.worker for seat in self.seats if seat.instance is not None]
        ends = [seat.neighbours for seat in self.seats if seat.neighbours is not None]
        if any(end.receiver.open or end.sender.open for end in ends):
            return False
        if self.fleet is not None and not self.fleet.is_quiet:
            return False
        if any(worker is not None and worker.gauges().storage.hauls for worker in workers):
            return False
        return not self.front.open_requests and all(worker is not None and worker.is_idle for worker in workers)

    def _look_for_what_is_held(self, seat: Seat) -> None:
        """It has just died, or everything has healed: three seconds later nobody holds what was held for it then."""
        if seat.peers:
            self.world.after(PEER_DEAD_US, self._nothing_held_for, seat, self.world.now_us)

    def _nothing_held_for(self, seat: Seat, since_us: int) -> None:
        for other in self.seats:
            life = other.instance
            if other.name not in seat.peers or life is None or life.worker is None:
                continue
            if other.host.paused or life.hindered_us > since_us:
                self.world.after(PEER_DEAD_US, self._nothing_held_for, seat, since_us)
                return
        for other in self.seats:
            if other.name in seat.peers and other.instance is not None and other.instance.worker is not None:
                self.judge.nothing_held_for(other.instance, seat.name, since_us)

    def _audit_all(self) -> None:
        for seat in self.seats:
            if seat.instance is not None and seat.instance.worker is not None:
                self.judge.audit(seat.instance.worker)

    def _seat(self, number: int) -> Seat:
        scenario = self.scenario
        router = scenario.router
        spec = InstanceSpec(
            number,
            scenario.config_of(number),
            partial(_scripted, scenario.layers),
            scenario.times,
            None if router is None and not scenario.has_store else self._secret,
        )
        counter = self.front.counters[number] if router is None else None
        seat = Seat(
            self.world,
            self._connections,
            spec,
            counter,
            scenario.rates.disk,
            self.judge,
            self.fabric,
            scenario.peers_of(number),
            0 if router is None else router.orphan_grace_us,
            self.depot,
        )
        seat.when_dead = self._look_for_what_is_held
        if counter is not None:
            counter.line = line = self._connections.initiator(self._front_host, f"{FRONT} {number}", seat.name, counter)
            self._lines.append(line)
        return seat

    def _make_depot(self) -> Depot:
        scenario = self.scenario
        store = Store(self.world, scenario.rates.store, scenario.store) if scenario.has_store else None
        self.judge.peers_share_a_store = store is not None and any(role.takes for role in scenario.roles)
        return Depot(self.world, scenario.rates.copies, scenario.copies, store, self.judge.names_of)

    def _lose_patience(self, instance: Instance, haul: Haul, delay_us: int) -> None:
        """Whose KV is being brought back leaves about then."""
        waiting = self.judge.waits_for(instance, haul)
        index = None if waiting is None else int(waiting.partition(".")[0])
        for user in self.users:
            client = user.client
            if client is not None and client.ask.index == index:
                self.world.fire(Fault.HASTY, client.name)
                self._front_host.after(delay_us, client.leave)

    def _fleet(self, router: RouterConfig) -> Fleet:
        scenario = self.scenario
        self.judge.behind_router = True
        doors = scenario.instances + scenario.rates.old_lives
        gate = Gate(self.world, self._connections, router, doors, self._secret, LegBook(router, self))
        upheaval = Upheaval(self.world, self._connections, gate, self.seats, scenario.rates, scenario.span_us)
        return Fleet(gate, upheaval, self.seats)

    def _user(self, asks: tuple[Ask, ...], front: Entrance, converses: bool) -> User:
        config = self.scenario.config
        return User(
            self._front_host,
            front,
            self.judge,
            asks,
            converses=converses,
            tokens_max=config.sequence_tokens_max,
            preemptions_max=config.max_preemptions,
        )


def _serves(seat: Seat, line: LineEnd) -> bool:
    """Both ends are in the same session, and the instance has said in it that it is ready."""
    if seat.instance is None or seat.instance.is_leaving or seat.line is None or seat.counter is None:
        return False
    return seat.line.session == line.session and seat.counter.serves and not line.undelivered


def _scripted(layers: int, shape: ExecutorShape) -> ScriptedExecutor:
    return ScriptedExecutor(shape, VOCABULARY, layers)


def run_seed(seed: int, trim: Trim | None = None, *, tell_story: bool = False, always_audit: bool = False) -> Verdict:
    return Run(draw_scenario(seed, trim), tell_story=tell_story, always_audit=always_audit).verdict()
