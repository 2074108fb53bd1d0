"""Runs many seeds in parallel, finds the first that fails, and shrinks it to the smallest world that still fails.

Owns the processes that run seeds, the totals over all seeds, and shrinking. Printing is done by the command line.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import IO

import msgspec

from baton.core.engine.request import TRANSITIONS as REQUEST_MOVES
from baton.core.errors import BatonError
from baton.core.routing.fleet_members import TRANSITIONS as MEMBER_MOVES
from baton.core.routing.routed_request import TRANSITIONS as CARRY_MOVES
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
) -> FuzzTotals:
    """Stop at the lowest seed that fails, or when `go_on`, called after each seed, returns False."""
    totals = FuzzTotals()
    shards = [_Shard(first_seed + number, -(-(seeds - number) // jobs), jobs) for number in range(min(jobs, seeds))]
    try:
        for report in _reports(shards):
            totals.add(report)
            seen(report)
            failure = totals.first_failure
            if failure is None and not go_on():
                break
            if failure is not None and all(shard.next_seed > failure.seed for shard in shards):
                break
    finally:
        for shard in shards:
            shard.stop()
    return totals


class _Shard:
    """A process that runs every `stride`-th seed."""

    def __init__(self, first_seed: int, seeds: int, stride: int) -> None:
        self.next_seed = first_seed
        self._stride = stride
        self._end = first_seed + seeds * stride
        arguments = ["--first-seed", str(first_seed), "--seeds", str(seeds), "--stride", str(stride)]
        # One thread each: numpy's thread pools would compete for the cores.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.sim.shard", *arguments], stdout=subprocess.PIPE, env=environment
        )
        self._begun = b""

    @property
    def pipe(self) -> IO[bytes]:
        if self._process.stdout is None:
            raise ShardDied("a process that runs seeds has no output")
        return self._process.stdout

    def read(self) -> list[bytes] | None:
        """New lines; None when all seeds have been run. Raises ShardDied if the process ended before that."""
        data = os.read(self.pipe.fileno(), READ_BYTES)
        if not data:
            if self.next_seed < self._end:
                raise ShardDied(f"the process that ran seed {self.next_seed} ended with status {self._process.wait()}")
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        self.next_seed += self._stride * len(lines)
        return lines

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()


def _reports(shards: list[_Shard]) -> Iterator[SeedReport]:
    """Reports in the order of arrival, from all shards."""
    decoder = msgspec.json.Decoder(SeedReport)
    with selectors.DefaultSelector() as ready:
        for shard in shards:
            ready.register(shard.pipe, selectors.EVENT_READ, shard)
        while ready.get_map():
            for key, _ in ready.select():
                lines = key.data.read()
                if lines is None:
                    ready.unregister(key.fileobj)
                else:
                    yield from map(decoder.decode, lines)


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
