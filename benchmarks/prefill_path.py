"""Compares the short prefill path of a prefill instance with the general one on the same sessions.

Owns the load, the charge and the comparison. One prefill and three decode instances on a machine that is a roofline of the
model for which such a path was first published; 39 clients run 78 conversations of several rounds, each prompt with all
earlier rounds. Lengths and rounds are drawn from real conversations; new prompt tokens are scaled until the general path's
waits equal the published ones (`INPUT_SCALE`), because those conversations are not public.

What a path costs, and how it is charged:

    a pass       plan and settle of the giver's worker, in CPU time, measured here on these very sessions, both paths in
                 turns; each step of the giver takes so much longer. In service a pass is hidden behind the step before
                 it, so this overstates what a cheaper pass can save
    a step       the roofline
    blocks, order, waiting: the schedulers themselves, nothing is charged for them
    KV           as in `sim.timed_transfers`

A third run shows what it would take: the general path with so much time lost in each of the giver's passes that the short
path gains in total time what was reported. How much that is says what the original's general path must have lost, whatever
it lost it to; whether waits then fall as reported says whether time lost in passes explains them.

A client's wait for its first token is split by phase: queueing at the prefill instance, prefill (other chunks of the same
steps included), transfer, and the rest (messages, the front end, the decode instance's next step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton import __version__
from baton.bench.sim_run import LANE_GBYTES_PER_S, blocks_of, road_of
from baton.core.config import HandoverConfig, PrefillPath, WorkerConfig
from baton.sim.cluster import PrefillDecodeSplit, RunFailed, RunSpec, simulate
from baton.sim.device import StepTimeModel
from baton.sim.report import FINISHED, ValueDistribution, busy_shares, describe
from baton.sim.run_records import RunRecord
from baton.sim.step_times import load_step_times
from benchmarks.conversations import SimulatedConversations, find_conversations, read_conversations
from benchmarks.jobs import cores, run_jobs
from benchmarks.options import ConversationFile, JsonIfGiven, LinkGbytes, Processes, ShareGptFolder
from benchmarks.runner import Experiment, Progress, alternating, run_benchmark

SCHEMA = 1
STEP_TIMES = "glm-4.5-air-tp8"
GIVERS, TAKERS = 1, 3
BLOCK_SIZE = 64
CONTEXT_TOKENS = 131_072
STEP_TOKENS = 8192
SLOTS = 64
MAX_TOKENS = 1024
DEADLINE_US = 3_600_000_000
"""No effective deadline for hand-overs, since this load makes clients wait for minutes."""
INPUT_SCALE = 120.0
GIVER_BLOCKS = 12_000
"""Of 64 tokens. With these two the general path's mean wait is near the reported 29.4 s: a pool with room for the machine's
whole memory keeps most histories of 39 sessions, and then even the longest prompts are waited for a few seconds only."""
METER_ROUNDS = 3


class PathKind(StrEnum):
    """The three runs that are compared."""

    GENERAL = "general"
    SHORT = "short"
    LOSSY = "lossy"
    """The general path with time lost in each pass."""

    @property
    def path(self) -> PrefillPath:
        return PrefillPath.SHORT if self is PathKind.SHORT else PrefillPath.GENERAL


PATHS = (PathKind.GENERAL, PathKind.SHORT)


class PublishedFigure(msgspec.Struct, frozen=True):
    """One published figure, before and after."""

    general: float
    short: float

    @property
    def change(self) -> float:
        return self.short / self.general - 1.0


REPORTED = {
    "total_s": PublishedFigure(7912.0, 6778.0),
    "ttft_mean_s": PublishedFigure(29.4, 23.6),
    "ttft_p90_s": PublishedFigure(121.3, 91.7),
    "tokens_per_s": PublishedFigure(1.0, 1.167),
}
"""PaddlePaddle/FastDeploy, pull request 7944: GLM-4.5-Air, TP8, 1P3D, 39 concurrent, 78 multi-round sessions."""


class PathOptions(msgspec.Struct, frozen=True):
    trace: str
    seeds: int = 10
    sessions: int = 78
    clients: int = 39
    input_scale: float = INPUT_SCALE
    think_s: float = 0.0
    lane_gbytes_per_s: float = LANE_GBYTES_PER_S
    giver_blocks: int = GIVER_BLOCKS
    """Pool of the prefill instance; the decode instances have as many blocks as fit."""


class PathJob(msgspec.Struct, frozen=True):
    """One run."""

    options: PathOptions
    kind: PathKind
    seed: int
    pass_us: float = 0.0
    """Time added to each step of the prefill instance, lost time included."""
    metered: bool = False
    """Whether to measure the CPU time of the prefill instance's passes."""


class PathWaits(msgspec.Struct, frozen=True):
    """Mean wait for the first token in seconds, by phase."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    rest_s: float


class PathPasses(msgspec.Struct, frozen=True):
    """CPU time of the prefill instance's worker."""

    passes: int
    plan_us: float
    """Mean time of a pass that planned a step."""
    settle_us: float
    """Mean time of settling a step."""
    idle_passes: int
    """Passes that planned nothing."""

    @property
    def us(self) -> float:
        return self.plan_us + self.settle_us


class PathRun(msgspec.Struct, frozen=True):
    kind: PathKind
    seed: int
    requests: int
    total_s: float
    ttft_s: ValueDistribution
    tpot_ms: ValueDistribution
    tokens_per_s: float
    """Output tokens per simulated second."""
    wait: PathWaits
    giver_busy: float
    giver_held_peak: float
    """Largest share of the prefill pool held by requests; below 1, none waited for blocks."""
    giver_steps: int
    charged_s: float
    """Total time charged for the prefill instance's passes."""
    takers_busy: float
    computed_tokens: int
    """Computed prompt tokens."""
    cached_share: float
    """Share of prompt tokens cached on the instance that prefilled."""
    handovers: int
    refused: int
    failed: int
    preemptions: int
    passes: PathPasses | None

    def figure(self, name: str) -> float:
        return {
            "total_s": self.total_s,
            "ttft_mean_s": self.ttft_s.mean,
            "ttft_p90_s": self.ttft_s.p90,
            "tokens_per_s": self.tokens_per_s,
        }[name]


class PathReport(msgspec.Struct, frozen=True):
    schema: int
    version: str
    trace: str
    settings: dict[str, str | int | float]
    passes: dict[PathKind, list[PathPasses]]
    """One entry per measurement."""
    lost_us: float
    """Time lost by the lossy path in each pass."""
    reported: dict[str, PublishedFigure]
    runs: list[PathRun]

    def of(self, kind: PathKind) -> list[PathRun]:
        """Runs of one kind, by seed."""
        return sorted((run for run in self.runs if run.kind is kind), key=lambda run: run.seed)

    def changes(self, name: str, before: PathKind) -> list[float]:
        """Relative change from another path to the short one, by seed."""
        pairs = zip(self.of(before), self.of(PathKind.SHORT), strict=True)
        return [short.figure(name) / other.figure(name) - 1.0 for other, short in pairs]

    def pass_us(self, kind: PathKind) -> float:
        return median(measured.us for measured in self.passes[kind])


class Paths:
    def __init__(self, options: PathOptions) -> None:
        self._options = options
        spec_of(PathJob(options, PathKind.SHORT, 0))  # raises now rather than later

    @property
    def runs(self) -> int:
        return len(PATHS) * METER_ROUNDS + 1 + len(PathKind) * self._options.seeds

    def run(self, progress: Progress, processes: int) -> PathReport:
        metered = self._meter(progress)
        passes = {kind: [run.passes for run in runs if run.passes is not None] for kind, runs in metered.items()}
        charge = {kind: median(measured.us for measured in passes[kind]) for kind in PATHS}
        progress.doing("looking for what must be lost")
        lost_us = self._lost_us(metered[PathKind.GENERAL][0], charge[PathKind.GENERAL])
        progress.done()
        charge[PathKind.LOSSY] = charge[PathKind.GENERAL] + lost_us
        progress.doing("all seeds")
        jobs = [PathJob(self._options, kind, seed, charge[kind]) for seed in range(self._options.seeds) for kind in PathKind]
        runs = run_jobs("prefill-path", jobs, PathRun, lambda _run: progress.done(), processes)
        return self._report(passes, lost_us, runs)

    def _meter(self, progress: Progress) -> dict[PathKind, list[PathRun]]:
        """Measure both paths in turns, in this process, on the sessions of seed 0."""
        found: dict[PathKind, list[PathRun]] = {kind: [] for kind in PATHS}
        for _, kind in alternating(PATHS, METER_ROUNDS):
            progress.doing(f"timing passes, {kind} path")
            found[kind].append(run_path(PathJob(self._options, kind, 0, metered=True)))
            progress.done()
        return found

    def _lost_us(self, without: PathRun, pass_us: float) -> float:
        """Time per pass whose removal reduces the total time as published; from one trial on seed 0."""
        reported = REPORTED["total_s"]
        wanted = reported.general / reported.short - 1.0
        guess_us = wanted * without.total_s * 1e6 / without.giver_steps
        tried = run_path(PathJob(self._options, PathKind.LOSSY, 0, pass_us + guess_us))
        return guess_us * wanted / (tried.total_s / without.total_s - 1.0)

    def _report(self, passes: dict[PathKind, list[PathPasses]], lost_us: float, runs: list[PathRun]) -> PathReport:
        settings: dict[str, str | int | float] = msgspec.structs.asdict(self._options)
        del settings["trace"]
        settings |= {
            "step_times": STEP_TIMES,
            "givers": GIVERS,
            "takers": TAKERS,
            "taker_blocks": decode_blocks(),
            "block_size": BLOCK_SIZE,
            "step_tokens": STEP_TOKENS,
            "max_tokens": MAX_TOKENS,
        }
        return PathReport(
            schema=SCHEMA,
            version=__version__,
            trace=Path(self._options.trace).name,
            settings=settings,
            passes=passes,
            lost_us=lost_us,
            reported=REPORTED,
            runs=runs,
        )


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ChargedStepTimes:
    """Step times plus the time of a pass."""

    times: StepTimeModel
    pass_us: float

    def step_us(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return round(self.times.step_us(decodes, decode_context, prefill_tokens, prefill_pairs) + self.pass_us)


def decode_blocks() -> int:
    return blocks_of(load_step_times(STEP_TIMES), None, BLOCK_SIZE)


def run_path(job: PathJob) -> PathRun:
    return _described(job, simulate(spec_of(job)))


def spec_of(job: PathJob) -> RunSpec:
    options, times = job.options, load_step_times(STEP_TIMES)
    think_us = round(options.think_s * 1e6)
    sessions = SimulatedConversations(options.sessions, options.input_scale, CONTEXT_TOKENS, MAX_TOKENS, think_us)
    config = WorkerConfig(
        slots=SLOTS,
        blocks=decode_blocks(),
        block_size=BLOCK_SIZE,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=STEP_TOKENS,
        waiting_max=options.clients,
        handover=HandoverConfig(deadline_us=DEADLINE_US),
    )
    giver_config = replace(config, blocks=options.giver_blocks, prefill_path=job.kind.path)
    road = road_of(times, BLOCK_SIZE, options.lane_gbytes_per_s)
    return RunSpec(
        label=job.kind,
        instances=GIVERS + TAKERS,
        config=config,
        step_times=times,
        calls=sessions.drawn(read_conversations(Path(options.trace)), job.seed),
        concurrency=options.clients,
        seed=job.seed,
        spans_max=0,
        split=PrefillDecodeSplit(GIVERS, giver_config, ChargedStepTimes(times, job.pass_us), road),
        metered=job.metered,
    )


def _described(job: PathJob, record: RunRecord) -> PathRun:
    journeys = [journey for journey in record.requests if journey.outcome in FINISHED]
    first = describe(journey.ttft_us for journey in journeys)
    between = describe((journey.tpot_us for journey in journeys), unit_us=1e3)
    busy = busy_shares(record)
    if len(journeys) < len(record.requests) or first is None or between is None or busy is None:
        raise RunFailed(f"{job.kind}, seed {job.seed}: {len(record.requests) - len(journeys)} requests were not answered")
    total_s, handed = record.end_us / 1e6, record.handed
    asked, cached = (sum(values) for values in zip(*((j.input_tokens, j.cached_tokens) for j in journeys), strict=True))
    return PathRun(
        kind=job.kind,
        seed=job.seed,
        requests=len(journeys),
        total_s=total_s,
        ttft_s=first,
        tpot_ms=between,
        tokens_per_s=sum(journey.output_tokens for journey in journeys) / total_s,
        wait=_wait(record),
        giver_busy=float(busy[TAKERS:].mean()),
        giver_held_peak=_held_peak(record),
        giver_steps=sum(record.steps_each[TAKERS:]),
        charged_s=sum(record.steps_each[TAKERS:]) * job.pass_us / 1e6,
        takers_busy=float(busy[:TAKERS].mean()),
        computed_tokens=asked - cached,
        cached_share=cached / asked,
        handovers=sum(one.made for one in handed[:TAKERS]),
        refused=sum(one.refused for one in handed[:TAKERS]),
        failed=sum(one.failed for one in handed[:TAKERS]),
        preemptions=sum(journey.preemptions for journey in journeys),
        passes=_passes(record) if job.metered else None,
    )


def _wait(record: RunRecord) -> PathWaits:
    count = len(record.requests) * 1e6
    queue_s = sum(journey.queue_us for journey in record.requests) / count
    prefill_s = sum(journey.prefill_us for journey in record.requests) / count
    transfer_s = sum(journey.transfer_us for journey in record.requests) / count
    all_s = sum(journey.ttft_us or 0 for journey in record.requests) / count
    return PathWaits(queue_s, prefill_s, transfer_s, all_s - queue_s - prefill_s - transfer_s)


def _held_peak(record: RunRecord) -> float:
    looks = [look for look in record.samples if look.instance >= TAKERS]
    return max((look.running_blocks / record.pool_of(look.instance) for look in looks), default=0.0)


def _passes(record: RunRecord) -> PathPasses:
    meters = record.meters[TAKERS:]
    passes = sum(meter.passes for meter in meters)
    return PathPasses(
        passes=passes,
        plan_us=sum(meter.plan_ns for meter in meters) / passes / 1e3,
        settle_us=sum(meter.settle_ns for meter in meters) / passes / 1e3,
        idle_passes=sum(meter.idle_passes for meter in meters),
    )


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Draws of conversations; both paths meet each.")]
SessionCount = Annotated[int, typer.Option("--sessions", min=1, max=10_000, help="Conversations of several rounds.")]
Clients = Annotated[int, typer.Option("--concurrency", min=1, max=10_000, help="Clients at once.")]
InputScale = Annotated[float, typer.Option(min=0.01, max=10_000, help="What clients add, × this as long as in the file.")]
ThinkS = Annotated[float, typer.Option(min=0, max=86_400, help="Pause before each further round.")]
GiverBlocks = Annotated[int, typer.Option(min=1, help="KV pool of the instance that prefills, in blocks of 64.")]


def prefill_path(
    trace: ConversationFile = None,
    traces: ShareGptFolder = None,
    seeds: Seeds = 10,
    sessions: SessionCount = 78,
    concurrency: Clients = 39,
    input_scale: InputScale = INPUT_SCALE,
    think_s: ThinkS = 0.0,
    link_gbytes: LinkGbytes = LANE_GBYTES_PER_S,
    giver_blocks: GiverBlocks = GIVER_BLOCKS,
    processes: Processes = None,
    json_file: JsonIfGiven = None,
) -> None:
    """Compare the two ways in which an instance that only prefills may plan: its own short path, and the general one.

    One instance prefills for three; machines are a roofline of GLM-4.5-Air on eight GPUs. The figures of the system for
    which such a path was first reported stand beside ours, with where the difference comes from. Takes some minutes.
    """

    def prepare(progress: Progress) -> Experiment[PathReport]:
        options = PathOptions(
            trace=str(find_conversations(trace, traces)),
            seeds=seeds,
            sessions=sessions,
            clients=concurrency,
            input_scale=input_scale,
            think_s=think_s,
            lane_gbytes_per_s=link_gbytes,
            giver_blocks=giver_blocks,
        )
        work = Paths(options)
        return Experiment(work.runs, lambda: work.run(progress, processes or cores()))

    run_benchmark(prepare, show, json_file)


FIGURES = {
    "total time s": ("total_s", "{:,.1f}"),
    "TTFT mean s": ("ttft_mean_s", "{:,.2f}"),
    "TTFT P90 s": ("ttft_p90_s", "{:,.2f}"),
    "output tokens/s": ("tokens_per_s", "{:,.1f}"),
}
PARTS: dict[str, tuple[Callable[[PathRun], float], str]] = {
    "waiting at the giver s": (lambda run: run.wait.queue_s, "{:,.3f}"),
    "being prefilled there s": (lambda run: run.wait.prefill_s, "{:,.3f}"),
    "on its way s": (lambda run: run.wait.transfer_s, "{:,.4f}"),
    "the rest s": (lambda run: run.wait.rest_s, "{:,.4f}"),
    "giver busy": (lambda run: run.giver_busy, "{:.1%}"),
    "giver's pool held, peak": (lambda run: run.giver_held_peak, "{:.1%}"),
    "giver's steps": (lambda run: run.giver_steps, "{:,.0f}"),
    "its passes, charged in all s": (lambda run: run.charged_s, "{:,.3f}"),
    "prompt tokens computed": (lambda run: run.computed_tokens, "{:,.0f}"),
    "prompt tokens cached": (lambda run: run.cached_share, "{:.1%}"),
    "takers busy": (lambda run: run.takers_busy, "{:.1%}"),
    "TPOT mean ms": (lambda run: run.tpot_ms.mean, "{:,.2f}"),
    "hand-overs refused": (lambda run: run.refused, "{:,.1f}"),
    "preemptions": (lambda run: run.preemptions, "{:,.1f}"),
}


def show(console: Console, report: PathReport) -> None:
    console.print(_figures(report))
    console.print(_parts(report))
    for line in explained(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _figures(report: PathReport) -> Table:
    settings, seeds = report.settings, len(report.of(PathKind.SHORT))
    table = Table(
        title=f"{settings['givers']}P{settings['takers']}D, {settings['clients']} clients, {settings['sessions']} sessions, "
        f"{seeds} seeds: mean (least – most)",
        title_justify="left",
    )
    for name in ("", "general path", "short path", "change", "from the lossy one", "the original", "its change"):
        table.add_column(name, justify="right" if name else "left")
    for title, (name, form) in FIGURES.items():
        cells = [_spread([run.figure(name) for run in report.of(kind)], form) for kind in PATHS]
        cells += [_spread(report.changes(name, before), "{:+.2%}") for before in (PathKind.GENERAL, PathKind.LOSSY)]
        reported = report.reported[name]
        before = f"{reported.general:,.1f} → {reported.short:,.1f}" if name != "tokens_per_s" else ""
        table.add_row(title, *cells, before, f"{reported.change:+.1%}")
    return table


def _parts(report: PathReport) -> Table:
    table = Table(title="Where a wait for the first token goes, mean of the seeds", title_justify="left")
    for name in ("", "general path", "short path", "difference", "lossy path"):
        table.add_column(name, justify="right" if name else "left")
    for title, (value, form) in PARTS.items():
        general, short, lossy = (mean(map(value, report.of(kind))) for kind in PathKind)
        sign = form.replace("{:", "{:+")
        table.add_row(title, form.format(general), form.format(short), sign.format(short - general), form.format(lossy))
    return table


def _spread(values: Sequence[float], form: str) -> str:
    middle, least, most = (form.format(value) for value in (mean(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} – {most})"


def explained(report: PathReport) -> Iterator[str]:
    costs = "; ".join(
        f"{kind} {report.pass_us(kind):.0f} µs ({', '.join(f'{one.us:.0f}' for one in report.passes[kind])})"
        for kind in PATHS
    )
    general, times = report.of(PathKind.GENERAL), len(report.passes[PathKind.SHORT])
    step_ms = mean(run.giver_busy * run.total_s / run.giver_steps for run in general) * 1e3
    yield (
        f"A pass (plan and settle) in CPU time on this machine, each path {times} times in turns: {costs}; "
        f"a step of the giver takes {step_ms:.0f} ms. A pass is charged as if nothing hid it."
    )
    yield from _verdict(report)
    settings = report.settings
    yield (
        f"Step times: {settings['step_times']}, a roofline. Rounds and answers as in {report.trace}; what clients add is × "
        f"{settings['input_scale']:g} as long and the giver's pool {settings['giver_blocks']:,} blocks of "
        f"{settings['block_size']}, so that the general path's mean TTFT is near the reported one."
    )


def _verdict(report: PathReport) -> Iterator[str]:
    """Explain the difference of the two paths, here and in the published figures."""
    general, short = report.of(PathKind.GENERAL), report.of(PathKind.SHORT)
    more = sum(run.giver_steps for run in general) - sum(run.giver_steps for run in short)
    saved_ms = (report.pass_us(PathKind.GENERAL) - report.pass_us(PathKind.SHORT)) / 1e3
    steps = sum(run.giver_steps for run in general)
    yield (
        f"Our two paths plan nearly the same steps ({more:+,} of {steps:,} on the general one), and a pass differs by "
        f"{saved_ms:.2f} ms. There is little to gain, because our general path does not do what costs time elsewhere: "
        "requests end with their prompts here, so nothing is reserved for outputs; blocks are taken once, for the whole "
        "prompt; no prefill is ever preempted; and a row that only sends is in no plan."
    )
    yield (
        f"For the reported gain in total time a general path would have to lose {report.lost_us / 1e3:.0f} ms in each pass "
        "of the giver (lossy). The original's change came with others (a race of layer signals, sampling buffers), and "
        "its parts were not measured apart."
    )
