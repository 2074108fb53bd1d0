"""The value of choosing an instance by its cached prefixes: conversations of several rounds, one fleet a policy.

Owns the real measurement. Each policy gets a fresh fleet of mixed instances, so that nothing is cached from before; all
get the same conversations (lengths from a trace, random words), the same number at once. A prompt contains all earlier
rounds, so an instance that served the previous round has nearly all of it cached. The figures are the share of cached
prompt tokens, from `usage`, and the time to the first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.client import BenchRequest, TargetServer, first_model, open_http
from baton.bench.load import ClosedLoopRate, LoadPlan, run_load
from baton.bench.sim_run import blocks_of
from baton.bench.stats import describe
from baton.bench.workload import BenchSession, Recipe
from baton.core.config import WorkerConfig
from baton.core.routing.config import RoutingPolicy
from baton.sim.cluster import RunSpec, simulate
from baton.sim.report import FINISHED
from baton.sim.run_records import RunRecord
from baton.sim.step_times import load_step_times
from benchmarks.conversations import (
    Conversation,
    ConversationLoad,
    SimulatedConversations,
    find_conversations,
    read_conversations,
)
from benchmarks.fleet import fleet
from benchmarks.options import ConversationFile, JsonFile, ShareGptFolder
from benchmarks.runner import Columns, Experiment, MeasurementFailed, Progress, run_benchmark, table_of

MODELLED = "h200-8b"
MODELLED_CLIENTS = 39
MODELLED_SCALE = 8.0
"""Factor on prompt lengths in virtual time."""


class RoutingRun(msgspec.Struct):
    policy: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft_mean_s: float
    ttft_p90_s: float
    took_s: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


class RoutingReport(msgspec.Struct):
    load: ConversationLoad = msgspec.field(name="talks")
    instances: int
    runs: list[RoutingRun]
    """Measured on this machine."""
    modelled: list[RoutingRun]
    """In virtual time, on the same number of modelled GPUs, with full conversation lengths."""


async def measure(
    model: str,
    policies: Sequence[str],
    instances: int,
    load: ConversationLoad,
    sessions: Sequence[BenchSession],
    progress: Progress,
) -> list[RoutingRun]:
    runs = []
    for policy in policies:
        progress.doing(f"starting the fleet for {policy}")
        each = ("--max-model-len", "2048", "--threads", "1")
        async with fleet([model], ["mixed"] * instances, ("--policy", policy), each) as made:
            progress.doing(policy)
            runs.append(await _run(policy, made.url, load, iter(sessions), progress))
    return runs


async def _run(
    policy: str, url: str, load: ConversationLoad, sessions: Iterator[BenchSession], progress: Progress
) -> RoutingRun:
    async with open_http(1) as http:
        model = await first_model(http, url)
    plan = LoadPlan(TargetServer(url, model), ClosedLoopRate(load.concurrency), Recipe(load.seed), BenchRequest(), warmup=6)
    result = await run_load(plan, sessions, lambda _done, _tokens: progress.done())
    failed = [record for record in result.records if record.error is not None]
    if failed:
        raise MeasurementFailed(f"{policy}: {len(failed)} requests failed, the first with {failed[0].error_message}")
    times = describe([record.ttft_s for record in result.records if record.ttft_s is not None])
    if times is None:
        raise MeasurementFailed(f"{policy}: no request gave a token")
    return RoutingRun(
        policy=policy,
        requests=len(result.records),
        prompt_tokens=sum(record.prompt_tokens for record in result.records),
        cached_tokens=sum(record.cached_tokens or 0 for record in result.records),
        ttft_mean_s=times.mean,
        ttft_p90_s=times.p90,
        took_s=max(record.end_s for record in result.records),
    )


def modelled(
    policies: Sequence[str],
    instances: int,
    load: ConversationLoad,
    conversations: Sequence[Conversation],
    progress: Progress,
) -> list[RoutingRun]:
    """Run the same policies in virtual time, with the real router and schedulers on modelled machines."""
    times = load_step_times(MODELLED)
    config = WorkerConfig(
        slots=256, blocks=blocks_of(times, None, 16), context_tokens=32_768, step_tokens=8192, waiting_max=load.count
    )
    sessions = SimulatedConversations(load.count, MODELLED_SCALE, config.context_tokens, max_tokens=1)
    runs = []
    for policy in policies:
        progress.doing(f"modelled: {policy}")
        spec = RunSpec(
            label=policy,
            instances=instances,
            config=config,
            step_times=times,
            calls=sessions.drawn(conversations, load.seed),
            concurrency=MODELLED_CLIENTS,
            seed=load.seed,
            spans_max=0,
            route=RoutingPolicy(policy),
        )
        runs.append(_modelled_run(policy, simulate(spec)))
        progress.done()
    return runs


def _modelled_run(policy: str, record: RunRecord) -> RoutingRun:
    journeys = [journey for journey in record.requests if journey.outcome in FINISHED]
    times = describe([journey.ttft_us / 1e6 for journey in journeys if journey.ttft_us is not None])
    if len(journeys) < len(record.requests) or times is None:
        raise MeasurementFailed(f"{policy}, modelled: {len(record.requests) - len(journeys)} requests were not answered")
    return RoutingRun(
        policy=policy,
        requests=len(journeys),
        prompt_tokens=sum(journey.input_tokens for journey in journeys),
        cached_tokens=sum(journey.cached_tokens for journey in journeys),
        ttft_mean_s=times.mean,
        ttft_p90_s=times.p90,
        took_s=record.end_us / 1e6,
    )


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Model = Annotated[str, typer.Option(help="A folder of safetensors, a GGUF file, or smollm2.")]
Policies = Annotated[str, typer.Option(help="Policies, in this order.", metavar="NAME,NAME,…")]
Instances = Annotated[int, typer.Option(min=1, max=64, help="Mixed instances of each fleet.")]
SessionsCount = Annotated[int, typer.Option(min=1, max=10_000, help="Conversations.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Conversations at once.")]
Scale = Annotated[float, typer.Option(min=0.01, max=10, help="What clients say, × this.")]
Seed = Annotated[int, typer.Option(min=0)]
Real = Annotated[bool, typer.Option(help="Also start real instances here; without them it is a matter of seconds.")]


def routing(
    trace: ConversationFile = None,
    traces: ShareGptFolder = None,
    model: Model = "smollm2",
    policies: Policies = "round-robin,cache-aware",
    instances: Instances = 3,
    sessions: SessionsCount = 78,
    concurrency: Concurrency = 12,
    input_scale: Scale = 0.5,
    seed: Seed = 0,
    real: Real = True,
    json_file: JsonFile = Path("bench-results/routing.json"),
) -> None:
    """How much of each prompt an instance had cached, and the time to the first token, by the router's policy.

    In virtual time on modelled GPUs, and with real instances on this machine, a fresh fleet for each policy.
    """
    names = policies.split(",")

    def prepare(progress: Progress) -> Experiment[RoutingReport]:
        load = ConversationLoad(count=sessions, concurrency=concurrency, input_scale=input_scale, seed=seed)
        conversations = read_conversations(find_conversations(trace, traces))
        drawn = load.drawn(conversations)
        asked = sum(len(session.rounds) for session in drawn) if real else 0

        def run() -> RoutingReport:
            modelled_runs = modelled(names, instances, load, conversations, progress)
            runs = asyncio.run(measure(model, names, instances, load, drawn, progress)) if real else []
            return RoutingReport(load, instances, runs, modelled_runs)

        return Experiment(len(names) * (asked + 1), run)

    run_benchmark(prepare, show, json_file)


COLUMNS: Columns[RoutingRun] = (
    ("policy", lambda run: run.policy),
    ("requests", lambda run: f"{run.requests:,}"),
    ("prompt tokens", lambda run: f"{run.prompt_tokens:,}"),
    ("found cached", lambda run: f"{run.hit_rate:.1%}"),
    ("TTFT mean", lambda run: f"{run.ttft_mean_s:.3f} s"),
    ("TTFT p90", lambda run: f"{run.ttft_p90_s:.3f} s"),
    ("whole run", lambda run: f"{run.took_s:.1f} s"),
)


def show(console: Console, report: RoutingReport) -> None:
    load, instances = report.load, report.instances
    if report.runs:
        title = f"{load.count} conversations, {load.concurrency} at once, {instances} mixed instances"
        console.print(table_of(title, COLUMNS, report.runs))
    title = f"{load.count} conversations × {MODELLED_SCALE:g}, {MODELLED_CLIENTS} at once, {instances} × {MODELLED}"
    console.print(table_of(title, COLUMNS, report.modelled))
