"""Goodput of a cluster that splits prefill and decode, beside one whose instances do everything.

Owns the load, the clusters that are compared and how they are judged. The load is a trace with its own arrival times,
bunches spread, played at several speeds; every cluster has the same number of instances of the same machine and model. A
cluster is judged by the requests that arrive after its caches and queues have filled a little: good is one whose first token
came and whose tokens came within the targets. Instances that do everything are given several chunk sizes, since theirs
decides between the two targets; the best one counts. Clients are sent to instances in turn; a decode instance
chooses its prefill instance as in service. Placing clients by load needs a router that knows all queues; its effect on
mixed instances is shown too, and kept apart in the verdict.

Costs: step times from the model's file; KV transfers between instances as in `sim.timed_transfers`. The time of schedulers
and front ends is not charged (tens of microseconds beside steps of 5 ms and more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from baton import __version__
from baton.bench.plot import require_matplotlib
from baton.bench.sim_run import LANE_GBYTES_PER_S, BadSimOptions, blocks_of, road_of
from baton.bench.trace_calls import TraceLoad, read_load
from baton.core.config import WorkerConfig
from baton.sim.cluster import PrefillDecodeSplit, RunFailed, RunSpec, simulate
from baton.sim.plots import POLICY_COLOURS, POLICY_STYLES
from baton.sim.report import FINISHED, LatencyTargets, ValueDistribution, busy_shares, describe
from baton.sim.run_records import RunRecord, SimulatedRequest
from baton.sim.step_times import StepTimes, load_step_times
from benchmarks.jobs import cores, run_jobs
from benchmarks.options import JsonIfGiven, LinkGbytes, Processes
from benchmarks.runner import ABSENT, Columns, Experiment, Progress, find_trace, run_benchmark, table_of

SCHEMA = 1
STEP_TIMES = "h200-8b"
BLOCK_SIZE = 16
CONTEXT_TOKENS = 131_072
SLOTS = 256
TRACE_GLOB = "*mooncake*conversation*.jsonl*"
WARM_SHARE = 0.2
"""Share of first arrivals that are not judged."""
STEP_TOKENS = 2048
MIXED_STEP_TOKENS = (512, 1024, 2048)


class SplitOptions(msgspec.Struct, frozen=True):
    trace: str
    requests: int = 800
    speeds: tuple[float, ...] = (1.0, 1.3, 1.6, 1.9, 2.2)
    instances: int = 8
    givers: tuple[int, ...] = (4, 5, 6, 7)
    mixed_step_tokens: tuple[int, ...] = MIXED_STEP_TOKENS
    seeds: int = 1
    ttft_s: float = 2.0
    tpot_ms: float = 50.0
    lane_gbytes_per_s: float = 50.0

    def __post_init__(self) -> None:
        for givers in self.givers:
            if not 1 <= givers < self.instances:
                raise BadSimOptions(f"{givers} of {self.instances} instances cannot prefill for the others")

    def load(self) -> TraceLoad:
        return read_load(Path(self.trace), self.requests, None, CONTEXT_TOKENS)


class SplitJob(msgspec.Struct, frozen=True):
    """One run: a cluster at one speed."""

    options: SplitOptions
    speed: float
    seed: int
    givers: int
    """Prefill instances; 0: all instances are mixed."""
    step_tokens: int = STEP_TOKENS
    by_load: bool = False
    """Requests go to the instance with the least to prefill, else in turn."""

    @property
    def takers(self) -> int:
        return self.options.instances - self.givers

    @property
    def cluster(self) -> str:
        if self.givers:
            return f"{self.givers}P{self.takers}D"
        return f"mixed ×{self.takers}, {'by load' if self.by_load else 'in turn'}, {self.step_tokens:,}"


class SplitRun(msgspec.Struct, frozen=True):
    cluster: str
    givers: int
    by_load: bool
    speed: float
    seed: int
    offered_per_s: float
    judged: int
    good_per_s: float
    good_share: float
    late_share: float
    """Share with a late first token and timely others."""
    slow_share: float
    """Share with a timely first token and slow others."""
    both_share: float
    unanswered: int
    ttft_s: ValueDistribution
    tpot_ms: ValueDistribution
    hit_rate: float
    """Share of prompt tokens cached on the instance that prefilled."""
    busy_givers: float | None
    busy_takers: float
    transfer_ms: ValueDistribution | None
    """Hand-over time without queueing and computing on the prefill instance."""
    handovers: int
    refused: int
    failed: int
    link_busy: float | None
    """Mean use of the prefill instances' links."""
    preemptions: int
    steps: int
    wall_s: float


class SplitReport(msgspec.Struct, frozen=True):
    schema: int
    version: str
    trace: str
    requests: int
    bunched: int
    """Requests with the timestamp of the previous one."""
    settings: dict[str, str | int | float]
    hopeless_share: float
    """Share of requests whose prefill alone exceeds the target on an idle instance with a cold cache."""
    runs: list[SplitRun]

    @property
    def clusters(self) -> list[str]:
        return list(dict.fromkeys(run.cluster for run in self.runs))

    def of(self, cluster: str, speed: float | None = None) -> list[SplitRun]:
        return [run for run in self.runs if run.cluster == cluster and speed in (None, run.speed)]

    def goodput(self, cluster: str, speed: float) -> float:
        """Mean over seeds."""
        runs = self.of(cluster, speed)
        return sum(run.good_per_s for run in runs) / len(runs)

    def peak(self, cluster: str) -> float:
        """The speed with the highest goodput of a cluster."""
        return max(dict.fromkeys(run.speed for run in self.of(cluster)), key=lambda speed: self.goodput(cluster, speed))

    def best(self, *, split: bool) -> str | None:
        """The cluster with the highest peak, among split or mixed ones with clients placed in turn."""
        names = dict.fromkeys(run.cluster for run in self.runs if bool(run.givers) is split and not run.by_load)
        return max(names, key=lambda name: self.goodput(name, self.peak(name)), default=None)


class Splits:
    def __init__(self, options: SplitOptions) -> None:
        self._options = options
        self._load = options.load()
        if not self._load.is_timed:
            raise BadSimOptions(f"{options.trace} has lengths but no times")
        self.jobs = [
            job
            for speed in options.speeds
            for seed in range(options.seeds)
            for job in self._clusters(speed, seed)
        ]  # fmt: skip

    def _clusters(self, speed: float, seed: int) -> list[SplitJob]:
        options = self._options
        return [
            *(SplitJob(options, speed, seed, 0, tokens) for tokens in options.mixed_step_tokens),
            SplitJob(options, speed, seed, 0, by_load=True),
            *(SplitJob(options, speed, seed, givers) for givers in options.givers),
        ]

    def run(self, done: Callable[[SplitRun], None], processes: int) -> SplitReport:
        runs = run_jobs("split", self.jobs, SplitRun, done, processes)
        options, load, times = self._options, self._load, load_step_times(STEP_TIMES)
        alone_s = [_alone_us(times, request.input_tokens) / 1e6 for request in load.requests]
        return SplitReport(
            schema=SCHEMA,
            version=__version__,
            trace=Path(options.trace).name,
            requests=len(load.requests),
            bunched=load.bunched,
            settings={
                "step_times": STEP_TIMES,
                "kv_blocks": blocks_of(times, None, BLOCK_SIZE),
                "block_size": BLOCK_SIZE,
                "step_tokens_split": STEP_TOKENS,
                "slots": SLOTS,
                "ttft_s": options.ttft_s,
                "tpot_ms": options.tpot_ms,
                "lane_gbytes_per_s": options.lane_gbytes_per_s,
                "warm_share": WARM_SHARE,
                "seeds": options.seeds,
            },
            hopeless_share=float(np.mean([took_s > options.ttft_s for took_s in alone_s])),
            runs=runs,
        )


def _alone_us(times: StepTimes, tokens: int) -> int:
    """Time of a prompt's prefill on an idle instance."""
    spent_us = 0
    for begin in range(0, tokens, STEP_TOKENS):
        end = min(tokens, begin + STEP_TOKENS)
        spent_us += times.step_us(0, 0, end - begin, (end * (end + 1) - begin * (begin + 1)) // 2)
    return spent_us


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_split(job: SplitJob) -> SplitRun:
    options, times = job.options, load_step_times(STEP_TIMES)
    calls = options.load().at_their_times(job.seed, job.speed)
    config = WorkerConfig(
        slots=SLOTS,
        blocks=blocks_of(times, None, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=job.step_tokens,
        waiting_max=len(calls),
    )
    road = road_of(times, BLOCK_SIZE, options.lane_gbytes_per_s)
    spec = RunSpec(
        job.cluster,
        options.instances,
        config,
        times,
        calls,
        seed=job.seed,
        spans_max=0,
        split=PrefillDecodeSplit(job.givers, config, times, road) if job.givers else None,
        chosen=_least if job.by_load else None,
    )
    return _judged(job, simulate(spec))


def _least(queued_tokens: Sequence[int]) -> int:
    return min(range(len(queued_tokens)), key=queued_tokens.__getitem__)


def _judged(job: SplitJob, record: RunRecord) -> SplitRun:
    last_us = max(journey.arrived_us for journey in record.requests)
    warm_us = round(last_us * WARM_SHARE)
    judged = [journey for journey in record.requests if journey.arrived_us >= warm_us]
    finished = [journey for journey in judged if journey.outcome in FINISHED]
    targets = LatencyTargets(job.options.ttft_s, job.options.tpot_ms)
    late = np.array([(journey.ttft_us or 0) > targets.ttft_s * 1e6 for journey in finished])
    slow = np.array([(journey.tpot_us or 0) > targets.tpot_ms * 1e3 for journey in finished])
    good, window_s = sum(targets.met_by(journey) for journey in judged), (last_us - warm_us) / 1e6
    ttft_s, tpot_ms = _latencies(finished)
    busy, takers = busy_shares(record), job.takers
    if busy is None:
        raise RunFailed(f"{job.cluster} at × {job.speed} did nothing")
    handed = record.handed
    return SplitRun(
        cluster=job.cluster,
        givers=job.givers,
        by_load=job.by_load,
        speed=job.speed,
        seed=job.seed,
        offered_per_s=len(judged) / window_s,
        judged=len(judged),
        good_per_s=good / window_s,
        good_share=good / len(judged),
        late_share=float((late & ~slow).sum()) / len(judged),
        slow_share=float((slow & ~late).sum()) / len(judged),
        both_share=float((late & slow).sum()) / len(judged),
        unanswered=len(judged) - len(finished),
        ttft_s=ttft_s,
        tpot_ms=tpot_ms,
        hit_rate=sum(j.cached_tokens for j in finished) / sum(j.input_tokens for j in finished),
        busy_givers=float(busy[takers:].mean()) if job.givers else None,
        busy_takers=float(busy[:takers].mean()),
        transfer_ms=describe((j.transfer_us for j in finished if j.attempts), unit_us=1e3),
        handovers=sum(one.made for one in handed[:takers]),
        refused=sum(one.refused for one in handed[:takers]),
        failed=sum(one.failed for one in handed[:takers]),
        link_busy=sum(one.busy_us for one in handed[takers:]) / job.givers / record.end_us if job.givers else None,
        preemptions=sum(journey.preemptions for journey in judged),
        steps=record.steps,
        wall_s=record.wall_s,
    )


def _latencies(finished: Sequence[SimulatedRequest]) -> tuple[ValueDistribution, ValueDistribution]:
    first = describe(journey.ttft_us for journey in finished)
    between = describe((journey.tpot_us for journey in finished), unit_us=1e3)
    if first is None or between is None:
        raise RunFailed("nobody was answered")
    return first, between


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


TraceFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Trace with times, lengths and prefixes; also .gz.")
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or the Mooncake conversations in this folder.")
]
Requests = Annotated[int, typer.Option(min=10, max=1_000_000, help="First requests of the trace that fit.")]
Speeds = Annotated[str, typer.Option(help="The trace's times, × these.", metavar="X,X,…")]
Instances = Annotated[int, typer.Option(min=2, max=1024, help="Machines of every cluster.")]
Givers = Annotated[str, typer.Option(help="How many of them prefill for the others, one split each.", metavar="N,N,…")]
Chunks = Annotated[str, typer.Option(help="Chunk sizes of the cluster that is not split.", metavar="N,N,…")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="Runs of each; others than the first move arrivals a little.")]
TtftSlo = Annotated[float, typer.Option(min=0.001, help="Good: first token within.")]
TpotSlo = Annotated[float, typer.Option(min=0.001, help="Good: and then a token within, on the mean.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw a PNG (extra: plot).")]


def split(
    trace: TraceFile = None,
    traces: TracesFolder = None,
    requests: Requests = 800,
    speeds: Speeds = "1,1.3,1.6,1.9,2.2",
    instances: Instances = 8,
    givers: Givers = "4,5,6,7",
    mixed_chunks: Chunks = "512,1024,2048",
    seeds: Seeds = 1,
    ttft_slo_s: TtftSlo = 2.0,
    tpot_slo_ms: TpotSlo = 50.0,
    link_gbytes: LinkGbytes = LANE_GBYTES_PER_S,
    processes: Processes = None,
    json_file: JsonIfGiven = None,
    plot_file: PlotFile = None,
) -> None:
    """Goodput of clusters that split prefill and decode, beside one that does not, with the schedulers that serve.

    Machines are modelled (an 8B model on one H200 each) and so is the network; everything that decides is what serves. Takes
    about a quarter of an hour on two cores; fewer --requests, --speeds or --givers make it shorter.
    """

    def prepare(progress: Progress) -> Experiment[SplitReport]:
        if plot_file is not None:
            require_matplotlib()
        options = SplitOptions(
            trace=str(find_trace(trace, traces, TRACE_GLOB, "the Mooncake conversations")),
            requests=requests,
            speeds=tuple(_numbers(speeds, "--speeds")),
            instances=instances,
            givers=tuple(round(number) for number in _numbers(givers, "--givers")),
            mixed_step_tokens=tuple(round(number) for number in _numbers(mixed_chunks, "--mixed-chunks")),
            seeds=seeds,
            ttft_s=ttft_slo_s,
            tpot_ms=tpot_slo_ms,
            lane_gbytes_per_s=link_gbytes,
        )
        work = Splits(options)
        progress.doing("clusters × speeds")
        return Experiment(len(work.jobs), lambda: work.run(lambda _run: progress.done(), processes or cores()))

    report = run_benchmark(prepare, show, json_file)
    if plot_file is not None:
        draw_split(report, plot_file)


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise BadSimOptions(f"{option} {text!r}: write numbers with commas between") from None
    if not all(0 < number < 1e9 for number in numbers) or len(set(numbers)) < len(numbers):
        raise BadSimOptions(f"{option} {text!r}: numbers above 0, each once")
    return numbers


def _cell(value: Callable[[SplitRun], float | None], form: str) -> Callable[[Sequence[SplitRun]], str]:
    def cell(runs: Sequence[SplitRun]) -> str:
        values = [seen for seen in map(value, runs) if seen is not None]
        return form.format(sum(values) / len(values)) if values else ABSENT

    return cell


PEAK_COLUMNS: Columns[Sequence[SplitRun]] = (
    ("cluster", lambda runs: runs[0].cluster),
    ("offered/s", _cell(lambda run: run.offered_per_s, "{:.2f}")),
    ("good/s", _cell(lambda run: run.good_per_s, "{:.2f}")),
    ("late", _cell(lambda run: run.late_share, "{:.0%}")),
    ("slow", _cell(lambda run: run.slow_share, "{:.0%}")),
    ("both", _cell(lambda run: run.both_share, "{:.0%}")),
    ("TTFT p50", _cell(lambda run: run.ttft_s.p50, "{:.2f}")),
    ("p90 s", _cell(lambda run: run.ttft_s.p90, "{:.1f}")),
    ("TPOT p50", _cell(lambda run: run.tpot_ms.p50, "{:.0f}")),
    ("p90 ms", _cell(lambda run: run.tpot_ms.p90, "{:.0f}")),
    ("busy P", _cell(lambda run: run.busy_givers, "{:.0%}")),
    ("busy D", _cell(lambda run: run.busy_takers, "{:.0%}")),
    ("cached", _cell(lambda run: run.hit_rate, "{:.0%}")),
    ("KV on its way ms", _cell(lambda run: run.transfer_ms.mean if run.transfer_ms else None, "{:.1f}")),
)


def show(console: Console, report: SplitReport) -> None:
    console.print(_goodput(report))
    peaks = [report.of(cluster, report.peak(cluster)) for cluster in report.clusters]
    console.print(table_of("At the speed at which each is best", PEAK_COLUMNS, peaks))
    for line in explained(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _goodput(report: SplitReport) -> Table:
    settings = report.settings
    table = Table(
        title=f"Good requests a second (share): TTFT ≤ {settings['ttft_s']:g} s and TPOT ≤ {settings['tpot_ms']:g} ms; "
        f"first {report.requests:,} requests of {report.trace}",
        title_justify="left",
    )
    table.add_column("offered requests/s")
    speeds = list(dict.fromkeys(run.speed for run in report.runs))
    for speed in speeds:
        offered = _mean([run for run in report.runs if run.speed == speed], lambda run: run.offered_per_s)
        table.add_column(f"{offered:.2f} (× {speed:g})", justify="right")
    best = [report.best(split=split) for split in (False, True)]
    for cluster in report.clusters:
        peak = report.peak(cluster)
        cells = [_goodput_cell(report.of(cluster, speed), bold=cluster in best and speed == peak) for speed in speeds]
        table.add_row(cluster, *cells)
    return table


def _goodput_cell(runs: Sequence[SplitRun], *, bold: bool) -> str:
    text = f"{_mean(runs, lambda run: run.good_per_s):.2f} ({_mean(runs, lambda run: run.good_share):.0%})"
    return f"[bold]{text}[/bold]" if bold else text


def _mean(runs: Sequence[SplitRun], value: Callable[[SplitRun], float]) -> float:
    return sum(map(value, runs)) / len(runs)


def explained(report: SplitReport) -> Iterator[str]:
    """Explain the tables, and why the better cluster is better."""
    settings = report.settings
    ttft_s, tpot_ms, lane = settings["ttft_s"], settings["tpot_ms"], settings["lane_gbytes_per_s"]
    yield (
        f"late: first token after {ttft_s:g} s; slow: then more than {tpot_ms:g} ms a token; both. Requests of the first "
        f"{settings['warm_share']:.0%} of the time are served and not judged. Step times of {settings['step_times']}; KV "
        f"over {lane:g} GB/s out of and into each instance, layer by layer. Who decodes is busy while anybody does."
    )
    yield (
        f"{report.bunched:,} requests share the timestamp of the one before; they are spread until the next. "
        f"{report.hopeless_share:.0%} of the prompts alone take longer than {ttft_s:g} s on an idle instance with a cold "
        "cache: where the cache does not help, no cluster serves those in time."
    )
    mixed, split = report.best(split=False), report.best(split=True)
    if mixed is not None and split is not None:
        yield from _verdict(report, mixed, split)


def _verdict(report: SplitReport, mixed: str, split: str) -> Iterator[str]:
    ours, theirs = report.of(mixed, report.peak(mixed)), report.of(split, report.peak(split))
    ratio = _mean(theirs, lambda run: run.good_per_s) / _mean(ours, lambda run: run.good_per_s)
    yield f"Best split {split}, best without {mixed}: × {ratio:.2f} in goodput at the peak of each."
    placed = {run.cluster for run in report.runs if run.by_load}
    for name in sorted(placed):
        placed_ratio = report.goodput(split, report.peak(split)) / report.goodput(name, report.peak(name))
        yield f"Against {name}, which needs somebody who knows all queues: × {placed_ratio:.2f}."
    chunk_ms = load_step_times(STEP_TIMES).step_us(0, 0, STEP_TOKENS, STEP_TOKENS * 8192) / 1e3
    yield (
        f"Why: a chunk of {STEP_TOKENS:,} tokens at 8k of context takes {chunk_ms:.0f} ms, and whoever decodes in that step "
        f"waits for it. {mixed}: {_mean(ours, _late):.0%} too late and {_mean(ours, _slow):.0%} too slow, busy "
        f"{_mean(ours, lambda run: run.busy_takers):.0%}. {split}: {_mean(theirs, _late):.0%} too late and "
        f"{_mean(theirs, _slow):.0%} too slow; those that prefill are busy "
        f"{_mean(theirs, lambda run: run.busy_givers or 0.0):.0%}, and KV is on its way for "
        f"{_mean(theirs, lambda run: run.transfer_ms.mean if run.transfer_ms else 0.0):.1f} ms."
    )


def _slow(run: SplitRun) -> float:
    return run.slow_share + run.both_share


def _late(run: SplitRun) -> float:
    return run.late_share + run.both_share


def draw_split(report: SplitReport, path: Path) -> None:
    """Plot goodput against the offered rate, one line per cluster."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, cluster in enumerate(report.clusters):
        speeds = sorted({run.speed for run in report.of(cluster)})
        offered = [report.of(cluster, speed)[0].offered_per_s for speed in speeds]
        good = [report.goodput(cluster, speed) for speed in speeds]
        style = POLICY_STYLES[(place // len(POLICY_COLOURS)) % len(POLICY_STYLES)]
        axes.plot(offered, good, style, marker="o", color=POLICY_COLOURS[place % len(POLICY_COLOURS)], label=cluster)
    settings = report.settings
    axes.set_title(
        f"{report.requests:,} requests of {report.trace}:\n"
        f"TTFT ≤ {settings['ttft_s']:g} s, TPOT ≤ {settings['tpot_ms']:g} ms",
        loc="left",
    )
    axes.set_xlabel("requests offered a second")
    axes.set_ylabel("good requests a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
