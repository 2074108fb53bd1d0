"""Compares reservation and victim policies on the lengths of a real trace.

Owns the load, the runs and the report. Each client declares a `max_tokens` larger than its answer, so the scheduler must
guess; the pool holds only a share of what the slots could use, so guesses matter. Every policy gets the same arrivals on one
simulated instance; seeds differ only in arrival times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console

from baton.bench.plot import BLUE, ORANGE, require_matplotlib
from baton.bench.sim_run import POLICIES, ReserveAndVictims
from baton.bench.stats import describe
from baton.bench.trace_calls import TraceLoad, read_load
from baton.bench.traces import TracedRequest
from baton.core.config import WorkerConfig
from baton.sim.cluster import PlannedRequest, RunFailed, RunSpec, simulate
from baton.sim.run_records import InstanceSample, RequestOutcome, RunRecord, SimulatedRequest
from baton.sim.step_times import load_step_times
from benchmarks.options import JsonIfGiven
from benchmarks.runner import Columns, Experiment, Progress, find_trace, run_benchmark, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = 2
STEP_TIMES = "h200-8b"
CONTEXT_TOKENS = 8192
UNTIMED_PER_S = 5.0
"""Arrival rate for a trace without times, before `speed`."""
TRACE_GLOB = "AzureLLMInferenceTrace*conv*.csv*"
LOOK_EVERY_US = 10_000
"""Sampling interval of the pool; about the time of a step."""
LOOKS_MAX = 200_000
"""Most samples while requests arrive."""
NETWORK_US = 100
"""One-way network latency."""
POOL_SAMPLES_MAX = 4000


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    trace: Path
    requests: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    slots: int = 256
    pool_share: float = 0.4
    """Blocks of the pool ÷ blocks that all slots would fill with answered requests of mean length."""
    max_tokens: int = 1024
    """`max_tokens` of every request, unless its answer is longer."""
    speed: float = 5.0
    """Factor on the trace's arrival rate."""
    block_size: int = 16


class PolicyRun(msgspec.Struct, frozen=True):
    policy: str
    seed: int
    preemptions: int
    recomputed_tokens: int
    recomputed_share: float
    """Recomputed share of all computed tokens."""
    finish_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    pool_use: float
    """Mean share of the pool held by requests while others wait."""
    steps: int


class PoolUse(msgspec.Struct, frozen=True):
    """Pool use over time, of the first seed."""

    policy: str
    at_s: list[float]
    share: list[float]


class PolicyReport(msgspec.Struct, frozen=True):
    schema: int
    trace: str
    requests: int
    skipped: int
    """Traced requests left out because they do not fit the context."""
    pool_blocks: int
    settings: dict[str, str | int | float]
    step_times: str
    """Name of the step-time model."""
    runs: list[PolicyRun]
    pool: list[PoolUse]


class Policies:
    def __init__(self, options: PolicyOptions, progress: Progress, policies: Sequence[ReserveAndVictims] = POLICIES) -> None:
        self._options = options
        self._progress = progress
        self._policies = policies
        self._load = read_load(options.trace, options.requests, options.max_tokens, CONTEXT_TOKENS)
        self._step_times = load_step_times(STEP_TIMES)
        self.config = _config(options, self._load.requests)

    @property
    def measurements(self) -> int:
        return len(self._policies) * len(self._options.seeds)

    def run(self) -> PolicyReport:
        runs: list[PolicyRun] = []
        pool: list[PoolUse] = []
        for seed in self._options.seeds:
            calls = _calls(self._load, self._options.speed, seed)
            for policy in self._policies:
                self._progress.doing(f"{policy.name}, seed {seed}")
                record = simulate(self._spec(policy, calls, seed))
                runs.append(_describe(record))
                if seed == self._options.seeds[0]:
                    pool.append(_pool_use(record))
                self._progress.done()
        return self._report(runs, pool)

    def _spec(self, policy: ReserveAndVictims, calls: Sequence[PlannedRequest], seed: int) -> RunSpec:
        return RunSpec(
            label=policy.name,
            instances=1,
            config=replace(self.config, reserve=policy.reserve, victims=policy.victims),
            step_times=self._step_times,
            calls=calls,
            seed=seed,
            network_us=NETWORK_US,
            look_every_us=max(LOOK_EVERY_US, (calls[-1].at_us or 0) // LOOKS_MAX),
            spans_max=0,
        )

    def _report(self, runs: list[PolicyRun], pool: list[PoolUse]) -> PolicyReport:
        options = self._options
        return PolicyReport(
            schema=SCHEMA,
            trace=options.trace.name,
            requests=len(self._load.requests),
            skipped=self._load.skipped,
            pool_blocks=self.config.blocks,
            settings={
                "slots": options.slots,
                "pool_share": options.pool_share,
                "max_tokens": options.max_tokens,
                "speed": options.speed,
                "block_size": options.block_size,
                "context_tokens": CONTEXT_TOKENS,
                "network_us": NETWORK_US,
            },
            step_times=self._step_times.name,
            runs=runs,
            pool=pool,
        )


def _config(options: PolicyOptions, requests: Sequence[TracedRequest]) -> WorkerConfig:
    mean_tokens = sum(request.input_tokens + request.output_tokens for request in requests) / len(requests)
    blocks = round(options.pool_share * options.slots * mean_tokens / options.block_size)
    return WorkerConfig(
        slots=options.slots,
        # A request may declare the whole context, and must fit into the pool when it is alone.
        blocks=max(blocks, CONTEXT_TOKENS // options.block_size),
        block_size=options.block_size,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=max(2048, options.slots),
        waiting_max=len(requests),
    )


def _calls(load: TraceLoad, speed: float, seed: int) -> list[PlannedRequest]:
    """The trace's own times (evenly spaced where it has none), each moved by up to two mean gaps.

    Prompts share nothing, whatever the trace says: what is found in the cache is a preempted request's own past.
    """
    requests = load.requests
    last_s = requests[-1].at_s or len(requests) / UNTIMED_PER_S
    gap_s = last_s / len(requests)
    moved_s = np.random.default_rng([seed]).uniform(0.0, 2 * gap_s, size=len(requests)).tolist()
    times_s = [
        (index * gap_s if request.at_s is None else request.at_s) + late_s
        for index, (request, late_s) in enumerate(zip(requests, moved_s, strict=True))
    ]
    calls = [
        PlannedRequest(
            at_us=round(at_s / speed * 1e6),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            max_tokens=max(request.output_tokens, load.max_tokens or 0),
        )
        for at_s, request in zip(times_s, requests, strict=True)
    ]
    return sorted(calls, key=lambda call: call.at_us or 0)


def _describe(record: RunRecord) -> PolicyRun:
    first = describe([_ttft_us(journey) / 1e6 for journey in record.requests])
    if first is None:
        raise RunFailed(f"{record.label}: nobody asked for anything")
    recomputed = sum(journey.recomputed_tokens for journey in record.requests)
    # The last token of an answer is never fed, so it has no KV.
    computed = sum(journey.input_tokens + journey.output_tokens - 1 - journey.cached_tokens for journey in record.requests)
    finish_s = record.end_us / 1e6
    return PolicyRun(
        policy=record.label,
        seed=record.seed,
        preemptions=sum(journey.preemptions for journey in record.requests),
        recomputed_tokens=recomputed,
        recomputed_share=recomputed / max(1, recomputed + computed),
        finish_s=finish_s,
        output_tokens_per_s=sum(journey.output_tokens for journey in record.requests) / finish_s,
        ttft_mean_s=first.mean,
        ttft_p99_s=first.p99,
        pool_use=_mean_use(record),
        steps=record.steps,
    )


def _ttft_us(journey: SimulatedRequest) -> int:
    """Time to first token; an unanswered request fails the run, since losing requests would look fast."""
    if journey.ttft_us is None or journey.outcome not in (RequestOutcome.STOP, RequestOutcome.LENGTH):
        raise RunFailed(f"request {journey.index} ended as {journey.outcome}")
    return journey.ttft_us


def _mean_use(record: RunRecord) -> float:
    """Mean pool use over samples in which requests wait."""
    shares = [_share(look, record) for look in record.samples if look.waiting]
    return sum(shares) / max(1, len(shares))


def _pool_use(record: RunRecord) -> PoolUse:
    every = max(1, -(-len(record.samples) // POOL_SAMPLES_MAX))
    kept = record.samples[::every]
    return PoolUse(record.label, [look.at_us / 1e6 for look in kept], [_share(look, record) for look in kept])


def _share(look: InstanceSample, record: RunRecord) -> float:
    """Share of the pool held by requests, without cached blocks."""
    return look.running_blocks / record.pool_blocks


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


TraceFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Take lengths and times from this trace; also .gz.")
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or from the Azure conversations in this folder.")
]
Requests = Annotated[int, typer.Option(min=1, max=100_000, help="First requests of the trace that fit.")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="Runs of each policy, with other arrival times.")]
Slots = Annotated[int, typer.Option("--max-num-seqs", min=1, max=100_000, help="Most requests that run at once.")]
PoolShare = Annotated[float, typer.Option(min=0.01, max=10.0, help="KV pool ÷ what that many mean requests fill.")]
MaxTokens = Annotated[int, typer.Option(min=1, max=4096, help="max_tokens that clients declare; answers are as traced.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Arrivals of the trace, × this fast.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="Draw pool use over time as PNG (extra: plot).")
]


def policies(
    trace: TraceFile = None,
    traces: TracesFolder = None,
    requests: Requests = 2000,
    seeds: Seeds = 3,
    max_num_seqs: Slots = 256,
    pool_share: PoolShare = 0.4,
    max_tokens: MaxTokens = 1024,
    speed: Speed = 5.0,
    json_file: JsonIfGiven = None,
    plot_file: PlotFile = None,
) -> None:
    """Compare reservation and victim policies on a real trace, with the real scheduler in virtual time.

    The GPU is a model of step times (an 8B model on one H200); everything that decides is what serves. Takes about two
    minutes; fewer --requests or --seeds make it shorter.
    """

    def prepare(progress: Progress) -> Experiment[PolicyReport]:
        if plot_file is not None:
            require_matplotlib()
        source = find_trace(trace, traces, TRACE_GLOB, "the Azure conversation trace of 2023")
        options = PolicyOptions(source, requests, tuple(range(seeds)), max_num_seqs, pool_share, max_tokens, speed)
        work = Policies(options, progress)
        return Experiment(work.measurements, work.run)

    report = run_benchmark(prepare, show, json_file)
    if plot_file is not None:
        draw_pool(report, plot_file)


def show(console: Console, report: PolicyReport) -> None:
    seeds = len({run.seed for run in report.runs})
    title = f"{report.requests:,} requests of {report.trace}, pool of {report.pool_blocks:,} blocks, {seeds} seeds"
    by_policy = [
        [run for run in report.runs if run.policy == name] for name in dict.fromkeys(run.policy for run in report.runs)
    ]
    console.print(table_of(title, COLUMNS, by_policy))
    console.print(
        f"Mean of the seeds (smallest – largest), in virtual time with the step times of {report.step_times}. "
        "Pool use counts while requests wait.",
        style="dim",
        highlight=False,
    )


def _mean(value: Callable[[PolicyRun], float], form: str, *, spread: bool = True) -> Callable[[Sequence[PolicyRun]], str]:
    def cell(runs: Sequence[PolicyRun]) -> str:
        values = [value(run) for run in runs]
        mean, least, most = (form.format(each) for each in (sum(values) / len(values), min(values), max(values)))
        return f"{mean} ({least}–{most})" if spread and least != most else mean

    return cell


COLUMNS: Columns[Sequence[PolicyRun]] = (
    ("reserve, victims", lambda runs: runs[0].policy),
    ("preemptions", _mean(lambda run: run.preemptions, "{:,.0f}")),
    ("recomputed tokens", _mean(lambda run: run.recomputed_tokens, "{:,.0f}")),
    ("share", _mean(lambda run: run.recomputed_share, "{:.1%}", spread=False)),
    ("finish s", _mean(lambda run: run.finish_s, "{:,.1f}")),
    ("output tokens/s", _mean(lambda run: run.output_tokens_per_s, "{:,.0f}", spread=False)),
    ("TTFT mean s", _mean(lambda run: run.ttft_mean_s, "{:,.2f}")),
    ("p99 s", _mean(lambda run: run.ttft_p99_s, "{:,.1f}")),
    ("pool use", _mean(lambda run: run.pool_use, "{:.1%}", spread=False)),
)


def draw_pool(report: PolicyReport, path: Path) -> None:
    """Plot the pool use of each policy, one panel each, on a common time axis."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(report.pool)
    figure = Figure(figsize=(12, 1.2 + 1.9 * count), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{report.requests:,} requests of {report.trace}: share of {report.pool_blocks:,} KV blocks in use\n"
        "dashed: mean while requests wait"
    )
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)
    for axes, use in zip(panels[:, 0], report.pool, strict=True):
        _panel(axes, report, use)
    panels[-1, 0].set_xlabel("seconds of virtual time")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def _panel(axes: Axes, report: PolicyReport, use: PoolUse) -> None:
    run = next(run for run in report.runs if run.policy == use.policy)
    axes.fill_between(use.at_s, use.share, step="post", color=BLUE, alpha=0.25, linewidth=0)
    axes.step(use.at_s, use.share, where="post", color=BLUE, linewidth=0.8)
    axes.axhline(run.pool_use, color=ORANGE, linewidth=1.2, linestyle="--")
    figures = f"{run.pool_use:.0%} while requests wait, {run.preemptions:,} preemptions, done after {run.finish_s:,.1f} s"
    axes.set_title(f"{use.policy}:  {figures}", fontsize=10, loc="left")
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
