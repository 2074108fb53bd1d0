"""Runs many seeds in parallel, finds the first that fails, and shrinks it to the smallest world that still fails.

Owns the processes that run seeds, the totals over all seeds, and shrinking. Printing is done by the command line.
"""

from __future__ import annotations

import os
import selectors
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from baton.core.engine.request import TRANSITIONS as REQUEST_MOVES
from baton.core.errors import BatonError
from baton.core.routing.fleet_members import TRANSITIONS as MEMBER_MOVES
from baton.core.routing.routed_request import TRANSITIONS as CARRY_MOVES
from baton.executor.python_command import python_command
from baton.sim.faults import Fault
from baton.sim.fuzzed_run import WorldVerdict, run_seed
from baton.sim.law_checker import move_name, peer_tables, transfer_table
from baton.sim.law_names import OWN_CHECKS, LawBroken
from baton.sim.scenario import ScenarioTrim
from baton.sim.shard import SeedReport
from baton.wire.held_choices import TRANSITIONS as RELAY_MOVES
from baton.wire.instance_sessions import SESSION_TRANSITIONS
from baton.wire.request_table import TRANSITIONS as DESK_MOVES
from baton.wire.sealed_stream import STREAM_TRANSITIONS

SHRINK_RUNS_MAX = 200
READ_BYTES = 1 << 16
DEALT_AHEAD = 2
"""Seeds that a process has at a time: the one it runs, and the next."""
FAILURES_MAX = 100
"""A run that goes on after failures ends at this many."""
EVERY_FAULT = tuple(str(fault) for fault in Fault)
_MACHINES: list[tuple[str, Iterable[tuple[Enum, Enum]]]] = [
    ("request", REQUEST_MOVES),
    ("desk", DESK_MOVES),
    ("stream", STREAM_TRANSITIONS),
    *peer_tables(),
    transfer_table(),
    ("carrying", CARRY_MOVES),
    ("member", MEMBER_MOVES),
    ("relay", RELAY_MOVES),
    ("standing", SESSION_TRANSITIONS),
]
EVERY_MOVE = tuple(move_name(machine, state, move) for machine, table in _MACHINES for state, move in table)


class NothingBroken(BatonError):
    """A seed that was to be shrunk breaks no law."""


class ShardDied(BatonError):
    """A process ended before it had run all of its seeds."""


@dataclass(slots=True)
class FuzzTotals:
    """Sums over the seeds that have been run."""

    seeds: int = 0
    events: int = 0
    virtual_us: int = 0
    requests: int = 0
    requests_min: int | None = None
    instances_min: int | None = None
    classes_min: int | None = None
    fired: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[SeedReport] = field(default_factory=list)

    def add(self, report: SeedReport) -> None:
        self.seeds += 1
        self.events += report.events
        self.virtual_us += report.virtual_us
        self.requests += report.requests
        self.fired.update(report.fired)
        self.moves.update(report.moves)
        self.ends.update(report.ends)
        if report.law is not None:
            self.failures.append(report)
            return
        self.requests_min = min(report.requests, self.requests_min or report.requests)
        self.instances_min = min(report.instances, self.instances_min or report.instances)
        self.classes_min = min(len(report.classes), self.classes_min or len(report.classes))

    @property
    def first_failure(self) -> SeedReport | None:
        return min(self.failures, key=lambda report: report.seed, default=None)

    def never(self) -> list[str]:
        """Faults that never fired and transitions that were never taken in these seeds."""
        return [name for name in EVERY_FAULT if not self.fired[name]] + [name for name in EVERY_MOVE if not self.moves[name]]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_many(
    first_seed: int,
    seeds: int,
    jobs: int,
    seen: Callable[[SeedReport], None] = lambda _report: None,
    go_on: Callable[[], bool] = lambda: True,
    *,
    keep_going: bool = False,
) -> FuzzTotals:
    """Run seeds in order until one fails (`keep_going`: until `FAILURES_MAX` have), or `go_on` returns False after a seed.

    What has been dealt out by then is finished, so the seeds that were run are always one range without gaps.
    """
    totals = FuzzTotals()
    failures_max = FAILURES_MAX if keep_going else 1
    undealt = iter(range(first_seed, first_seed + seeds))
    shards = [_Shard() for _ in range(min(jobs, seeds))]
    try:
        for shard in shards * DEALT_AHEAD:
            shard.deal(undealt)
        for shard, report in _reports(shards):
            totals.add(report)
            seen(report)
            if len(totals.failures) < failures_max and go_on():
                shard.deal(undealt)
        for shard in shards:
            shard.end()
    finally:
        for shard in shards:
            shard.stop()
    return totals


class _Shard:
    """A process that runs the seeds that are dealt to it."""

    def __init__(self) -> None:
        # One thread each: numpy's thread pools would compete for the cores.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            python_command("baton.sim.shard"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise ShardDied("a process that runs seeds has no input or output")
        self._seeds, self.pipe = self._process.stdin, self._process.stdout
        self._begun = b""
        self.dealt: deque[int] = deque()
        """Seeds that it has and has not reported."""

    def deal(self, undealt: Iterator[int]) -> None:
        """Give it the next seed, if there is one."""
        seed = next(undealt, None)
        if seed is None:
            return
        self.dealt.append(seed)
        with suppress(BrokenPipeError):  # it has died: `read` says so
            self._seeds.write(b"%d\n" % seed)
            self._seeds.flush()

    def read(self) -> list[bytes]:
        """New lines. Raises ShardDied if the process has ended."""
        data = os.read(self.pipe.fileno(), READ_BYTES)
        if not data:
            ran = f"ran seed {self.dealt[0]}" if self.dealt else "waited for a seed"
            raise ShardDied(f"the process that {ran} ended with status {self._process.wait()}")
        *lines, self._begun = (self._begun + data).split(b"\n")
        for _ in lines:
            self.dealt.popleft()
        return lines

    def end(self) -> None:
        """Let it end by itself."""
        self._seeds.close()
        self._process.wait()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._seeds.close()
        self.pipe.close()


def _reports(shards: list[_Shard]) -> Iterator[tuple[_Shard, SeedReport]]:
    """Reports in the order of arrival, from all shards, until none has a seed left."""
    decoder = msgspec.json.Decoder(SeedReport)
    with selectors.DefaultSelector() as ready:
        for shard in shards:
            ready.register(shard.pipe, selectors.EVENT_READ, shard)
        while any(shard.dealt for shard in shards):
            for key, _ in ready.select():
                for line in key.data.read():
                    yield key.data, decoder.decode(line)


# ── shrinking ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ShrunkWorld:
    trim: ScenarioTrim
    verdict: WorldVerdict
    runs: int


def shrink(seed: int, tried: Callable[[ScenarioTrim], None] = lambda _trim: None) -> ShrunkWorld:
    """Find a smaller world in which the seed still breaks the same law: fewer fault classes, requests and instances.

    All laws are checked after every event, so the failure may show earlier, and under another law, than in the fuzz run.
    """
    whole = run_seed(seed, always_audit=True)
    if whole.broken is None:
        raise NothingBroken(f"seed {seed} breaks no law")
    shrinker = _Shrinker(seed, _kind(whole.broken), tried)
    scenario = whole.scenario
    best = ScenarioTrim(scenario.classes, scenario.asks, scenario.instances)
    best = shrinker.fewer_classes(best)
    best = shrinker.fewer_asks(best)
    best = shrinker.fewer_instances(best)
    best = shrinker.fewer_classes(best)
    return ShrunkWorld(best, run_seed(seed, best, tell_story=True, always_audit=True), shrinker.runs)


def _kind(broken: LawBroken) -> str:
    """Two failures are the same if this is equal: the law and, for an exception in our code, its type and place."""
    return f"{broken.law} {broken.what.partition(': ')[0]}" if broken.law == OWN_CHECKS else broken.law


class _Shrinker:
    def __init__(self, seed: int, kind: str, tried: Callable[[ScenarioTrim], None]) -> None:
        self._seed = seed
        self._kind = kind
        self._tried = tried
        self.runs = 0

    def fails(self, trim: ScenarioTrim) -> bool:
        if self.runs >= SHRINK_RUNS_MAX:
            return False
        self.runs += 1
        self._tried(trim)
        broken = run_seed(self._seed, trim, always_audit=True).broken
        return broken is not None and _kind(broken) == self._kind

    def fewer_classes(self, best: ScenarioTrim) -> ScenarioTrim:
        for name in best.classes or ():
            smaller = replace(best, classes=tuple(kept for kept in best.classes or () if kept != name))
            best = smaller if self.fails(smaller) else best
        return best

    def fewer_asks(self, best: ScenarioTrim) -> ScenarioTrim:
        """Leave out ever smaller ranges of requests, as long as the failure stays."""
        size = max(1, len(best.asks or ()) // 2)
        while True:
            at = 0
            while at < len(best.asks or ()):
                kept = (best.asks or ())[:at] + (best.asks or ())[at + size :]
                smaller = replace(best, asks=kept)
                if kept and self.fails(smaller):
                    best = smaller
                else:
                    at += size
            if size == 1:
                return best
            size //= 2

    def fewer_instances(self, best: ScenarioTrim) -> ScenarioTrim:
        for instances in range(1, best.instances or 1):
            smaller = replace(best, instances=instances)
            if self.fails(smaller):
                return smaller
        return best
