"""`baton chaos`: faults at random under load, and every answer compared with the undisturbed one.

    1. a fleet is started; each case is asked once while nothing happens to it: the undisturbed answers
    2. clients ask cases at random without a pause, streamed and whole, while instances are killed, stopped, drained,
       restarted and cut off; a new fault as soon as each role has a ready spare again
    3. judged: every answer complete and equal, each that ended by itself satisfies its constraint where it has one, and
       nothing is held by the router against an instance that was left alone

A calm run is the same load without faults for a given time; the router must then suspect no instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from baton.bench.chaos_cases import ChaosCase, draw_cases
from baton.bench.chaos_constraints import ConstraintCounts
from baton.bench.chaos_faults import HELD_AGAINST, PASSING, FaultChooser, FaultKind, InjectedFault, SeenSuspicion
from baton.bench.chaos_fleet import LOOK_EVERY_S, ChaosFleet, FleetLost, running_fleet
from baton.bench.chaos_request import SeenAnswer, ask, differences
from baton.bench.chaos_signals import NoSuchVictim, can_cut, inject, resume
from baton.bench.client import first_model, open_http
from baton.bench.stats import Distribution, describe
from baton.bench.tiny_model import make_tiny

TINY = "tiny"
ANSWER_S_MAX = 120.0
HEAL_S_MAX = 120.0
REST_S_MAX = 30.0
RECORDING_AT_ONCE = 4
JITTER_S = 0.5
"""Largest random delay, in seconds, before a fault that is possible."""
AFTER_FAILURE_S = 0.2
"""Pause of a client after a failed request, since it may fail at once and every failure is recorded."""
SHOWN_DIFFERENCES = 20
UNCONSTRAINED = "without a constraint"


class ChaosFailed(Exception):
    """The run itself could not be completed; the message says why."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    model: str = TINY
    faults: int = 100
    requests: int = 1000
    prefill: int = 2
    decode: int = 2
    mixed: int = 0
    seed: int = 1
    concurrency: int = 12
    cases: int = 100
    calm_minutes: float | None = None
    limit_minutes: float = 60.0
    is_scripted: bool = False
    fleet_options: tuple[str, ...] = ()
    log: Path | None = None
    """File for the fleet's log."""
    gap_s_max: float | None = None
    """Limit for the p99 of the longest gaps of streams; None: they are not judged."""

    def __post_init__(self) -> None:
        if self.faults and self.calm_minutes is None and max(self.by_role.values(), default=0) < 2:
            raise ChaosFailed("no role has a spare, so nobody may be hurt: give --decode, --prefill or --mixed at least 2")

    @property
    def by_role(self) -> dict[str, int]:
        counts = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: count for role, count in counts.items() if count}


class ChaosReport(msgspec.Struct, frozen=True):
    faults: dict[str, int]
    """Number of faults by kind."""
    asked_for: int
    """Number of faults requested."""
    requests: int
    least_requests: int
    streamed: int
    moved: int
    """Requests with a choice that moved to another instance."""
    moves: int
    differences: list[str]
    constrained: ConstraintCounts
    gaps_s: Distribution | None
    """Longest gap of each stream, in seconds."""
    moved_gaps_s: Distribution | None
    """Longest gap of each stream that moved, in seconds."""
    gaps_by_kind_s: dict[str, Distribution]
    """Longest gap of each stream, by its kind of constraint."""
    held: dict[str, int]
    """Suspicions of the router that a fault explains."""
    false: list[str]
    """Suspicions of the router that no fault explains."""
    cut_short: str | None
    took_s: float
    gap_s_max: float | None = None

    @property
    def is_clean(self) -> bool:
        done = sum(self.faults.values()) >= self.asked_for and self.requests >= self.least_requests
        wrong = self.differences or self.constrained.broken or self.false or self.long_gap
        return done and not wrong and self.cut_short is None

    @property
    def long_gap(self) -> str | None:
        """How the gaps of streams are beyond the limit; None where they are not, or are not judged."""
        if self.gap_s_max is None:
            return None
        if self.gaps_s is None:
            return f"no stream was measured, and its gaps have a limit of {self.gap_s_max:g} s"
        if self.gaps_s.p99 <= self.gap_s_max:
            return None
        return f"longest gap of a stream: {self.gaps_s.p99:.2f} s (p99), limit {self.gap_s_max:g} s"


@dataclass(slots=True)
class ChaosTally:
    """Counts and failures seen by the clients."""

    requests: int = 0
    streamed: int = 0
    moved: int = 0
    moves: int = 0
    gaps_s: list[float] = field(default_factory=list)
    moved_gaps_s: list[float] = field(default_factory=list)
    gaps_by_kind_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    differences: list[str] = field(default_factory=list)
    constrained: ConstraintCounts = field(default_factory=ConstraintCounts)

    def add(self, case: ChaosCase, answer: SeenAnswer, found: list[str]) -> None:
        self.requests += 1
        self.moved += bool(answer.moved)
        self.moves += answer.moved
        if case.is_streamed and answer.fault is None:
            self.streamed += 1
            self.gaps_s.append(answer.longest_gap_s)
            if answer.moved:
                self.moved_gaps_s.append(answer.longest_gap_s)
            kind = UNCONSTRAINED if case.constraint is None else str(case.constraint.kind)
            self.gaps_by_kind_s[kind].append(answer.longest_gap_s)
        about = f"case {case.number} ({case.path})"
        self.differences += [f"{about}: {what}" for what in found]
        if case.constraint is not None:
            self.constrained.add(about, case.constraint.kind, bool(answer.moved), answer.judgements(case))


@dataclass(slots=True)
class ChaosProgress:
    """Callbacks for progress."""

    doing: Callable[[str], None] = lambda _what: None
    done: Callable[[int, int], None] = lambda _faults, _requests: None
    """Called with the numbers of faults and requests so far."""


async def run_chaos(options: ChaosOptions, progress: ChaosProgress) -> ChaosReport:
    with _model(options, progress) as model:
        async with open_http(options.concurrency + 8, tls=False) as http:
            progress.doing("starting the fleet")
            roles = ("--prefill", options.prefill, "--decode", options.decode, "--mixed", options.mixed)
            command = (*model, *map(str, roles), "--restart-delay-max", "0.2", "--drain-timeout", "10")
            async with running_fleet((*command, *options.fleet_options), sum(options.by_role.values()), http) as fleet:
                try:
                    return await _Chaos(options, progress, http, fleet).run()
                finally:
                    if options.log is not None:
                        options.log.write_text(fleet.child.output())


@contextlib.contextmanager
def _model(options: ChaosOptions, progress: ChaosProgress) -> Iterator[tuple[str, ...]]:
    """Arguments of `baton up` for the model."""
    if options.is_scripted:
        yield ("--executor", "scripted")
    elif options.model != TINY:
        yield (options.model,)
    else:
        with tempfile.TemporaryDirectory(prefix="baton-tiny-") as folder:
            progress.doing("making a tiny model")
            make_tiny(Path(folder) / TINY)
            yield (str(Path(folder) / TINY), "--device", "cpu", "--dtype", "float64", "--kv-memory", "64M")


class _Chaos:
    def __init__(
        self, options: ChaosOptions, progress: ChaosProgress, http: aiohttp.ClientSession, fleet: ChaosFleet
    ) -> None:
        self._options = options
        self._progress = progress
        self._http = http
        self._fleet = fleet
        draws = random.Random(options.seed)
        kinds = tuple(kind for kind in FaultKind if kind is not FaultKind.CUT or can_cut())
        self._faults = FaultChooser(draws, kinds, options.by_role)
        self._tally = ChaosTally()
        self._undisturbed: list[tuple[ChaosCase, SeenAnswer]] = []
        self._over = asyncio.Event()
        """Set when clients should send no more requests."""
        self._wakings: set[asyncio.Task[None]] = set()

    async def run(self) -> ChaosReport:
        self._progress.doing("recording undisturbed answers")
        await self._record()
        began_s, first_event = time.monotonic(), self._fleet.last_event
        cut_short = None
        clients = [asyncio.create_task(self._ask_on(number)) for number in range(self._options.concurrency)]
        try:
            async with asyncio.timeout((self._options.limit_minutes + (self._options.calm_minutes or 0)) * 60):
                await self._calm() if self._options.calm_minutes is not None else await self._chaos()
        except TimeoutError:
            cut_short = f"the time was up ({self._options.limit_minutes:g} minutes)"
        except FleetLost as lost:
            cut_short = str(lost)
        finally:
            self._over.set()
            await asyncio.gather(*clients)
            await asyncio.gather(*self._wakings)
        if cut_short is None:
            cut_short = await self._at_rest()
        held = [said for said in self._fleet.events if said.number > first_event and said.what in HELD_AGAINST]
        return self._report(held, cut_short, time.monotonic() - began_s)

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _record(self) -> None:
        options = self._options
        model = await first_model(self._http, self._fleet.url)
        at_once = asyncio.Semaphore(RECORDING_AT_ONCE)

        async def record(case: ChaosCase) -> tuple[ChaosCase, SeenAnswer]:
            async with at_once:
                answer = await ask(self._http, self._fleet.url, case, ANSWER_S_MAX)
                if case.wants_stop and answer.fault is None:
                    case = case.stopped_at(answer.parts[0].text)
                    answer = await ask(self._http, self._fleet.url, case, ANSWER_S_MAX)
            if answer.fault is not None:
                raise ChaosFailed(f"case {case.number} fails before anything is done to the fleet: {answer.fault}")
            return case, answer

        cases = draw_cases(options.cases, options.seed, model)
        self._undisturbed = list(await asyncio.gather(*(record(case) for case in cases)))
        await self._fleet.look()

    async def _ask_on(self, client: int) -> None:
        draws = random.Random(self._options.seed * 1000 + client)
        while not self._over.is_set():
            case, undisturbed = draws.choice(self._undisturbed)
            answer = await ask(self._http, self._fleet.url, case, ANSWER_S_MAX)
            self._tally.add(case, answer, differences(undisturbed, answer))
            self._progress.done(len(self._faults.done), self._tally.requests)
            if answer.fault is not None:
                await asyncio.sleep(AFTER_FAILURE_S)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _chaos(self) -> None:
        options, since_s = self._options, time.monotonic()
        while len(self._faults.done) < options.faults or self._faults.open or self._tally.requests < options.requests:
            await self._look()
            if len(self._faults.done) < options.faults:
                fault = self._faults.draw(self._fleet.instances, self._fleet.last_event)
                if fault is not None:
                    await self._do(fault)
                    since_s = time.monotonic()
            if self._faults.open and time.monotonic() - since_s > HEAL_S_MAX:
                named = ", ".join(f"{fault.victim.name} ({fault.kind})" for fault in self._faults.open)
                raise FleetLost(f"not back within {HEAL_S_MAX:g} s: {named}\n{self._fleet.child.last_lines()}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _calm(self) -> None:
        end_s = time.monotonic() + (self._options.calm_minutes or 0) * 60
        self._progress.doing("calm: full load, no faults")
        while time.monotonic() < end_s or self._tally.requests < self._options.requests:
            await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        self._fleet.child.check_alive()
        await self._fleet.look()
        self._faults.close_recovered(self._fleet.instances, self._fleet.last_event, time.monotonic())

    async def _do(self, fault: InjectedFault) -> None:
        await asyncio.sleep(self._faults.draws.uniform(0, JITTER_S))
        self._progress.doing(f"{fault.kind} → {fault.victim.name}")
        try:
            if fault.kind is FaultKind.DRAIN:
                await self._fleet.drain(fault.victim.name)
            else:
                await asyncio.to_thread(inject, fault.kind, fault.victim)
        except NoSuchVictim:
            return  # the instance ended meanwhile: choose another fault
        self._faults.done.append(fault)
        fault.over_s = time.monotonic()
        if fault.kind in PASSING and fault.kind is not FaultKind.CUT:
            fault.over_s = None
            waking = asyncio.create_task(self._wake(fault))
            self._wakings.add(waking)
            waking.add_done_callback(self._wakings.discard)

    async def _wake(self, fault: InjectedFault) -> None:
        await asyncio.sleep(fault.pause_s)
        resume(fault.victim)
        fault.over_s = time.monotonic()

    # ── judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _at_rest(self) -> str | None:
        """Wait until no instance holds a request; return what is left after the time limit."""
        try:
            async with asyncio.timeout(REST_S_MAX):
                while True:
                    await self._look()
                    if not self._fleet.still_held:
                        return None
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            return f"with no client left: {self._fleet.still_held}"

    def _report(self, held: list[SeenSuspicion], cut_short: str | None, took_s: float) -> ChaosReport:
        tally, options = self._tally, self._options
        calm = options.calm_minutes is not None
        return ChaosReport(
            faults=dict(Counter(str(fault.kind) for fault in self._faults.done)),
            asked_for=0 if calm else options.faults,
            requests=tally.requests,
            least_requests=options.requests,
            streamed=tally.streamed,
            moved=tally.moved,
            moves=tally.moves,
            differences=tally.differences,
            constrained=tally.constrained,
            gaps_s=describe(tally.gaps_s),
            moved_gaps_s=describe(tally.moved_gaps_s),
            gaps_by_kind_s={kind: found for kind, gaps in tally.gaps_by_kind_s.items() if (found := describe(gaps))},
            held=dict(Counter(said.what for said in held if self._faults.explain(said))),
            false=[f"{said.name} {said.what}: {said.why}" for said in held if not self._faults.explain(said)],
            cut_short=cut_short,
            took_s=took_s,
            gap_s_max=options.gap_s_max,
        )
