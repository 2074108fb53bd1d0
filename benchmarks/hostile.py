"""What one tenant notices while another attacks: `baton serve`, then `baton up`, under each load of `benchmarks.attacks`.

    1. quiet: the second tenant sends streamed requests, and /health is asked all the time
    2. for each attack the same again, while a process with the first tenant's key attacks at full rate
    3. judged: time to first token p99 within 3 × of its quiet value or 250 ms, whichever is more; /health p99 under 200 ms;
       and the attacker was there to the end and reached the server

The attacker runs at a lower priority than the probe and the server, since a real one has cores of its own. Memory is the
largest resident size of all processes of the server together, looked at while it is attacked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer
from rich.console import Console

from baton.bench.child_processes import Child, started
from baton.bench.client import open_http
from baton.bench.stats import Distribution, describe
from benchmarks.attacks import ATTACKS, AttackTally
from benchmarks.health import serving
from benchmarks.options import JsonIfGiven
from benchmarks.runner import (
    ABSENT,
    BadBenchmarkOptions,
    Experiment,
    MeasurementFailed,
    Progress,
    Report,
    run_benchmark,
    table_of,
)

ATTACKER, VICTIM = "attacker-key", "victim-key"
ATTACKER_NICE = 15
TTFT_RATIO_MAX, TTFT_S_MAX, HEALTH_S_MAX = 3.0, 0.25, 0.2
SCRIPTED = "--executor scripted --step-ms 20"
AT_ONCE = 4
TOKENS = 4
WARM_UP_S = 2.0
HEALTH_EVERY_S = 0.05
REQUEST_S_MAX = 120.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SERVERS = {"serve": ("serve", "--port", "0"), "router": ("up", "--router-port", "0", "--mixed", "1")}


class AttackFigures(msgspec.Struct, kw_only=True):
    server: str
    attack: str
    """Empty: nobody attacked."""
    ttft_s: Distribution | None
    health_s: Distribution | None
    failed: list[str]
    """Requests of the second tenant, or looks at /health, that were not answered as they should."""
    memory_mib_before: float
    memory_mib_max: float
    tally: AttackTally = msgspec.field(default_factory=AttackTally)
    """What the attacker had done at the end."""


class HostileReport(Report, kw_only=True):
    model: str
    requests: int
    figures: list[AttackFigures]


@dataclass(frozen=True, slots=True)
class HostileOptions:
    model: tuple[str, ...] = tuple(SCRIPTED.split())
    requests: int = 200
    servers: tuple[str, ...] = tuple(SERVERS)
    attacks: tuple[str, ...] = tuple(ATTACKS)

    def __post_init__(self) -> None:
        unknown = [name for name in self.attacks if name not in ATTACKS] + [n for n in self.servers if n not in SERVERS]
        if unknown:
            raise BadBenchmarkOptions(f"unknown: {', '.join(unknown)}; there are {', '.join([*SERVERS, *ATTACKS])}")


@dataclass(slots=True)
class _Seen:
    ttft_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    memory_max: int = 0


class _Probe:
    """The second tenant, and somebody who looks at /health."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, pid: int) -> None:
        self._http = http
        self._url = url
        self._model = model
        self._pid = pid

    async def measure(self, requests: int) -> _Seen:
        seen, left = _Seen(), iter(range(requests))
        watch = asyncio.create_task(self._watch(seen))
        await asyncio.gather(*(self._client(seen, left) for _ in range(AT_ONCE)))
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        return seen

    async def _client(self, seen: _Seen, left: Iterator[int]) -> None:
        for _ in left:
            try:
                async with asyncio.timeout(REQUEST_S_MAX):
                    seen.ttft_s.append(await self._first_token_s())
            except (aiohttp.ClientError, MeasurementFailed, OSError, TimeoutError) as error:
                seen.failed.append(f"{type(error).__name__}: {error}")

    async def _first_token_s(self) -> float:
        body = {"model": self._model, "prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {VICTIM}"}
        began_s, first_s, ended = time.perf_counter(), 0.0, False
        async with self._http.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise MeasurementFailed(f"{response.status} {(await response.text())[:200]}")
            async for line in response.content:
                first_s = first_s or time.perf_counter() - began_s
                ended |= line.startswith(b"data: [DONE]")
        if not ended:
            raise MeasurementFailed("a stream without an end")
        return first_s

    async def _watch(self, seen: _Seen) -> None:
        while True:
            seen.memory_max = max(seen.memory_max, resident_bytes(self._pid))
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(REQUEST_S_MAX), self._http.get(f"{self._url}/health") as response:
                    await response.read()
                    if response.status != 200:
                        seen.failed.append(f"/health: {response.status}")
                seen.health_s.append(time.perf_counter() - began_s)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                seen.failed.append(f"/health: {type(error).__name__}: {error}")
            await asyncio.sleep(HEALTH_EVERY_S)


def resident_bytes(pid: int) -> int:
    """Of a process and all that it started together; pages that they share count more than once."""
    parents, pages = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        parents[int(folder.name)], pages[int(folder.name)] = int(fields[1]), int(fields[21])
    return sum(held for one, held in pages.items() if _descends(one, pid, parents)) * PAGE_BYTES


def _descends(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while pid != ancestor and pid in parents:
        pid = parents[pid]
    return pid == ancestor


async def run_hostile(options: HostileOptions, progress: Progress) -> HostileReport:
    report = HostileReport(model=" ".join(options.model), requests=options.requests, figures=[])
    for name in options.servers:
        progress.doing(f"starting {name}")
        async with _server(name, options.model) as (child, url), open_http(AT_ONCE + 2) as http:
            model = await _model_of(url, http)
            probe = _Probe(http, url, model, child.pid)
            for attack in ("", *options.attacks):
                progress.doing(f"{name}: {attack or 'quiet'}")
                report.figures.append(await _measured(name, attack, child, url, model, probe, options.requests))
                progress.done()
    report.failures = [text for row in report.figures for text in judged(row, _quiet_s(report.figures, row.server))]
    return report


@contextlib.asynccontextmanager
async def _server(name: str, model: Sequence[str]) -> AsyncIterator[tuple[Child, str]]:
    os.environ["BATON_API_KEY"] = f"{ATTACKER} {VICTIM}"
    try:
        with serving(*SERVERS[name], *model) as (child, url):
            yield child, url
    finally:
        del os.environ["BATON_API_KEY"]


async def _model_of(url: str, http: aiohttp.ClientSession) -> str:
    async with http.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {VICTIM}"}) as response:
        listed = await response.json()
    name: str = listed["data"][0]["id"]
    return name


async def _measured(
    server: str, attack: str, child: Child, url: str, model: str, probe: _Probe, requests: int
) -> AttackFigures:
    before, tally = resident_bytes(child.pid), AttackTally()
    with contextlib.ExitStack() as stack:
        if attack:
            command = ("nice", "-n", str(ATTACKER_NICE), sys.executable, "-m", "benchmarks.attacks")
            attacker = stack.enter_context(started(attack, (*command, attack, url, ATTACKER, model), {}))
            await asyncio.sleep(WARM_UP_S)
            attacker.check_alive()
        seen = await probe.measure(requests)
        child.check_alive()
        if attack:
            attacker.check_alive()
            tally = last_tally(attacker.output())
    return AttackFigures(
        server=server,
        attack=attack,
        ttft_s=describe(seen.ttft_s),
        health_s=describe(seen.health_s),
        failed=seen.failed,
        memory_mib_before=before / 2**20,
        memory_mib_max=seen.memory_max / 2**20,
        tally=tally,
    )


def last_tally(output: str) -> AttackTally:
    """What an attacker has told last; a line that is still being written does not count."""
    lines = [line for line in output.split("\n")[:-1] if line.startswith("{")]
    return msgspec.json.decode(lines[-1], type=AttackTally) if lines else AttackTally()


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _quiet_s(figures: Sequence[AttackFigures], server: str) -> float:
    quiet = next((row.ttft_s for row in figures if row.server == server and not row.attack), None)
    return quiet.p99 if quiet is not None else 0.0


def judged(row: AttackFigures, quiet_s: float) -> list[str]:
    """What the second tenant may complain about, and whether it was attacked at all."""
    about, found = f"{row.server}, {row.attack or 'quiet'}", list[str]()
    if row.attack and not row.tally.connections:
        found.append(f"{about}: the attacker has not reached the server")
    if row.ttft_s is None or row.health_s is None:
        found.append(f"{about}: nothing was measured")
    if row.failed:
        found.append(f"{about}: {len(row.failed)} failed, first {row.failed[0]}")
    limit_s = max(TTFT_RATIO_MAX * quiet_s, TTFT_S_MAX)
    if row.ttft_s is not None and row.ttft_s.p99 > limit_s:
        found.append(f"{about}: first token after {row.ttft_s.p99 * 1000:.0f} ms (p99), limit {limit_s * 1000:.0f}")
    if row.health_s is not None and row.health_s.p99 > HEALTH_S_MAX:
        found.append(f"{about}: /health after {row.health_s.p99 * 1000:.0f} ms (p99), limit {HEALTH_S_MAX * 1000:.0f}")
    return found


def show(console: Console, report: HostileReport) -> None:
    columns = (
        ("server, attack", lambda row: f"{row.server}, {row.attack or 'quiet'}"),
        ("first token p50 ms", lambda row: _ms(row.ttft_s, "p50")),
        ("p99 ms", lambda row: _ms(row.ttft_s, "p99")),
        ("/health p99 ms", lambda row: _ms(row.health_s, "p99")),
        ("failed", lambda row: str(len(row.failed))),
        ("attack: connections", lambda row: f"{row.tally.connections:,}" if row.attack else ABSENT),
        ("answers", lambda row: f"{row.tally.answers:,}" if row.attack else ABSENT),
        ("MiB sent", lambda row: f"{row.tally.sent_bytes / 2**20:,.1f}" if row.attack else ABSENT),
        ("MiB before", lambda row: f"{row.memory_mib_before:,.0f}"),
        ("MiB at most", lambda row: f"{row.memory_mib_max:,.0f}"),
    )
    title = f"{report.requests} requests of the second tenant under each attack, {report.model}"
    console.print(table_of(title, columns, report.figures))
    for failure in report.failures:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def _ms(times_s: Distribution | None, which: str) -> str:
    if times_s is None:
        return ABSENT
    return f"{(times_s.p99 if which == 'p99' else times_s.p50) * 1000:.0f}"


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Model = Annotated[str, typer.Option(help="Options that name the model, such as a built-in name.")]
Requests = Annotated[int, typer.Option(min=1, max=100_000, help="Requests of the second tenant for each attack.")]
Only = Annotated[list[str] | None, typer.Option("--attack", help="Only this attack; may be repeated.")]
Servers = Annotated[list[str] | None, typer.Option("--server", help="Only serve, or only router.")]


def hostile(
    model: Model = SCRIPTED,
    requests: Requests = 200,
    attack: Only = None,
    server: Servers = None,
    json_file: JsonIfGiven = None,
) -> None:
    """Attack a server with one tenant's key, and measure what another tenant notices.

    Exit code 1 when its first token comes too late, /health does, a request of it fails, or an attacker ends or never
    reaches the server.
    """

    def prepare(progress: Progress) -> Experiment[HostileReport]:
        options = HostileOptions(tuple(model.split()), requests, tuple(server or SERVERS), tuple(attack or ATTACKS))
        count = len(options.servers) * (1 + len(options.attacks))
        return Experiment(count, lambda: asyncio.run(run_hostile(options, progress)))

    run_benchmark(prepare, show, json_file)
