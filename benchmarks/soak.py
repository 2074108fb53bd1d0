"""A fleet under many requests, good and bad ones, while instances are killed: does anything grow, or stay behind?

    warm-up ── 25 % ── 50 % ── 75 % ── 100 % ── quiet ── the fleet is ended
                resident size of each process at each mark      descriptors as at the start; nothing in /dev/shm or TMPDIR

Owns the fleet, which has a temporary folder of its own, and looks at its processes from outside, in /proc. The first
instance is never killed, so that a process of each kind lives through it all. Needs no model.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.chaos_signals import engine_of, is_instance
from baton.bench.child_processes import Child, started
from benchmarks.options import JsonIfGiven, Seed
from benchmarks.runner import (
    Columns,
    Experiment,
    MeasurementFailed,
    Progress,
    Report,
    print_remarks,
    run_benchmark,
    table_of,
)
from benchmarks.soak_clients import SoakClients

MARKS = (0.25, 0.5, 0.75, 1.0)
GROWTH_MAX = 0.05
"""Of a process's resident size in the last quarter."""
WARM_UP = 0.02
START_S_MAX = 120.0
QUIET_S_MAX = 60.0
STOP_S_MAX = 60.0
POLL_S = 0.1
SHARED = Path("/dev/shm")  # noqa: S108  looked at, not written to
_SERVED = re.compile(r"API\s+(http://[^\s/]+)")

Requests = Annotated[int, typer.Option(min=100, help="Requests in all.")]
Instances = Annotated[int, typer.Option(min=2, max=16, help="Instances; all but the first are killed in turn.")]
Kills = Annotated[int, typer.Option(min=0, help="Instances that are killed on the way.")]
FlightRecorder = Annotated[
    bool, typer.Option(help="With it, decisions fill some 100 MiB a process before its size can settle.")
]
Concurrency = Annotated[int, typer.Option(min=1, max=512, help="Requests at a time.")]


class SoakedProcess(msgspec.Struct):
    """A process that lives from the start to the end. Sizes in bytes."""

    name: str
    pid: int
    resident: list[int] = msgspec.field(default_factory=list)
    """At each of MARKS."""
    descriptors_before: int = 0
    descriptors_after: int = 0

    @property
    def growth(self) -> float:
        """Of the last quarter, as a share."""
        return self.resident[-1] / self.resident[-2] - 1


class SoakReport(Report, kw_only=True):
    requests: int
    seed: int
    seconds: float = 0.0
    kills: int = 0
    sent: dict[str, int] = msgspec.field(default_factory=dict)
    processes: list[SoakedProcess] = msgspec.field(default_factory=list)


def soak(
    requests: Requests = 100_000,
    instances: Instances = 3,
    kills: Kills = 20,
    concurrency: Concurrency = 24,
    seed: Seed = 1,
    flight_recorder: FlightRecorder = True,
    json: JsonIfGiven = None,
) -> None:
    """Send many requests through a fleet, with aborts, half bodies, wrong keys and kills; what grows, and what is left?"""
    words = ("--mixed", str(instances), "--flight-recorder" if flight_recorder else "--no-flight-recorder")
    run_benchmark(partial(_prepared, words, instances, requests, kills, concurrency, seed), show, json)


def _prepared(
    words: tuple[str, ...], instances: int, requests: int, kills: int, concurrency: int, seed: int, progress: Progress
) -> Experiment[SoakReport]:
    def run() -> SoakReport:
        report = SoakReport(requests=requests, seed=seed)
        shared_before = set(SHARED.iterdir())
        with tempfile.TemporaryDirectory(prefix="baton-soak-") as folder:
            with _fleet(words, instances, Path(folder)) as fleet:
                asyncio.run(_Soak(fleet, report, kills, concurrency, progress).run())
                report.failures += fleet.end()
            report.failures += [f"left in the temporary folder: {path.name}" for path in sorted(Path(folder).iterdir())]
        report.failures += [f"left in {SHARED}: {path.name}" for path in sorted(set(SHARED.iterdir()) - shared_before)]
        return report

    return Experiment(requests, run)


# ── the fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SoakedFleet:
    def __init__(self, up: Child, url: str, api_key: str, instances: int) -> None:
        self.up = up
        self.url = url
        self.api_key = api_key
        self._instances = instances

    def instances(self) -> dict[str, int]:
        """Process ids of the ready instances by name."""
        request = urllib.request.Request(  # noqa: S310  our own server
            f"{self.url}/v1/instances", headers={"Authorization": f"Bearer {self.api_key}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
            listed = json.loads(response.read())["data"]
        return {one["name"]: one["pid"] for one in listed if one["state"] == "ready"}

    def until_complete(self) -> dict[str, int]:
        until_s = time.monotonic() + START_S_MAX
        while len(found := self.instances()) < self._instances:
            self.up.check_alive()
            if time.monotonic() > until_s:
                raise MeasurementFailed(f"only {len(found)} instances within {START_S_MAX:g} s\n{self.up.last_lines()}")
            time.sleep(POLL_S)
        return found

    def lasting(self) -> list[SoakedProcess]:
        """The processes that are not killed: `baton up`, the router, and the first instance with its engine."""
        name, pid = min(self.until_complete().items())
        return [
            SoakedProcess("baton up", self.up.pid),
            SoakedProcess("router", _router_of(self.up.pid)),
            SoakedProcess(f"{name}, front end", pid),
            SoakedProcess(f"{name}, engine", engine_of(pid)),
        ]

    def end(self) -> list[str]:
        """End the fleet as an operator would; what was wrong with that."""
        os.kill(self.up.pid, signal.SIGTERM)
        code = self.up.wait(STOP_S_MAX)
        left = [pid for pid in _processes() if _session_of(pid) == self.up.pid]
        return ([f"baton up ended with code {code}"] if code else []) + [f"process {pid} is left" for pid in left]


@contextmanager
def _fleet(words: tuple[str, ...], instances: int, folder: Path) -> Iterator[SoakedFleet]:
    api_key = secrets.token_hex(16)
    env = {"BATON_API_KEY": api_key, "TMPDIR": str(folder), "NO_COLOR": "1", "BATON_LOG_LEVEL": "warning"}
    command = (sys.executable, "-m", "baton", "up", "--router-port", "0", "--executor", "scripted", "--step-ms", "2", *words)
    with started("baton up", command, env) as up:
        until_s = time.monotonic() + START_S_MAX
        while (found := _SERVED.search(up.output())) is None:
            up.check_alive()
            if time.monotonic() > until_s:
                raise MeasurementFailed(f"no address within {START_S_MAX:g} s\n{up.last_lines()}")
            time.sleep(POLL_S)
        yield SoakedFleet(up, found[1], api_key, instances)


# ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Soak:
    def __init__(self, fleet: SoakedFleet, report: SoakReport, kills: int, concurrency: int, progress: Progress) -> None:
        self._fleet = fleet
        self._report = report
        self._concurrency = concurrency
        self._progress = progress
        self._clients = SoakClients(fleet.url, fleet.api_key, report.seed)
        end = report.requests
        self._marks = [int(share * end) for share in MARKS]
        self._kills = [end * (number + 1) // (kills + 1) for number in range(kills)]
        """How many requests have ended before each."""

    async def run(self) -> None:
        report, warm = self._report, int(self._report.requests * WARM_UP)
        report.processes = self._fleet.lasting()
        self._progress.doing("warming up")
        await self._clients.run(0, warm, self._concurrency, self._ended)
        await self._quiet(None)
        for process in report.processes:
            process.descriptors_before = _descriptors(process.pid)
        began_s = time.monotonic()
        self._progress.doing("requests, with aborts, half bodies, wrong keys and kills")
        await self._clients.run(warm, report.requests, self._concurrency, self._ended)
        report.seconds = time.monotonic() - began_s
        await asyncio.to_thread(self._fleet.until_complete)
        await self._quiet({process.pid: process.descriptors_before for process in report.processes})
        for process in report.processes:
            process.descriptors_after = _descriptors(process.pid)
        report.sent = dict(self._clients.sent)
        report.failures += [*self._clients.wrong, *_verdict(report)]

    async def _ended(self, count: int) -> None:
        self._progress.done()
        if self._kills and count >= self._kills[0]:
            self._kills.pop(0)
            await asyncio.to_thread(self._kill_one)
        while self._marks and count >= self._marks[0]:
            self._marks.pop(0)
            sizes = {process.name: _resident_bytes(process.pid) for process in self._report.processes}
            for process in self._report.processes:
                process.resident.append(sizes[process.name])
            self._progress.say(f"{count:,}: " + ", ".join(f"{name} {size >> 20} MiB" for name, size in sizes.items()))

    def _kill_one(self) -> None:
        """Kill an instance, in turn, but never the first; none where only that one is ready."""
        ready = sorted(self._fleet.instances().items())[1:]
        if not ready:
            return
        name, pid = ready[self._report.kills % len(ready)]
        if is_instance(pid, name):
            os.kill(pid, signal.SIGKILL)
            self._report.kills += 1

    async def _quiet(self, descriptors: dict[int, int] | None) -> None:
        """Wait until connections are gone: until there are as few descriptors as these, or their number stays."""
        until_s, before = time.monotonic() + QUIET_S_MAX, dict[int, int]()
        while time.monotonic() < until_s:
            now = {process.pid: _descriptors(process.pid) for process in self._report.processes}
            if now == before if descriptors is None else all(now[pid] <= most for pid, most in descriptors.items()):
                return
            before = now
            await asyncio.sleep(1.0)


def _verdict(report: SoakReport) -> list[str]:
    found = []
    for process in report.processes:
        if process.growth > GROWTH_MAX:
            found.append(f"{process.name} grew by {process.growth:.1%} in the last quarter; at most {GROWTH_MAX:.0%}")
        if process.descriptors_after > process.descriptors_before:
            found.append(
                f"{process.name} has {process.descriptors_after} descriptors, and had {process.descriptors_before} before"
            )
    return found


# ── /proc ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _router_of(up: int) -> int:
    for child in Path(f"/proc/{up}/task/{up}/children").read_text().split():
        if b"router" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    raise MeasurementFailed("baton up has no router")


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _resident_at(mark: int, process: SoakedProcess) -> str:
    return f"{process.resident[mark] / 2**20:,.1f}"


COLUMNS: Columns[SoakedProcess] = (
    ("process", lambda process: process.name),
    *((f"MiB at {share:.0%}", partial(_resident_at, mark)) for mark, share in enumerate(MARKS)),
    ("last quarter", lambda process: f"{process.growth:+.1%}"),
    ("descriptors", lambda process: f"{process.descriptors_before} → {process.descriptors_after}"),
)
LEGEND = "Resident sizes, read from outside. Descriptors: after the warm-up, and when all is quiet again."


def show(console: Console, report: SoakReport) -> None:
    sent = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.sent.items()))
    title = f"{report.requests:,} requests in {report.seconds:.0f} s, {report.kills} kills, seed {report.seed}"
    console.print(table_of(title, COLUMNS, report.processes))
    console.print(sent, highlight=False, soft_wrap=True)
    print_remarks(console, report, LEGEND)
    if not report.failures:
        console.print("Nothing is left in shared memory or the temporary folder.", style="green")
