"""One small world with a hand-over or a router in it, and in it a blow after every single event: nothing is left to a draw.

Owns these worlds (one instance that prefills, one that decodes, a few requests; or such a pair, or two equals, behind a
router) and the walk over their events. A world is run once undisturbed, which numbers its events; then once for each event
and each blow, to each instance and to the router, and every law must hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.core.config import (
    DECODE,
    MIXED,
    PREFILL,
    BringBack,
    HandoverConfig,
    OnPreempt,
    PrefillPath,
    Role,
    TierConfig,
    WorkerConfig,
)
from baton.core.engine.request import Sampling
from baton.core.routing.config import RouterConfig
from baton.sim.client_requests import ClientRequest
from baton.sim.faults import DiskRates, Fault, FaultRates, NetworkRates
from baton.sim.faulty_transfers import KvTimes
from baton.sim.fuzzed_run import FuzzedRun, WorldVerdict
from baton.sim.scenario import FlatTimes, Scenario, UserPlan
from baton.sim.storage_copies import CopyTimes
from baton.sim.store import StoreTimes
from baton.wire.link import LinkConfig

DOWN_US = 15_000
SHORTLY_US = 4_000
ASLEEP_US = 700_000
"""Longer than either side's patience: whoever wakes up finds its sessions gone, and does not know it yet."""


class BlowKind(StrEnum):
    CRASH = "crash"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class InjectedBlow:
    event: int
    """It comes right after this one."""
    seat: int
    """Whom it hits; the number after that of the last instance is the router."""
    blow: BlowKind
    then_router: bool = False
    """A little later, the router crashes too."""


def small_world(*, pulls: bool, on_preempt: OnPreempt, path: PrefillPath) -> Scenario:
    """A prompt in one chunk, one in several, two choices, one that a cache knows, and a client that leaves."""
    config = WorkerConfig(
        slots=3, blocks=14, block_size=4, context_tokens=40, step_tokens=8, on_preempt=on_preempt,
        handover=HandoverConfig(lease_us=60_000, renew_us=15_000, deadline_us=400_000, local_tokens=2),
        prefill_path=path,
    )  # fmt: skip
    prompts = ((1, 2, 3, 4, 5, 6), tuple(range(14)), (*range(14), 9, 9), (7, 7, 7, 7, 8))
    users = tuple(
        UserPlan(at_us, False, (_ask(index, prompt, choices, patience_us),))
        for index, (at_us, prompt, choices, patience_us) in enumerate(
            zip((0, 1_000, 30_000, 31_000), prompts, (1, 2, 1, 1), (None, None, None, 9_000), strict=True)
        )
    )
    return Scenario(
        seed=0,
        roles=(DECODE, PREFILL),
        classes=(),
        rates=FaultRates(NetworkRates(), DiskRates()),
        config=config,
        giver=config,
        kv=KvTimes(delay_us=200, jitter_us=300, piece_us=100, burst=2, verify_us=200, fence_us=1_000, pulls=pulls),
        layers=2,
        times=FlatTimes(2_000, 50),
        link=LinkConfig(heartbeat_us=80_000, silent_us=150_000, acceptor_silent_us=200_000),
        span_us=250_000,
        users=users,
    )


def fleet_world(roles: tuple[Role, ...], loss_retry_count: int = 2) -> Scenario:
    """The same load, behind a router that gives up soon."""
    small = small_world(pulls=False, on_preempt=OnPreempt.RESCHEDULE, path=PrefillPath.SHORT)
    router = RouterConfig(
        loss_retry_count=loss_retry_count,
        backoff_us=2_000,
        backoff_us_max=10_000,
        absent_us=1_000_000,
        suspect_us=450_000,
        orphan_grace_us=700_000,
    )
    link = LinkConfig(heartbeat_us=200_000, silent_us=500_000, acceptor_silent_us=700_000)
    return replace(small, roles=roles, router=router, link=link)


def shelved_world(on_preempt: OnPreempt, roles: tuple[Role, ...] = (MIXED, MIXED)) -> Scenario:
    """Host memory and a store: pools too small for two prompts, which come again here and elsewhere."""
    small = small_world(pulls=False, on_preempt=on_preempt, path=PrefillPath.SHORT)
    tiers = TierConfig(
        host_rows=10, store=True, bring_back=BringBack.ALWAYS, transfer_blocks=2, copy_us=4_000, look_us=5_000, get_us=5_000,
        put_us=10_000, depart_us=5_000, retry_us=20_000, retry_us_max=40_000,
    )  # fmt: skip
    config = replace(small.config, slots=2, blocks=8, context_tokens=30, tiers=tiers)
    one, other, third = tuple(range(14)), tuple(range(20, 5, -1)), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
    asked = (
        (0, one, 1, None), (500, other, 1, None), (70_000, other, 2, None), (70_500, one, 1, None),
        (120_000, third, 1, None), (121_000, third, 1, None), (160_000, one, 1, 9_000), (161_000, other, 1, None),
    )  # fmt: skip
    users = tuple(
        UserPlan(at_us, False, (replace(_ask(index, prompt, choices, patience_us), max_tokens=9),))
        for index, (at_us, prompt, choices, patience_us) in enumerate(asked)
    )
    copies = CopyTimes(begin_us=300, block_us=50, jitter_us=200, stage_us=100, fence_us=500)
    store = StoreTimes(delay_us=400, jitter_us=200, objects_max=64)
    return replace(small, roles=roles, config=config, giver=config, users=users, copies=copies, store=store)


def _ask(index: int, prompt: tuple[int, ...], choices: int, patience_us: int | None) -> ClientRequest:
    return ClientRequest(
        index=index,
        prompt=prompt,
        choices=choices,
        sampling=Sampling(seed=index, temperature=1.0),
        max_tokens=5,
        salt=b"",
        priority=0,
        impossible=False,
        think_us=0,
        patience_us=patience_us,
        stop_after=None,
        reads_every_us=None,
    )


def events_of(scenario: Scenario) -> int:
    """How many events there are before everything heals."""
    run = FuzzedRun(scenario)
    healed: list[int] = []
    run.when_healed = lambda: healed.append(run.site.world.events)
    verdict = run.verdict()
    if verdict.broken is not None:
        raise verdict.broken
    return healed[0]


def strikes(scenario: Scenario, every: int = 1) -> Iterator[InjectedBlow]:
    """All of them, or every so-manieth."""
    everything = (
        InjectedBlow(event, seat, blow)
        for event in range(1, events_of(scenario) + 1)
        for seat in range(scenario.instances + (scenario.router is not None))
        for blow in BlowKind
    )
    return (strike for number, strike in enumerate(everything) if number % every == 0)


def struck(scenario: Scenario, strike: InjectedBlow, *, tell_story: bool = False) -> WorldVerdict:
    run = FuzzedRun(scenario, tell_story=tell_story)
    hit = _hit_gate if strike.seat == scenario.instances else _hit_instance
    run.site.world.ambush(strike.event, lambda: hit(run, strike))
    return run.verdict()


def _hit_instance(run: FuzzedRun, strike: InjectedBlow) -> None:
    seat, world = run.site.seats[strike.seat], run.site.world
    if strike.blow is BlowKind.CRASH:
        world.fire(Fault.CRASH, seat.name)
        seat.crash()
        world.after(DOWN_US, seat.boot_if_down)
    elif not seat.host.paused:
        world.fire(Fault.PAUSE, seat.name)
        seat.pause()
        world.after(ASLEEP_US, seat.resume)
    if strike.then_router:
        world.after(SHORTLY_US, _hit_gate, run, replace(strike, blow=BlowKind.CRASH, then_router=False))


def _hit_gate(run: FuzzedRun, strike: InjectedBlow) -> None:
    if run.site.fleet is None:
        raise RuntimeError("there is no router in this world")
    world, gate = run.site.world, run.site.fleet.gate
    for seat in run.site.seats:
        seat.trouble(ASLEEP_US, of_router=True)
    if strike.blow is BlowKind.CRASH:
        world.fire(Fault.ROUTER_CRASH, gate.host.name)
        gate.crash()
        world.after(DOWN_US, gate.boot_if_down)
    else:
        world.fire(Fault.ROUTER_PAUSE, gate.host.name)
        gate.host.pause()
        world.after(ASLEEP_US, gate.wake)
