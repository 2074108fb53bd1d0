"""Compares the short prefill path of a prefill instance with the general one, and with general ones that waste time.

Owns the load and the comparison. One prefill and three decode instances on a machine that is a roofline of the model for
which such a path was first published; 39 clients run 78 sessions of many rounds, each prompt with all earlier rounds
(`LongSessions`). The sessions of the original are not public. Ours are scaled so that, as there, most first tokens come soon
and a tenth of them very late (P90 over mean near 4): histories grow to the length of the context, and towards the end they
no longer fit the prefill instance's pool together.

The runs:

    general, short     the two paths of the product
    one per waste      the general path with one waste of `prefill_wastes`, and one run with all of them
    lossy              the general path with so much time lost in each pass that the short path gains in total time what was
                       reported; whether the waits then fall as reported says whether time lost in passes explains them

Time is virtual. A pass takes none, since in service it overlaps the step before it; where the waste is that it does not,
each step waits as long as a pass (plan and settle) took here in CPU time. KV travels as in `sim.timed_transfers`.

A client's wait for its first token is split by phase: queueing at the prefill instance, prefill (other chunks of the same
steps included), transfer, and the rest (messages, the front end, the decode instance's next step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton import __version__
from baton.bench.sim_run import LANE_GBYTES_PER_S, blocks_of, road_of
from baton.core.config import HandoverConfig, PrefillPath, WorkerConfig
from baton.core.engine.scheduler import prefill_scheduler
from baton.sim.cluster import PrefillDecodeSplit, RunFailed, RunSpec, simulate
from baton.sim.device import StepTimeModel
from baton.sim.report import FINISHED, ValueDistribution, busy_shares, describe
from baton.sim.run_records import RunRecord
from baton.sim.step_times import load_step_times
from baton.sim.timed_transfers import KvLinkModel
from benchmarks.conversations import LongSessions, find_conversations, read_conversations
from benchmarks.jobs import cores, run_jobs
from benchmarks.options import ConversationFile, JsonIfGiven, LinkGbytes, Processes, ShareGptFolder
from benchmarks.prefill_wastes import SCHEDULED, LostSignals, Waste, wasteful_scheduler
from benchmarks.runner import Experiment, Progress, run_benchmark

SCHEMA = 2
STEP_TIMES = "glm-4.5-air-tp8"
GIVERS, TAKERS = 1, 3
BLOCK_SIZE = 256
CONTEXT_TOKENS = 131_072
STEP_TOKENS = 8192
SLOTS = 64
MAX_TOKENS = 4096
ROUNDS = 20
TOKEN_MS = 50.0
DEADLINE_US = 3_600_000_000
"""No effective deadline for hand-overs, since this load makes clients wait for minutes."""
INPUT_SCALE = 60.0
LOOK_EVERY_US = 1_000_000
LOST_TIMES_MAX = 10.0
"""The time lost a pass is at most this many times the first guess."""
SMALL = 0.005
"""Changes below this are called none."""


class PathKind(StrEnum):
    """The runs that are compared; those between general and lossy are named after their wastes."""

    SHORT = "short"
    GENERAL = "general"
    OUTPUTS = Waste.OUTPUTS.value
    GATE = Waste.GATE.value
    NO_OVERLAP = Waste.NO_OVERLAP.value
    PREEMPTED = Waste.PREEMPTED.value
    LOST_SIGNAL = Waste.LOST_SIGNAL.value
    ALL = "all wastes"
    LOSSY = "lossy"
    """Time lost in each pass."""

    @property
    def path(self) -> PrefillPath:
        return PrefillPath.SHORT if self is PathKind.SHORT else PrefillPath.GENERAL

    @property
    def wastes(self) -> tuple[Waste, ...]:
        return tuple(Waste) if self is PathKind.ALL else tuple(waste for waste in Waste if waste.value == self.value)


PATHS = (PathKind.GENERAL, PathKind.SHORT)
WASTEFUL = tuple(kind for kind in PathKind if kind.wastes)


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
    "throughput": PublishedFigure(1.0, 1.167),
}
"""PaddlePaddle/FastDeploy, pull request 7944: GLM-4.5-Air, TP8, 1P3D, 39 concurrent, 78 multi-round sessions."""


class PathOptions(msgspec.Struct, frozen=True):
    trace: str
    seeds: int = 6
    """Draws of sessions for the two paths."""
    waste_seeds: int = 2
    """The first of these draws, for the wasteful runs."""
    sessions: int = 78
    clients: int = 39
    rounds: int = ROUNDS
    input_scale: float = INPUT_SCALE
    token_ms: float = TOKEN_MS
    """Time of each token of an answer."""
    max_tokens: int = MAX_TOKENS
    lane_gbytes_per_s: float = LANE_GBYTES_PER_S
    giver_blocks: int | None = None
    """Pool of the prefill instance; None: as many blocks as fit, as the decode instances have."""


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
    wait: PathWaits
    giver_busy: float
    giver_held_peak: float
    """Largest share of the prefill pool held by requests; below 1, none waited for blocks."""
    giver_steps: int
    charged_s: float
    """Total time charged for the prefill instance's passes."""
    computed_tokens: int
    """Computed prompt tokens."""
    cached_share: float
    """Share of prompt tokens cached on the instance that prefilled."""
    handovers: int
    refused: int
    failed: int
    prefills_preempted: int
    passes: PathPasses | None

    def figure(self, name: str) -> float:
        return {
            "total_s": self.total_s,
            "ttft_mean_s": self.ttft_s.mean,
            "ttft_p90_s": self.ttft_s.p90,
            "throughput": self.requests / self.total_s,
        }[name]


class PathReport(msgspec.Struct, frozen=True):
    schema: int
    version: str
    trace: str
    settings: dict[str, str | int | float]
    passes: dict[PathKind, PathPasses]
    lost_us: float
    """Time lost by the lossy path in each pass."""
    reported: dict[str, PublishedFigure]
    runs: list[PathRun]

    def of(self, kind: PathKind) -> list[PathRun]:
        """Runs of one kind, by seed."""
        return sorted((run for run in self.runs if run.kind is kind), key=lambda run: run.seed)

    def changes(self, name: str, before: PathKind, after: PathKind = PathKind.SHORT) -> list[float]:
        """Relative change from one kind to another on each seed that both met."""
        new = {run.seed: run for run in self.of(after)}
        return [new[old.seed].figure(name) / old.figure(name) - 1.0 for old in self.of(before) if old.seed in new]

    def change(self, name: str, before: PathKind, after: PathKind = PathKind.SHORT) -> float:
        """Mean of the seeds."""
        return mean(self.changes(name, before, after))

    def tail(self, kind: PathKind) -> float:
        """P90 of the waits over their mean."""
        return mean(run.ttft_s.p90 / run.ttft_s.mean for run in self.of(kind))


class Paths:
    def __init__(self, options: PathOptions) -> None:
        self._options = options
        spec_of(PathJob(options, PathKind.SHORT, 0))  # raises now rather than later

    @property
    def runs(self) -> int:
        return 1 + len(self._wanted())

    def _wanted(self) -> list[tuple[PathKind, int]]:
        options = self._options
        return [
            (kind, seed) for seed in range(options.seeds) for kind in PathKind if kind in PATHS or seed < options.waste_seeds
        ]

    def run(self, progress: Progress, processes: int) -> PathReport:
        metered = self._meter(progress)
        passes = {kind: run.passes for kind, run in metered.items() if run.passes is not None}
        progress.doing("looking for what must be lost")
        general = metered[PathKind.GENERAL]
        lost_us = self._lost_us(general)
        progress.done()
        progress.doing("all seeds")
        charge = dict.fromkeys(PathKind, 0.0) | {PathKind.LOSSY: lost_us}
        charge |= dict.fromkeys((PathKind.NO_OVERLAP, PathKind.ALL), passes[PathKind.GENERAL].us)
        jobs = [
            PathJob(self._options, kind, seed, charge[kind]) for kind, seed in self._wanted() if seed or kind not in metered
        ]
        runs = run_jobs("prefill-path", jobs, PathRun, lambda _run: progress.done(), processes)
        return self._report(passes, lost_us, [*metered.values(), *runs])

    def _meter(self, progress: Progress) -> dict[PathKind, PathRun]:
        """Run both paths in this process on the sessions of seed 0; measuring changes nothing in virtual time."""
        found: dict[PathKind, PathRun] = {}
        for kind in PATHS:
            progress.doing(f"timing passes, {kind} path")
            found[kind] = run_path(PathJob(self._options, kind, 0, metered=True))
            progress.done()
        return found

    def _lost_us(self, without: PathRun) -> float:
        """Time per pass whose removal reduces the total time as published; from one trial on seed 0."""
        reported = REPORTED["total_s"]
        wanted = reported.general / reported.short - 1.0
        guess_us = wanted * without.total_s * 1e6 / without.giver_steps
        tried = run_path(PathJob(self._options, PathKind.LOSSY, 0, guess_us))
        return guess_us * wanted / max(tried.total_s / without.total_s - 1.0, wanted / LOST_TIMES_MAX)

    def _report(self, passes: dict[PathKind, PathPasses], lost_us: float, runs: list[PathRun]) -> PathReport:
        settings: dict[str, str | int | float] = msgspec.structs.asdict(self._options)
        settings |= {"giver_blocks": self._options.giver_blocks or decode_blocks()}
        del settings["trace"]
        settings |= {
            "step_times": STEP_TIMES,
            "givers": GIVERS,
            "takers": TAKERS,
            "taker_blocks": decode_blocks(),
            "block_size": BLOCK_SIZE,
            "step_tokens": STEP_TOKENS,
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
    options, times, wastes = job.options, load_step_times(STEP_TIMES), job.kind.wastes
    sessions = LongSessions(
        options.sessions,
        options.rounds,
        options.input_scale,
        CONTEXT_TOKENS,
        options.max_tokens,
        round(options.token_ms * 1e3),
    )
    config = WorkerConfig(
        slots=SLOTS,
        blocks=decode_blocks(),
        block_size=BLOCK_SIZE,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=STEP_TOKENS,
        waiting_max=options.clients,
        handover=HandoverConfig(deadline_us=DEADLINE_US),
    )
    return RunSpec(
        label=job.kind,
        instances=GIVERS + TAKERS,
        config=config,
        step_times=times,
        calls=sessions.drawn(read_conversations(Path(options.trace)), job.seed),
        concurrency=options.clients,
        seed=job.seed,
        look_every_us=LOOK_EVERY_US,
        spans_max=0,
        split=PrefillDecodeSplit(
            GIVERS,
            _giver_config(job, config),
            ChargedStepTimes(times, job.pass_us),
            _link(wastes, options.lane_gbytes_per_s),
            wasteful_scheduler(wastes, options.max_tokens) if SCHEDULED.intersection(wastes) else prefill_scheduler,
        ),
        metered=job.metered,
    )


def _giver_config(job: PathJob, config: WorkerConfig) -> WorkerConfig:
    blocks = job.options.giver_blocks or config.blocks
    depth = 1 if Waste.NO_OVERLAP in job.kind.wastes else config.depth
    return replace(config, blocks=blocks, depth=depth, prefill_path=job.kind.path)


def _link(wastes: Sequence[Waste], lane_gbytes_per_s: float) -> KvLinkModel:
    link = road_of(load_step_times(STEP_TIMES), BLOCK_SIZE, lane_gbytes_per_s)
    if Waste.LOST_SIGNAL not in wastes:
        return link
    return LostSignals(link.layers, link.block_bytes, link.card_bytes_per_s, link.delay_us)


def _described(job: PathJob, record: RunRecord) -> PathRun:
    journeys = [journey for journey in record.requests if journey.outcome in FINISHED]
    first = describe(journey.ttft_us for journey in journeys)
    busy = busy_shares(record)
    if len(journeys) < len(record.requests) or first is None or busy is None:
        raise RunFailed(f"{job.kind}, seed {job.seed}: {len(record.requests) - len(journeys)} requests were not answered")
    total_s, handed = record.end_us / 1e6, record.handed
    asked, cached = (sum(values) for values in zip(*((j.input_tokens, j.cached_tokens) for j in journeys), strict=True))
    return PathRun(
        kind=job.kind,
        seed=job.seed,
        requests=len(journeys),
        total_s=total_s,
        ttft_s=first,
        wait=_wait(record),
        giver_busy=float(busy[TAKERS:].mean()),
        giver_held_peak=_held_peak(record),
        giver_steps=sum(record.steps_each[TAKERS:]),
        charged_s=sum(record.steps_each[TAKERS:]) * job.pass_us / 1e6,
        computed_tokens=asked - cached,
        cached_share=cached / asked,
        handovers=sum(one.made for one in handed[:TAKERS]),
        refused=sum(one.refused for one in handed[:TAKERS]),
        failed=sum(one.failed for one in handed[:TAKERS]),
        prefills_preempted=max((look.preemptions for look in record.samples if look.instance >= TAKERS), default=0),
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


Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Draws of sessions; both paths meet each.")]
WasteSeeds = Annotated[int, typer.Option(min=1, max=1000, help="The first of these draws, met by the wasteful runs too.")]
SessionCount = Annotated[int, typer.Option("--sessions", min=1, max=10_000, help="Sessions of many rounds.")]
Clients = Annotated[int, typer.Option("--concurrency", min=1, max=10_000, help="Clients at once.")]
Rounds = Annotated[int, typer.Option(min=2, max=1000, help="Mean rounds of a session.")]
InputScale = Annotated[float, typer.Option(min=0.01, max=10_000, help="What clients add, × this as long as in the file.")]
TokenMs = Annotated[float, typer.Option(min=0, max=10_000, help="Milliseconds for each token of an answer.")]
MaxTokens = Annotated[int, typer.Option(min=2, max=65_536, help="max_tokens of every request.")]
GiverBlocks = Annotated[
    int | None, typer.Option(min=1, help=f"KV pool of the instance that prefills, in blocks of {BLOCK_SIZE}.")
]


def prefill_path(
    trace: ConversationFile = None,
    traces: ShareGptFolder = None,
    seeds: Seeds = 6,
    waste_seeds: WasteSeeds = 2,
    sessions: SessionCount = 78,
    concurrency: Clients = 39,
    rounds: Rounds = ROUNDS,
    input_scale: InputScale = INPUT_SCALE,
    token_ms: TokenMs = TOKEN_MS,
    max_tokens: MaxTokens = MAX_TOKENS,
    link_gbytes: LinkGbytes = LANE_GBYTES_PER_S,
    giver_blocks: GiverBlocks = None,
    processes: Processes = None,
    json_file: JsonIfGiven = None,
) -> None:
    """Compare the short path of an instance that only prefills with the general one, as it is and with what others waste.

    One instance prefills for three; machines are a roofline of GLM-4.5-Air on eight GPUs. The figures of the system for
    which such a path was first reported stand beside ours, with what each waste costs. Takes some minutes.
    """

    def prepare(progress: Progress) -> Experiment[PathReport]:
        options = PathOptions(
            trace=str(find_conversations(trace, traces)),
            seeds=seeds,
            waste_seeds=waste_seeds,
            sessions=sessions,
            clients=concurrency,
            rounds=rounds,
            input_scale=input_scale,
            token_ms=token_ms,
            max_tokens=max_tokens,
            lane_gbytes_per_s=link_gbytes,
            giver_blocks=giver_blocks,
        )
        work = Paths(options)
        return Experiment(work.runs, lambda: work.run(progress, processes or cores()))

    run_benchmark(prepare, show, json_file)


FIGURES = {"total time": "total_s", "TTFT mean": "ttft_mean_s", "TTFT P90": "ttft_p90_s", "throughput": "throughput"}
PARTS: dict[str, tuple[Callable[[PathRun], float], str]] = {
    "queue s": (lambda run: run.wait.queue_s, "{:,.2f}"),
    "prefill s": (lambda run: run.wait.prefill_s, "{:,.2f}"),
    "transfer s": (lambda run: run.wait.transfer_s, "{:,.4f}"),
    "giver busy": (lambda run: run.giver_busy, "{:.1%}"),
    "its pool held, peak": (lambda run: run.giver_held_peak, "{:.0%}"),
    "its steps": (lambda run: run.giver_steps, "{:,.0f}"),
    "tokens computed": (lambda run: run.computed_tokens, "{:,.0f}"),
    "cached": (lambda run: run.cached_share, "{:.1%}"),
    "prefills preempted": (lambda run: run.prefills_preempted, "{:,.1f}"),
}


def show(console: Console, report: PathReport) -> None:
    console.print(_figures(report))
    console.print(_parts(report))
    for line in explained(report):
        console.print(line, style="dim", highlight=False, markup=False)


def _figures(report: PathReport) -> Table:
    settings, seeds, few = report.settings, len(report.of(PathKind.SHORT)), len(report.of(PathKind.ALL))
    table = Table(
        title=f"{settings['givers']}P{settings['takers']}D, {settings['clients']} clients, {settings['sessions']} sessions, "
        f"{seeds} seeds ({few} for the wastes): mean of the seeds; "
        f"at the right the change from each to the short path (least – most)",
        title_justify="left",
    )
    for name in ("", "total s", "TTFT mean s", "P90 s", "P90/mean", *FIGURES):
        table.add_column(name, justify="right" if name else "left")
    for kind in PathKind:
        values = [mean(run.figure(name) for run in report.of(kind)) for name in ("total_s", "ttft_mean_s", "ttft_p90_s")]
        changes = ["" if kind is PathKind.SHORT else _spread(report.changes(name, kind)) for name in FIGURES.values()]
        table.add_row(kind.value, *(f"{value:,.1f}" for value in values), f"{report.tail(kind):.1f}", *changes)
    before = [report.reported[name].general for name in ("total_s", "ttft_mean_s", "ttft_p90_s")]
    changes = [f"{report.reported[name].change:+.1%}" for name in FIGURES.values()]
    table.add_row("the original", *(f"{value:,.1f}" for value in before), f"{before[2] / before[1]:.1f}", *changes)
    return table


def _parts(report: PathReport) -> Table:
    table = Table(title="Where a wait for the first token goes, and why; mean of the seeds", title_justify="left")
    for name in ("", *PARTS):
        table.add_column(name, justify="right" if name else "left")
    for kind in PathKind:
        table.add_row(kind.value, *(form.format(mean(map(value, report.of(kind)))) for value, form in PARTS.values()))
    return table


def _spread(values: Sequence[float]) -> str:
    middle, least, most = (f"{value:+.1%}" for value in (mean(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} – {most})"


def explained(report: PathReport) -> Iterator[str]:
    general, settings = report.of(PathKind.GENERAL), report.settings
    step_ms = mean(run.giver_busy * run.total_s / run.giver_steps for run in general) * 1e3
    costs = ", ".join(f"{kind} {report.passes[kind].us / 1e3:.2f} ms" for kind in PATHS)
    yield (
        f"A pass (plan and settle) in CPU time on this machine: {costs}; a step of the giver takes {step_ms:.0f} ms. "
        "It is charged only where passes do not overlap steps."
    )
    yield from verdict(report)
    yield (
        f"Step times: {settings['step_times']}, a roofline. Turns as in {report.trace}, {settings['rounds']} rounds a "
        f"session, what clients add × {settings['input_scale']:g} as long, {settings['token_ms']:g} ms for each token of an "
        f"answer, max_tokens {settings['max_tokens']:,}, the giver's pool {settings['giver_blocks']:,} blocks of "
        f"{settings['block_size']}."
    )


def verdict(report: PathReport) -> Iterator[str]:
    """What the figures say; every word that judges is chosen by them."""
    yield f"Our short path against our general one: {_changes(report, PathKind.GENERAL)}; {_judged(report)}."
    costs = {kind: report.change("ttft_mean_s", PathKind.GENERAL, kind) for kind in WASTEFUL if kind is not PathKind.ALL}
    costly = sorted((kind for kind in costs if abs(costs[kind]) >= SMALL), key=lambda kind: -costs[kind])
    without = [kind.value for kind in costs if kind not in costly]
    said = ", ".join(f"{kind.value} {costs[kind]:+.1%}" for kind in costly) or "none"
    yield (
        f"Wastes that change the general path's mean wait, each alone: {said}."
        + (f" Without effect alone (under {SMALL:.1%}): {', '.join(without)}." if without else "")
    )
    yield (
        f"Against all wastes together the short path has {_changes(report, PathKind.ALL)}; {_shares(report, PathKind.ALL)}."
    )
    p90, reported = report.change("ttft_p90_s", PathKind.LOSSY), report.reported["ttft_p90_s"].change
    yield (
        f"Time lost in passes alone: {report.lost_us / 1e3:.0f} ms in each are fitted to the reported total time. Then "
        f"{_changes(report, PathKind.LOSSY)}; {_shares(report, PathKind.LOSSY)}. P90 changes by {p90:+.1%} where "
        f"{reported:+.1%} was reported, so time lost in passes "
        f"{'explains' if _explains(p90, reported) else 'does not explain'} the reported waits."
    )


def _changes(report: PathReport, before: PathKind) -> str:
    return ", ".join(f"{title} {report.change(name, before):+.1%}" for title, name in FIGURES.items())


def _judged(report: PathReport) -> str:
    changes = report.changes("total_s", PathKind.GENERAL)
    change, error = mean(changes), stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    if abs(change) < SMALL:
        return f"no difference to speak of (under {SMALL:.1%} of the total time)"
    if abs(change) < 2 * error:
        return f"no difference that these seeds show (total time {_spread(changes)}, standard error {error:.1%})"
    return f"it is {'faster' if change < 0 else 'SLOWER'}"


def _shares(report: PathReport, before: PathKind) -> str:
    """How much of each reported change is seen here."""
    shares = {title: report.change(name, before) / report.reported[name].change for title, name in FIGURES.items()}
    said = ", ".join(f"{share:.0%} of that of the {title}" for title, share in shares.items())
    return f"of the reported changes this is {said}"


def _explains(seen: float, reported: float) -> bool:
    """Within a fifth of what was reported."""
    return abs(seen - reported) <= abs(reported) / 5
