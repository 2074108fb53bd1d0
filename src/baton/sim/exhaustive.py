"""Small worlds with a hand-over, a router or a store, run once for each event with a crash or pause right after that event.

Owns these worlds (one instance that prefills, one that decodes, a few requests; or such a pair, or two mixed instances,
behind a router) and the enumeration of their events. A world is run once undisturbed to number its events; then once for
each event, each kind of blow and each instance or the router, and every law must hold.
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
from baton.sim.line_times import LineTimes
from baton.sim.scenario import FlatTimes, Scenario, UserPlan
from baton.sim.storage_copies import CopyTimes
from baton.sim.store import StoreTimes

DOWN_US = 15_000
SHORTLY_US = 4_000
ASLEEP_US = 700_000
"""Longer than the silence limit of either side: after the pause, its sessions are lost and it has not noticed yet."""


class BlowKind(StrEnum):
    CRASH = "crash"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class InjectedBlow:
    event: int
    """The number of the event right after which it happens."""
    target: int
    """The number of the instance; one more than the last instance is the router."""
    blow: BlowKind
    then_router: bool = False
    """Whether the router crashes 4 ms later too."""


def small_world(*, pulls: bool, on_preempt: OnPreempt, path: PrefillPath) -> Scenario:
    """Requests: a prompt of one chunk, one of several with two choices, one with a cached prefix, one that is aborted."""
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
        line=LineTimes(silent_us=200_000, unacknowledged_us=200_000),
        span_us=250_000,
        users=users,
    )


def fleet_world(roles: tuple[Role, ...], loss_retry_count: int = 2) -> Scenario:
    """The same load, behind a router with short time limits."""
    small = small_world(pulls=False, on_preempt=OnPreempt.RESCHEDULE, path=PrefillPath.SHORT)
    router = RouterConfig(
        loss_retry_count=loss_retry_count,
        backoff_us=2_000,
        backoff_us_max=10_000,
        absent_us=1_000_000,
        suspect_us=450_000,
        orphan_grace_us=700_000,
    )
    return replace(small, roles=roles, router=router, line=LineTimes(silent_us=500_000, unacknowledged_us=600_000))


def shelved_world(on_preempt: OnPreempt, roles: tuple[Role, ...] = (MIXED, MIXED)) -> Scenario:
    """Host memory and a store: pools too small for two prompts, and prompts that are repeated at both instances."""
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
    """The number of events before faults end."""
    run = FuzzedRun(scenario)
    healed: list[int] = []
    run.when_healed = lambda: healed.append(run.site.world.events)
    verdict = run.verdict()
    if verdict.broken is not None:
        raise verdict.broken
    return healed[0]


def strikes(scenario: Scenario, every: int = 1) -> Iterator[InjectedBlow]:
    """Every `every`-th combination of event, target and kind."""
    everything = (
        InjectedBlow(event, target, blow)
        for event in range(1, events_of(scenario) + 1)
        for target in range(scenario.instances + (scenario.router is not None))
        for blow in BlowKind
    )
    return (strike for number, strike in enumerate(everything) if number % every == 0)


def struck(scenario: Scenario, strike: InjectedBlow, *, tell_story: bool = False) -> WorldVerdict:
    run = FuzzedRun(scenario, tell_story=tell_story)
    hit = _hit_router if strike.target == scenario.instances else _hit_instance
    run.site.world.ambush(strike.event, lambda: hit(run, strike))
    return run.verdict()


def _hit_instance(run: FuzzedRun, strike: InjectedBlow) -> None:
    node, world = run.site.nodes[strike.target], run.site.world
    if strike.blow is BlowKind.CRASH:
        world.fire(Fault.CRASH, node.name)
        node.crash()
        world.after(DOWN_US, node.boot_if_down)
    elif not node.host.paused:
        world.fire(Fault.PAUSE, node.name)
        node.pause()
        world.after(ASLEEP_US, node.resume)
    if strike.then_router:
        world.after(SHORTLY_US, _hit_router, run, replace(strike, blow=BlowKind.CRASH, then_router=False))


def _hit_router(run: FuzzedRun, strike: InjectedBlow) -> None:
    if run.site.fleet is None:
        raise RuntimeError("there is no router in this world")
    world, router_host = run.site.world, run.site.fleet.router_host
    for node in run.site.nodes:
        node.trouble(ASLEEP_US, of_router=True)
    if strike.blow is BlowKind.CRASH:
        world.fire(Fault.ROUTER_CRASH, router_host.host.name)
        router_host.crash()
        world.after(DOWN_US, router_host.boot_if_down)
    else:
        world.fire(Fault.ROUTER_PAUSE, router_host.host.name)
        router_host.host.pause()
        world.after(ASLEEP_US, router_host.wake)
