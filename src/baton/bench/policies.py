"""`baton bench policies`: what each rule of reservation and each order of victims costs, on the lengths of a real trace.

Owns the load, the runs and what is said of them. Each client declares a `max_tokens` that is larger than what it will
generate, as clients do, so the scheduler must guess; and the pool holds only a share of what the slots could use, so guesses
matter. Every policy meets the same arrivals on one simulated instance; seeds differ in when requests arrive and in nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from baton.bench.calls import TraceLoad, read_load
from baton.bench.stats import describe
from baton.bench.traces import TracedRequest
from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig
from baton.sim.cluster import Call, RunFailed, RunSpec, simulate
from baton.sim.records import Journey, Look, Outcome, RunRecord
from baton.sim.steptime import load_step_times

SCHEMA = 2
STEP_TIMES = "h200-8b"
CONTEXT_TOKENS = 8192
UNTIMED_PER_S = 5.0
"""Arrivals of a trace without times, before `speed`."""
TRACE_GLOB = "AzureLLMInferenceTrace*conv*.csv*"
LOOK_EVERY_US = 10_000
"""About as long as a step takes: the pool hardly changes in between."""
LOOKS_MAX = 200_000
"""While requests arrive; at a speed that makes days of minutes there is less to see in each."""
NETWORK_US = 100
"""From clients to the instance; as long back."""
POOL_SAMPLES_MAX = 4000


class NoTrace(Exception):
    """There is no trace to take lengths from; the message says how to name one."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    trace: Path
    requests: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    slots: int = 256
    pool_share: float = 0.4
    """Blocks of the pool ÷ blocks that all slots would fill with answered requests of mean length."""
    max_tokens: int = 1024
    """What every client declares, unless it will generate more."""
    speed: float = 5.0
    """Arrivals of the trace, so many times as fast."""
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Policy:
    reserve: ReservePolicy
    victims: VictimPolicy

    @property
    def name(self) -> str:
        return f"{self.reserve.value}, {self.victims.value}"


POLICIES = tuple(Policy(reserve, victims) for reserve in ReservePolicy for victims in VictimPolicy)


class PolicyRun(msgspec.Struct, frozen=True):
    policy: str
    seed: int
    preemptions: int
    recomputed_tokens: int
    recomputed_share: float
    """Of all tokens whose KV was computed."""
    finish_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    pool_use: float
    """Mean share of the pool that requests hold while others wait."""
    steps: int


class PoolUse(msgspec.Struct, frozen=True):
    """The first seed's run over time."""

    policy: str
    at_s: list[float]
    share: list[float]


class PolicyReport(msgspec.Struct, frozen=True):
    schema: int
    trace: str
    requests: int
    skipped: int
    """Traced requests that do not fit the context."""
    pool_blocks: int
    settings: dict[str, str | int | float]
    step_times: str
    """Name of the model that says how long a step takes."""
    runs: list[PolicyRun]
    pool: list[PoolUse]


def find_conversations(trace: Path | None, folder: Path | None) -> Path:
    """The trace that was named, or the conversations among the traces of a folder."""
    if trace is not None:
        return trace
    found = sorted(folder.glob(TRACE_GLOB)) if folder is not None else []
    if not found:
        where = f"{folder} has no {TRACE_GLOB}" if folder is not None else "no trace was named"
        raise NoTrace(
            f"{where}: use --trace FILE, or set BATON_TRACES to a folder with the Azure conversation trace of 2023"
        )
    return found[0]


class Policies:
    def __init__(self, options: PolicyOptions, policies: Sequence[Policy] = POLICIES) -> None:
        self._options = options
        self._policies = policies
        self._load = read_load(options.trace, options.requests, options.max_tokens, CONTEXT_TOKENS)
        self._step_times = load_step_times(STEP_TIMES)
        self.config = _config(options, self._load.requests)

    @property
    def requests(self) -> int:
        """How many will end if all goes well, over all runs."""
        return len(self._load.requests) * len(self._policies) * len(self._options.seeds)

    def run(self, doing: Callable[[str], None], advance: Callable[[int], None]) -> PolicyReport:
        runs: list[PolicyRun] = []
        pool: list[PoolUse] = []
        for seed in self._options.seeds:
            calls = _calls(self._load, self._options.speed, seed)
            for policy in self._policies:
                doing(f"{policy.name}, seed {seed}")
                record = simulate(self._spec(policy, calls, seed), advance)
                runs.append(_describe(record))
                if seed == self._options.seeds[0]:
                    pool.append(_pool_use(record))
        return self._report(runs, pool)

    def _spec(self, policy: Policy, calls: Sequence[Call], seed: int) -> RunSpec:
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
        # A request may declare as much as the context holds, and must fit when it is alone.
        blocks=max(blocks, CONTEXT_TOKENS // options.block_size),
        block_size=options.block_size,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=max(2048, options.slots),
        waiting_max=len(requests),
    )


def _calls(load: TraceLoad, speed: float, seed: int) -> list[Call]:
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
        Call(
            at_us=round(at_s / speed * 1e6),
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            max_tokens=max(request.output_tokens, load.max_tokens or 0),
        )
        for at_s, request in zip(times_s, requests, strict=True)
    ]
    return sorted(calls, key=lambda call: call.at_us or 0)


def _describe(record: RunRecord) -> PolicyRun:
    first = describe([_ttft_us(journey) / 1e6 for journey in record.journeys])
    if first is None:
        raise RunFailed(f"{record.label}: nobody asked for anything")
    recomputed = sum(journey.recomputed_tokens for journey in record.journeys)
    # The last token of an answer is never fed, so it has no KV.
    computed = sum(journey.input_tokens + journey.output_tokens - 1 - journey.cached_tokens for journey in record.journeys)
    finish_s = record.end_us / 1e6
    return PolicyRun(
        policy=record.label,
        seed=record.seed,
        preemptions=sum(journey.preemptions for journey in record.journeys),
        recomputed_tokens=recomputed,
        recomputed_share=recomputed / max(1, recomputed + computed),
        finish_s=finish_s,
        output_tokens_per_s=sum(journey.output_tokens for journey in record.journeys) / finish_s,
        ttft_mean_s=first.mean,
        ttft_p99_s=first.p99,
        pool_use=_mean_use(record),
        steps=record.steps,
    )


def _ttft_us(journey: Journey) -> int:
    """A policy that loses or refuses requests would look quick, so one that was not answered fails the run."""
    if journey.ttft_us is None or journey.outcome not in (Outcome.STOP, Outcome.LENGTH):
        raise RunFailed(f"request {journey.index} ended as {journey.outcome}")
    return journey.ttft_us


def _mean_use(record: RunRecord) -> float:
    """Room that nobody waits for is not wasted and does not count."""
    shares = [_share(look, record) for look in record.looks if look.waiting]
    return sum(shares) / max(1, len(shares))


def _pool_use(record: RunRecord) -> PoolUse:
    every = max(1, -(-len(record.looks) // POOL_SAMPLES_MAX))
    kept = record.looks[::every]
    return PoolUse(record.label, [look.at_us / 1e6 for look in kept], [_share(look, record) for look in kept])


def _share(look: Look, record: RunRecord) -> float:
    """Of the pool, what requests hold; what is merely cached does not count."""
    return look.running_blocks / record.pool_blocks


def show(console: Console, report: PolicyReport) -> None:
    seeds = len({run.seed for run in report.runs})
    table = Table(
        title=f"{report.requests:,} requests of {report.trace}, pool of {report.pool_blocks:,} blocks, {seeds} seeds",
        title_justify="left",
    )
    table.add_column("reserve, victims")
    columns = (
        "preemptions",
        "recomputed tokens",
        "share",
        "finish s",
        "output tokens/s",
        "TTFT mean s",
        "p99 s",
        "pool use",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for name in dict.fromkeys(run.policy for run in report.runs):
        table.add_row(name, *_cells([run for run in report.runs if run.policy == name]))
    console.print(table)
    console.print(
        f"Mean of the seeds (smallest – largest), in virtual time with the step times of {report.step_times}. "
        "Pool use counts while requests wait.",
        style="dim",
        highlight=False,
    )


def _cells(runs: Sequence[PolicyRun]) -> list[str]:
    return [
        _cell([run.preemptions for run in runs], "{:,.0f}"),
        _cell([run.recomputed_tokens for run in runs], "{:,.0f}"),
        _cell([run.recomputed_share for run in runs], "{:.1%}", spread=False),
        _cell([run.finish_s for run in runs], "{:,.1f}"),
        _cell([run.output_tokens_per_s for run in runs], "{:,.0f}", spread=False),
        _cell([run.ttft_mean_s for run in runs], "{:,.2f}"),
        _cell([run.ttft_p99_s for run in runs], "{:,.1f}"),
        _cell([run.pool_use for run in runs], "{:.1%}", spread=False),
    ]


def _cell(values: Sequence[float], form: str, *, spread: bool = True) -> str:
    mean, least, most = (form.format(value) for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({least}–{most})" if spread and least != most else mean
