"""`baton bench split`: goodput of a cluster that splits prefill and decode, beside one whose instances do everything.

Owns the load, the clusters that are compared and how they are judged. The load is a trace with its own arrival times,
bunches spread, played at several speeds; every cluster has the same number of instances of the same machine and model. A
cluster is judged by the requests that arrive after its caches and queues have filled a little: good is one whose first token
came and whose tokens came within the targets. Instances that do everything are given several chunk sizes, since theirs
decides between the two targets; the best one counts. Clients go to instances in turn; one that decodes chooses whom to ask
for a prefill as in service. Placing clients by load needs somebody who knows all queues: what it would do for instances that
do everything is shown beside, and told apart in the verdict.

Costs: step times from the model's file; KV between instances as `sim.lanes` says; what schedulers and front ends spend on
a step is not charged (tens of microseconds beside steps of 5 ms and more).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from baton import __version__
from baton.bench.calls import TraceLoad, read_load
from baton.bench.crew import run_jobs
from baton.bench.simulated import BadSimOptions, blocks_of, road_of
from baton.core.config import WorkerConfig
from baton.sim.cluster import RunFailed, RunSpec, Split, simulate
from baton.sim.records import Journey, RunRecord
from baton.sim.report import FINISHED, Distribution, Targets, busy_shares, describe
from baton.sim.steptime import StepTimes, load_step_times

SCHEMA = 1
STEP_TIMES = "h200-8b"
BLOCK_SIZE = 16
CONTEXT_TOKENS = 131_072
SLOTS = 256
TRACE_GLOB = "*mooncake*conversation*.jsonl*"
WARM_SHARE = 0.2
"""Of the arrivals; those are not judged."""
STEP_TOKENS = 2048
MIXED_STEP_TOKENS = (512, 1024, 2048)


class NoSplitTrace(Exception):
    """There is no trace to play; the message says how to name one."""


@dataclass(frozen=True, slots=True)
class SplitOptions:
    trace: Path
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


class SplitJob(msgspec.Struct, frozen=True):
    """One cluster at one speed."""

    trace: str
    requests: int
    speed: float
    seed: int
    instances: int
    givers: int
    """0: every instance does everything."""
    step_tokens: int
    by_load: bool
    """Requests go to the instance with the least to prefill, else in turn."""
    ttft_s: float
    tpot_ms: float
    lane_gbytes_per_s: float

    @property
    def cluster(self) -> str:
        if self.givers:
            return f"{self.givers}P{self.instances - self.givers}D"
        return f"mixed ×{self.instances}, {'by load' if self.by_load else 'in turn'}, {self.step_tokens:,}"


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
    """Of the judged: first token too late, and the others in time."""
    slow_share: float
    """First token in time, and the others too slow."""
    both_share: float
    unanswered: int
    ttft_s: Distribution
    tpot_ms: Distribution
    hit_rate: float
    """Of prompt tokens, in the prefix cache of whoever prefilled."""
    busy_givers: float | None
    busy_takers: float
    transfer_ms: Distribution | None
    """Hand-over less waiting and computing at the giver."""
    handovers: int
    refused: int
    failed: int
    link_busy: float | None
    """Mean of the givers' lanes."""
    preemptions: int
    steps: int
    wall_s: float


class SplitReport(msgspec.Struct, frozen=True):
    schema: int
    version: str
    trace: str
    requests: int
    bunched: int
    """Requests whose timestamp was that of the one before."""
    settings: dict[str, str | int | float]
    hopeless_share: float
    """Of the requests: their prompt alone takes longer than the target on an idle instance with a cold cache."""
    runs: list[SplitRun]

    @property
    def clusters(self) -> list[str]:
        return list(dict.fromkeys(run.cluster for run in self.runs))

    def of(self, cluster: str, speed: float | None = None) -> list[SplitRun]:
        return [run for run in self.runs if run.cluster == cluster and speed in (None, run.speed)]

    def goodput(self, cluster: str, speed: float) -> float:
        """Mean of the seeds."""
        runs = self.of(cluster, speed)
        return sum(run.good_per_s for run in runs) / len(runs)

    def peak(self, cluster: str) -> float:
        """The speed at which its goodput is highest."""
        return max(dict.fromkeys(run.speed for run in self.of(cluster)), key=lambda speed: self.goodput(cluster, speed))

    def best(self, *, split: bool) -> str | None:
        """The cluster with the highest peak, of those that are split or of those that are not, placed in turn."""
        names = dict.fromkeys(run.cluster for run in self.runs if bool(run.givers) is split and not run.by_load)
        return max(names, key=lambda name: self.goodput(name, self.peak(name)), default=None)


def find_mooncake(trace: Path | None, folder: Path | None) -> Path:
    """The trace that was named, or the Mooncake conversations among the traces of a folder."""
    if trace is not None:
        return trace
    found = sorted(folder.glob(TRACE_GLOB)) if folder is not None else []
    if not found:
        where = f"{folder} has no {TRACE_GLOB}" if folder is not None else "no trace was named"
        raise NoSplitTrace(f"{where}: use --trace FILE, or set BATON_TRACES to a folder with the Mooncake conversations")
    return found[0]


class Splits:
    def __init__(self, options: SplitOptions) -> None:
        self._options = options
        self._load = _load(options.trace, options.requests)
        if not self._load.is_timed:
            raise BadSimOptions(f"{options.trace} has lengths but no times")
        self.jobs = [
            job
            for speed in options.speeds
            for seed in range(options.seeds)
            for job in self._clusters(speed, seed)
        ]  # fmt: skip

    def _clusters(self, speed: float, seed: int) -> list[SplitJob]:
        kinds = [*((0, tokens, False) for tokens in self._options.mixed_step_tokens), (0, STEP_TOKENS, True)]
        kinds += [(givers, STEP_TOKENS, False) for givers in self._options.givers]
        return [self._job(speed, seed, *kind) for kind in kinds]

    def _job(self, speed: float, seed: int, givers: int, step_tokens: int, by_load: bool) -> SplitJob:
        options = self._options
        return SplitJob(
            trace=str(options.trace),
            requests=options.requests,
            speed=speed,
            seed=seed,
            instances=options.instances,
            givers=givers,
            step_tokens=step_tokens,
            by_load=by_load,
            ttft_s=options.ttft_s,
            tpot_ms=options.tpot_ms,
            lane_gbytes_per_s=options.lane_gbytes_per_s,
        )

    def run(self, done: Callable[[SplitRun], None], processes: int) -> SplitReport:
        runs = run_jobs("split", self.jobs, SplitRun, done, processes)
        options, load = self._options, self._load
        times = load_step_times(STEP_TIMES)
        alone_s = [_alone_us(times, request.input_tokens) / 1e6 for request in load.requests]
        return SplitReport(
            schema=SCHEMA,
            version=__version__,
            trace=options.trace.name,
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


def _load(trace: Path, requests: int) -> TraceLoad:
    return read_load(trace, requests, None, CONTEXT_TOKENS)


def _alone_us(times: StepTimes, tokens: int) -> int:
    """A prompt's prefill, chunk after chunk, with nothing else to do."""
    spent_us = 0
    for begin in range(0, tokens, STEP_TOKENS):
        end = min(tokens, begin + STEP_TOKENS)
        spent_us += times.step_us(0, 0, end - begin, (end * (end + 1) - begin * (begin + 1)) // 2)
    return spent_us


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_split(job: SplitJob) -> SplitRun:
    times = load_step_times(STEP_TIMES)
    calls = _load(Path(job.trace), job.requests).at_their_times(job.seed, job.speed)
    config = WorkerConfig(
        slots=SLOTS,
        blocks=blocks_of(times, None, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=job.step_tokens,
        waiting_max=len(calls),
    )
    split = Split(job.givers, config, times, road_of(times, BLOCK_SIZE, job.lane_gbytes_per_s)) if job.givers else None
    spec = RunSpec(
        job.cluster,
        job.instances,
        config,
        times,
        calls,
        seed=job.seed,
        spans_max=0,
        split=split,
        chosen=_least if job.by_load else None,
    )
    return _judged(job, simulate(spec))


def _least(queued_tokens: Sequence[int]) -> int:
    return min(range(len(queued_tokens)), key=queued_tokens.__getitem__)


def _judged(job: SplitJob, record: RunRecord) -> SplitRun:
    last_us = max(journey.arrived_us for journey in record.journeys)
    warm_us = round(last_us * WARM_SHARE)
    judged = [journey for journey in record.journeys if journey.arrived_us >= warm_us]
    finished = [journey for journey in judged if journey.outcome in FINISHED]
    targets = Targets(job.ttft_s, job.tpot_ms)
    late = np.array([(journey.ttft_us or 0) > job.ttft_s * 1e6 for journey in finished])
    slow = np.array([(journey.tpot_us or 0) > job.tpot_ms * 1e3 for journey in finished])
    good, window_s = sum(targets.met_by(journey) for journey in judged), (last_us - warm_us) / 1e6
    ttft_s, tpot_ms = _latencies(finished)
    busy, takers = busy_shares(record), job.instances - job.givers
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


def _latencies(finished: Sequence[Journey]) -> tuple[Distribution, Distribution]:
    first = describe(journey.ttft_us for journey in finished)
    between = describe((journey.tpot_us for journey in finished), unit_us=1e3)
    if first is None or between is None:
        raise RunFailed("nobody was answered")
    return first, between
