"""`baton bench policies`: what each rule of reservation and each order of victims costs, on the lengths of a real trace.

Owns the load, the runs and what is said of them. Each client declares a `max_tokens` that is larger than what it will
generate, as clients do, so the scheduler must guess; and the pool holds only a share of what the slots could use, so guesses
matter. Every policy meets the same arrivals in virtual time; seeds differ in when requests arrive and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from baton.bench.stats import describe
from baton.bench.traces import TracedRequest, read_trace, smear
from baton.bench.virtual import Arrival, Clock, StepTime, VirtualRun
from baton.core.config import ReservePolicy, VictimPolicy, WorkerConfig

SCHEMA = 1
CONTEXT_TOKENS = 8192
TRACE_GLOB = "AzureLLMInferenceTrace*conv*.csv*"
POOL_SAMPLES_MAX = 4000


class NoTrace(Exception):
    """There is no trace to take lengths from; the message says how to name one."""


class NothingToRun(Exception):
    """The trace has no request that fits."""


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
    speed: float = 3.0
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
    step_time: dict[str, float]
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
        self._requests, self._skipped = _fitting(options)
        self.config = _config(options, self._requests)

    @property
    def requests(self) -> int:
        """How many will end if all goes well, over all runs."""
        return len(self._requests) * len(self._policies) * len(self._options.seeds)

    def run(self, doing: Callable[[str], None], advance: Callable[[int], None]) -> PolicyReport:
        runs: list[PolicyRun] = []
        pool: list[PoolUse] = []
        for seed in self._options.seeds:
            arrivals = _arrivals(self._requests, self._options, seed)
            for policy in self._policies:
                doing(f"{policy.name}, seed {seed}")
                config = replace(self.config, reserve=policy.reserve, victims=policy.victims)
                seen = Clock(config, arrivals, StepTime(), advance).to_the_end()
                runs.append(_describe(policy, seed, seen, arrivals, config.blocks))
                if seed == self._options.seeds[0]:
                    pool.append(_pool_use(policy, seen, config.blocks))
        return self._report(runs, pool)

    def _report(self, runs: list[PolicyRun], pool: list[PoolUse]) -> PolicyReport:
        options = self._options
        return PolicyReport(
            schema=SCHEMA,
            trace=options.trace.name,
            requests=len(self._requests),
            skipped=self._skipped,
            pool_blocks=self.config.blocks,
            settings={
                "slots": options.slots,
                "pool_share": options.pool_share,
                "max_tokens": options.max_tokens,
                "speed": options.speed,
                "block_size": options.block_size,
                "context_tokens": CONTEXT_TOKENS,
            },
            step_time=msgspec.to_builtins(StepTime()),
            runs=runs,
            pool=pool,
        )


def _fitting(options: PolicyOptions) -> tuple[list[TracedRequest], int]:
    """The first requests that fit the context with what they declare, and how many were passed over."""
    fitting: list[TracedRequest] = []
    skipped = 0
    for request in smear(read_trace(options.trace)):
        if len(fitting) == options.requests:
            break
        declared = max(options.max_tokens, request.output_tokens)
        if request.input_tokens < 1 or request.output_tokens < 1 or request.input_tokens + declared > CONTEXT_TOKENS:
            skipped += 1
        else:
            fitting.append(request)
    if not fitting:
        raise NothingToRun(f"{options.trace} has no request that fits {CONTEXT_TOKENS:,} tokens")
    return fitting, skipped


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


def _arrivals(requests: Sequence[TracedRequest], options: PolicyOptions, seed: int) -> list[Arrival]:
    """The trace's own times (evenly spaced where it has none), each moved by up to two mean gaps."""
    last_s = requests[-1].at_s or len(requests) / 5.0
    gap_s = last_s / len(requests)
    jitter_s = np.random.default_rng([seed]).uniform(0.0, 2 * gap_s, size=len(requests)).tolist()
    times_s = [
        (index * gap_s if request.at_s is None else request.at_s) + moved_s
        for index, (request, moved_s) in enumerate(zip(requests, jitter_s, strict=True))
    ]
    arrivals = [
        Arrival(
            round(at_s / options.speed * 1e6),
            request.input_tokens,
            request.output_tokens,
            max(options.max_tokens, request.output_tokens),
        )
        for at_s, request in zip(times_s, requests, strict=True)
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at_us)


def _describe(policy: Policy, seed: int, seen: VirtualRun, arrivals: Sequence[Arrival], blocks: int) -> PolicyRun:
    first = describe([ttft_us / 1e6 for ttft_us in seen.ttft_us])
    if first is None:
        raise NothingToRun("no request gave a token")
    computed = sum(ended.bill.computed_tokens for ended in seen.ended)
    return PolicyRun(
        policy=policy.name,
        seed=seed,
        preemptions=seen.preemptions,
        recomputed_tokens=seen.recomputed_tokens,
        recomputed_share=seen.recomputed_tokens / max(1, seen.recomputed_tokens + computed),
        finish_s=seen.end_us / 1e6,
        output_tokens_per_s=sum(arrival.answer_tokens for arrival in arrivals) / (seen.end_us / 1e6),
        ttft_mean_s=first.mean,
        ttft_p99_s=first.p99,
        pool_use=_mean_use(seen, blocks),
        steps=seen.steps,
    )


def _mean_use(seen: VirtualRun, blocks: int) -> float:
    """Each level counts for as long as it lasted; room that nobody waits for is not wasted and does not count."""
    times, held, waiting = (np.array(column, dtype=np.float64) for column in zip(*seen.looks, strict=True))
    lasted = np.where(waiting[:-1] > 0, np.diff(times), 0.0)
    return float((held[:-1] * lasted).sum() / max(1.0, lasted.sum()) / blocks)


def _pool_use(policy: Policy, seen: VirtualRun, blocks: int) -> PoolUse:
    every = -(-len(seen.looks) // POOL_SAMPLES_MAX)
    kept = seen.looks[::every]
    return PoolUse(policy.name, [look.at_us / 1e6 for look in kept], [look.held_blocks / blocks for look in kept])


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
        "Mean of the seeds (smallest – largest), in virtual time on a modelled GPU. Pool use counts while requests wait.",
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
