"""The cost of a router: the same scripted instances asked directly, through Baton's router, and through another.

Owns the measurement and its verdict. The load is streamed, one event a token, from as many clients at once as asked. A
round measures every way once, in an order that turns; the time to the first token is compared by percentiles over all
rounds, and the router's CPU seconds are read from the system. Instances compute nothing and take a fixed time a step, so
what differs is the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.child_processes import Child, ChildFailed, free_port, started
from baton.bench.client import BenchRequest, ServerUnreachable, TargetServer, first_model, open_http
from baton.bench.load import ClosedLoopRate, LoadPlan, RunResult, run_load
from baton.bench.machine import OtherLoad
from baton.bench.stats import percentile
from baton.bench.workload import BenchSession, Endpoint, Recipe, Round, TokenRange
from benchmarks.fleet import RunningFleet, fleet
from benchmarks.options import JsonFile
from benchmarks.runner import Columns, Experiment, MeasurementFailed, Progress, Rounds, alternating, run_benchmark, table_of

SCRIPTED = ("--executor", "scripted")
BYTES = TokenRange(1, 256)
DIRECT, OURS, PEER = "direct", "Baton's router", "sglang-router"
MODEL = "scripted"
PEER_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RoutedLoad:
    concurrency: int = 64
    requests: int = 384
    """Requests per round and path."""
    input_tokens: int = 64
    output_tokens: int = 96
    step_ms: float = 20.0
    instances: int = 2
    rounds: int = 3


class RoutedPath(msgspec.Struct):
    """Measurements of one path; times in seconds."""

    name: str
    ttft_s: list[float] = msgspec.field(default_factory=list)
    tokens: int = 0
    events: int = 0
    cpu_s: float = 0.0
    """CPU time of the router; 0 for the direct path."""

    @property
    def p50_ms(self) -> float:
        return 1000 * percentile(sorted(self.ttft_s), 0.5)

    @property
    def p99_ms(self) -> float:
        return 1000 * percentile(sorted(self.ttft_s), 0.99)

    @property
    def tokens_a_cpu_s(self) -> float | None:
        return self.tokens / self.cpu_s if self.cpu_s else None


class RoutedReport(msgspec.Struct):
    load: RoutedLoad
    ways: list[RoutedPath]
    others: list[OtherLoad]


async def measure(load: RoutedLoad, peer: str | None, progress: Progress) -> RoutedReport:
    each = ("--step-ms", str(load.step_ms), "--max-num-seqs", str(load.concurrency))
    async with (
        fleet(SCRIPTED, ["mixed"] * load.instances, each=each) as ours,
        _peer(peer, [member.url for member in ours.members]) as other,
    ):
        return await _rounds(load, ours, other, progress)


async def _rounds(load: RoutedLoad, ours: RunningFleet, other: tuple[Child, str] | None, progress: Progress) -> RoutedReport:
    direct, routed = [member.url for member in ours.members], [ours.url]
    ways = [(RoutedPath(DIRECT), direct, None), (RoutedPath(OURS), routed, ours.router)]
    if other is not None:
        ways.append((RoutedPath(PEER), [other[1]], other[0]))
    rounds = Rounds(progress, load.rounds)
    for number, (way, urls, between) in alternating(ways, load.rounds):
        await asyncio.to_thread(rounds.look)
        progress.doing(f"round {number + 1}: {way.name}")
        await _load_once(load, way, urls, between, seed=number)
        progress.done()
    return RoutedReport(load, [way for way, _, _ in ways], rounds.loads)


async def _load_once(load: RoutedLoad, way: RoutedPath, urls: Sequence[str], between: Child | None, seed: int) -> None:
    before_s = 0.0 if between is None else between.cpu_s()
    runs = await asyncio.gather(*(_half(load, url, len(urls), seed * 100 + place) for place, url in enumerate(urls)))
    way.cpu_s += 0.0 if between is None else between.cpu_s() - before_s
    for run in runs:
        for record in run.records:
            if record.error is not None or record.ttft_s is None:
                raise MeasurementFailed(f"{way.name}: {record.error} {record.error_message}")
            if record.session >= load.concurrency // len(urls):  # the first requests arrive all at once and are not counted
                way.ttft_s.append(record.ttft_s)
            way.tokens += record.output_tokens
            way.events += record.events


async def _half(load: RoutedLoad, url: str, parts: int, seed: int) -> RunResult:
    plan = LoadPlan(
        target=TargetServer(url, MODEL, Endpoint.CHAT),  # not every router takes token ids
        loop=ClosedLoopRate(load.concurrency // parts),
        recipe=Recipe(seed, BYTES),
        ask=BenchRequest(),
        warmup=8,
    )
    return await run_load(plan, _sessions(load, load.requests // parts))


def _sessions(load: RoutedLoad, count: int) -> Iterator[BenchSession]:
    """Answer lengths vary by ±50 %: equal ones would end together, and the next would start together."""
    for index in range(count):
        share = (index * 0.618034) % 1.0
        yield BenchSession(index, (Round(load.input_tokens, max(1, round(load.output_tokens * (0.5 + share)))),))


@contextlib.asynccontextmanager
async def _peer(command: str | None, urls: Sequence[str]) -> AsyncIterator[tuple[Child, str] | None]:
    """Another router in front of the same instances, if configured."""
    if command is None:
        yield None
        return
    port = free_port()
    launch = [*shlex.split(command), "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
    launch += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    with started(PEER, launch, {}) as child:
        url, begun_s = f"http://127.0.0.1:{port}", perf_counter()
        while not await _answers(url):
            child.check_alive()
            if perf_counter() - begun_s > PEER_LIMIT_S:
                raise ChildFailed(f"{PEER} does not serve within {PEER_LIMIT_S:g} s\n{child.last_lines()}")
            await asyncio.sleep(0.2)
        yield child, url


async def _answers(url: str) -> bool:
    async with open_http(1) as http:
        try:
            await first_model(http, url)
        except ServerUnreachable:
            return False
    return True


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Concurrency = Annotated[int, typer.Option(min=1, max=4096, help="Streams at once.")]
Requests = Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests a round, of each way.")]
InputTokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a prompt.")]
OutputTokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens of an answer.")]
StepMs = Annotated[float, typer.Option(min=0.0, help="How long a step of an instance takes.")]
Instances = Annotated[int, typer.Option(min=1, max=64, help="Scripted instances.")]
RoundCount = Annotated[int, typer.Option(min=1, max=100, help="Times that each way is measured.")]
Peer = Annotated[
    str | None,
    typer.Option(
        envvar="BATON_PEER_SGLANG_ROUTER",
        help="Command that starts sglang-router, to be measured in front of the same instances.",
    ),
]


def router(
    concurrency: Concurrency = 64,
    requests: Requests = 384,
    input_tokens: InputTokens = 64,
    output_tokens: OutputTokens = 96,
    step_ms: StepMs = 20.0,
    instances: Instances = 2,
    rounds: RoundCount = 3,
    peer: Peer = None,
    json_file: JsonFile = Path("bench-results/router.json"),
) -> None:
    """Time to the first token and CPU time of the router, streaming, beside asking the same instances directly.

    Instances are scripted: they compute nothing and take --step-ms a step, so the difference is the router's.
    """
    load = RoutedLoad(concurrency, requests, input_tokens, output_tokens, step_ms, instances, rounds)

    def prepare(progress: Progress) -> Experiment[RoutedReport]:
        return Experiment(rounds * (2 if peer is None else 3), lambda: asyncio.run(measure(load, peer, progress)))

    run_benchmark(prepare, show, json_file)


def show(console: Console, report: RoutedReport) -> None:
    load, direct = report.load, report.ways[0]
    columns: Columns[RoutedPath] = (
        ("way", lambda way: way.name),
        ("TTFT p50", lambda way: f"{way.p50_ms:.1f} ms"),
        ("added", lambda way: "" if way is direct else f"{way.p50_ms - direct.p50_ms:+.1f} ms"),
        ("TTFT p99", lambda way: f"{way.p99_ms:.1f} ms"),
        ("added", lambda way: "" if way is direct else f"{way.p99_ms - direct.p99_ms:+.1f} ms"),
        ("events a token", lambda way: f"{way.events / max(1, way.tokens):.2f}"),
        ("tokens a CPU-second", lambda way: "" if way.tokens_a_cpu_s is None else f"{way.tokens_a_cpu_s:,.0f}"),
    )
    title = (
        f"{load.concurrency} at once, {load.input_tokens} in, about {load.output_tokens} out, "
        f"{load.instances} instances with steps of {load.step_ms:g} ms, {load.rounds} rounds of {load.requests}"
    )
    console.print(table_of(title, columns, report.ways))
    busiest = max((look.busy_cores for look in report.others), default=0.0)
    console.print(f"Others kept up to {busiest:g} cores busy before a round.", style="dim")
