"""Counts requests that a fleet under KV pressure fails to finish, for every reservation and victim policy.

Owns the fleets, the load, the runs and the report. Two instances behind a router, in virtual time: routers, schedulers and
their messages are what serves, and devices take the time of a step-time model. The pool of each instance is a small multiple
of the largest request's need, so a request that is lost is lost for want of blocks that the fleet has. Seeds differ in the
lengths of the requests. `shrink` divides all lengths, pools, and how long reserves last: a run takes that much less time.
From 16 on, `fixed-blocks` has one block left to reserve and differs little from `none`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console

from baton.bench.sim_run import LANE_GBYTES_PER_S, road_of
from baton.core.config import OnPreempt, ReservePolicy, SchedulerSettings, VictimPolicy, WorkerConfig
from baton.core.routing.config import RoutingPolicy
from baton.sim.cluster import PlannedRequest, PrefillDecodeSplit, RunSpec, simulate
from baton.sim.report import FINISHED
from baton.sim.run_records import RunRecord
from baton.sim.step_times import load_step_times
from benchmarks.jobs import cores, run_jobs
from benchmarks.options import JsonIfGiven, Processes
from benchmarks.runner import (
    BadBenchmarkOptions,
    Columns,
    Experiment,
    Progress,
    Report,
    print_remarks,
    run_benchmark,
    table_of,
)

STEP_TIMES = "h200-8b"
INPUT_TOKENS, OUTPUT_TOKENS = (50, 400), (300, 1500)
"""Least and most of each, drawn uniformly."""
CLIENTS = 48
BLOCK_SIZE = 16
SLOTS = 256
STEP_TOKENS = 2048
SPLIT_PREFILLS = 1
SAMPLE_EVERY_US = 1_000_000
LOST_SHOWN_MAX = 20


class FleetShape(msgspec.Struct, frozen=True):
    """The instances of one fleet, their pools, and the number of requests sent to it."""

    requests: int
    pool_requests: int
    """Size of each pool, in largest requests."""
    is_split: bool = False
    """One more instance that only prefills; the two others decode."""

    @property
    def name(self) -> str:
        return f"{'1P2D' if self.is_split else 'mixed'}, {self.pool_requests}×, {self.requests}"


SHAPES = (FleetShape(60, 2), FleetShape(100, 3), FleetShape(150, 4), FleetShape(100, 3, is_split=True))


class FleetPressureJob(msgspec.Struct, frozen=True):
    """One run."""

    shape: FleetShape
    reserve: ReservePolicy
    victims: VictimPolicy
    on_preempt: OnPreempt
    seed: int
    shrink: int

    @property
    def policy(self) -> str:
        return f"{self.reserve}, {self.victims}, {self.on_preempt}"


class LostRequest(msgspec.Struct, frozen=True):
    """A request that did not finish."""

    index: int
    outcome: str
    reason: str
    delivered_tokens: int
    moves: int
    preemptions: int


class FleetPressureRun(msgspec.Struct, frozen=True):
    job: FleetPressureJob
    pool_blocks: int
    lost: list[LostRequest]
    moves: int
    """Times that a request continued at another attempt."""
    moves_most: int
    """Of one request."""
    preemptions: int
    preemptions_most: int
    protected: int
    """Requests preempted at least `max_preemptions` times, which are not victims any more."""
    duration_s: list[float]
    """By request, from arrival to end, in virtual time."""
    finish_s: float
    recomputed_tokens: int
    wall_s: float


class FleetPressureReport(Report, kw_only=True):
    seeds: int
    shrink: int
    runs: list[FleetPressureRun]

    @property
    def lost(self) -> int:
        return sum(len(run.lost) for run in self.runs)

    @property
    def requests(self) -> int:
        return sum(run.job.shape.requests for run in self.runs)

    def rows(self) -> list[list[FleetPressureRun]]:
        """Runs by fleet and policy."""
        grouped: dict[tuple[str, str], list[FleetPressureRun]] = {}
        for run in self.runs:
            grouped.setdefault((run.job.shape.name, run.job.policy), []).append(run)
        return list(grouped.values())


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_fleet(job: FleetPressureJob) -> FleetPressureRun:
    return _counted(job, simulate(spec_of(job)))


def spec_of(job: FleetPressureJob) -> RunSpec:
    shape, step_times, largest = job.shape, load_step_times(STEP_TIMES), _largest_tokens(job.shrink)
    default = SchedulerSettings()
    config = WorkerConfig(
        slots=SLOTS,
        blocks=shape.pool_requests * -(-largest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        context_tokens=largest,
        step_tokens=STEP_TOKENS,
        waiting_max=shape.requests,
        reserve=job.reserve,
        victims=job.victims,
        on_preempt=job.on_preempt,
        ratio_decay=default.ratio_decay * job.shrink,
        fixed_blocks=-(-default.fixed_blocks // job.shrink),
    )
    road = road_of(step_times, BLOCK_SIZE, LANE_GBYTES_PER_S)
    return RunSpec(
        label=job.policy,
        instances=3 if shape.is_split else 2,
        config=config,
        step_times=step_times,
        calls=planned_requests(shape.requests, job.seed, job.shrink),
        concurrency=CLIENTS,
        seed=job.seed,
        look_every_us=SAMPLE_EVERY_US,
        spans_max=0,
        split=PrefillDecodeSplit(SPLIT_PREFILLS, config, step_times, road) if shape.is_split else None,
        route=RoutingPolicy.CACHE_AWARE,
    )


def planned_requests(count: int, seed: int, shrink: int) -> list[PlannedRequest]:
    """Requests that a client sends when it is free; each declares the tokens that it will generate."""
    draw = np.random.default_rng([seed, count])
    inputs = draw.integers(*INPUT_TOKENS, size=count, endpoint=True).tolist()
    outputs = draw.integers(*OUTPUT_TOKENS, size=count, endpoint=True).tolist()
    return [
        PlannedRequest(None, max(1, given // shrink), max(1, made // shrink), max(1, made // shrink))
        for given, made in zip(inputs, outputs, strict=True)
    ]


def _largest_tokens(shrink: int) -> int:
    return max(1, INPUT_TOKENS[1] // shrink) + max(1, OUTPUT_TOKENS[1] // shrink)


def _counted(job: FleetPressureJob, record: RunRecord) -> FleetPressureRun:
    requests = record.requests
    most = spec_of(job).config.max_preemptions
    return FleetPressureRun(
        job=job,
        pool_blocks=record.pool_blocks,
        lost=[
            LostRequest(
                each.index, str(each.outcome), each.ended_because, each.output_tokens, each.attempts, each.preemptions
            )
            for each in requests
            if each.outcome not in FINISHED
        ],
        moves=sum(each.attempts for each in requests),
        moves_most=max(each.attempts for each in requests),
        preemptions=sum(each.preemptions for each in requests),
        preemptions_most=max(each.preemptions for each in requests),
        protected=sum(each.preemptions >= most for each in requests),
        duration_s=[((each.ended_us or 0) - each.arrived_us) / 1e6 for each in requests],
        finish_s=record.end_us / 1e6,
        recomputed_tokens=sum(each.recomputed_tokens for each in requests),
        wall_s=record.wall_s,
    )


# ── all runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def jobs_of(shapes: Sequence[FleetShape], seeds: int, shrink: int) -> Iterator[FleetPressureJob]:
    for shape in shapes:
        for reserve in ReservePolicy:
            for victims in VictimPolicy:
                for on_preempt in OnPreempt:
                    for seed in range(seeds):
                        yield FleetPressureJob(shape, reserve, victims, on_preempt, seed, shrink)


def measure(jobs: Sequence[FleetPressureJob], processes: int, progress: Progress) -> FleetPressureReport:
    progress.doing(f"{len(jobs)} runs, {processes} at once")
    runs = run_jobs("fleet-pressure", jobs, FleetPressureRun, lambda _run: progress.done(), processes)
    report = FleetPressureReport(seeds=len({job.seed for job in jobs}), shrink=jobs[0].shrink, runs=runs)
    report.failures = [
        f"{len(run.lost)} lost: {run.job.shape.name}; {run.job.policy}; seed {run.job.seed}: {run.lost[0].reason}"
        for run in runs
        if run.lost
    ]
    return report


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Runs of each row; seeds draw the lengths of requests.")]
Shrink = Annotated[int, typer.Option(min=1, max=50, help="Divide the lengths of requests, and so the pools, by this.")]
Fleets = Annotated[str, typer.Option(help="Which fleets, by number: 0, 1, 2 mixed with 60, 100, 150 requests, 3 split.")]


def fleet_pressure(
    seeds: Seeds = 20,
    shrink: Shrink = 5,
    fleets: Fleets = "0,1,2,3",
    processes: Processes = None,
    json_file: JsonIfGiven = None,
) -> None:
    """Count what a fleet under KV pressure loses: every reserve, every choice of victims, both --on-preempt.

    Two instances behind a router in virtual time, pools of two to four times the largest request, 48 clients. Exit code 1
    when a request was lost.
    """

    def prepare(progress: Progress) -> Experiment[FleetPressureReport]:
        jobs = list(jobs_of(_shapes(fleets), seeds, shrink))
        return Experiment(len(jobs), lambda: measure(jobs, processes or cores(), progress))

    run_benchmark(prepare, show, json_file)


def _shapes(fleets: str) -> list[FleetShape]:
    known = {str(number): shape for number, shape in enumerate(SHAPES)}
    chosen = [part.strip() for part in fleets.split(",")]
    if unknown := [part for part in chosen if part not in known]:
        raise BadBenchmarkOptions(f"--fleets {fleets!r}: there is no fleet {unknown[0]!r}, only {', '.join(known)}")
    return [known[part] for part in chosen]


def show(console: Console, report: FleetPressureReport) -> None:
    title = (
        f"Two instances behind a router, {CLIENTS} clients, {report.seeds} seeds a row; lengths divided by {report.shrink}"
    )
    console.print(table_of(title, COLUMNS, report.rows()))
    console.print(verdict(report), highlight=False)
    print_remarks(console, report, "Times of requests in virtual seconds, over all seeds of a row.")


def verdict(report: FleetPressureReport) -> str:
    if not report.lost:
        return f"0 of all {report.requests:,} requests lost."
    rows = sum(any(run.lost for run in row) for row in report.rows())
    return f"{report.lost:,} of all {report.requests:,} requests lost, in {rows} of {len(report.rows())} rows."


Row = Sequence[FleetPressureRun]


def _total(value: Callable[[FleetPressureRun], int]) -> Callable[[Row], str]:
    return lambda runs: f"{sum(map(value, runs)):,}"


def _duration(percent: float) -> Callable[[Row], str]:
    return lambda runs: f"{np.percentile([each for run in runs for each in run.duration_s], percent):.2f}"


COLUMNS: Columns[Row] = (
    ("fleet, pools, requests", lambda runs: runs[0].job.shape.name),
    ("reserve, victims, on preempt", lambda runs: runs[0].job.policy),
    ("lost", lambda runs: f"{sum(len(run.lost) for run in runs)} of {sum(run.job.shape.requests for run in runs):,}"),
    ("moves", _total(lambda run: run.moves)),
    ("most", lambda runs: f"{max(run.moves_most for run in runs)}"),
    ("preemptions", _total(lambda run: run.preemptions)),
    ("most", lambda runs: f"{max(run.preemptions_most for run in runs)}"),
    ("protected", _total(lambda run: run.protected)),
    ("p50 s", _duration(50)),
    ("p99 s", _duration(99)),
    ("finish s", lambda runs: f"{sum(run.finish_s for run in runs) / len(runs):.1f}"),
)
