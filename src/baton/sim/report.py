"""Summaries of simulated runs: from records to the published numbers.

Owns the names, units and definitions of those numbers, not their presentation. TTFT and end-to-end times are in seconds,
times per token in milliseconds, rates per simulated second. A value that was not observed is None, never zero.

    finished     ended by a stop token or by its length; only these count in latencies, tokens and the prefix hit rate
    good         finished within both targets; an answer of one token has no time per token and is held to TTFT alone
    span         from the first arrival to the last end; all rates are over it
    pool shares  means over all samples of all instances, each with equal weight
    busy         share of the span in which a device computed
    roles        in split clusters: the same numbers for each role, and its hand-overs
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.errors import BatonError
from baton.sim.run_records import InstanceSample, RequestOutcome, RunRecord, SimulatedRequest

SCHEMA = 1
FINISHED = (RequestOutcome.STOP, RequestOutcome.LENGTH)
Setting = str | int | float | bool | None


class BadRecord(BatonError):
    """A record that contradicts itself; the message says how."""


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The latency targets of goodput."""

    ttft_s: float
    tpot_ms: float

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_ms", self.tpot_ms)):
            if not 0.0 < value < math.inf:  # written so that NaN fails too
                raise ValueError(f"the target {name} must be a positive number, not {value}")

    def met_by(self, request: SimulatedRequest) -> bool:
        if request.outcome not in FINISHED or request.ttft_us is None or request.ttft_us > self.ttft_s * 1e6:
            return False
        return request.tpot_us is None or request.tpot_us <= self.tpot_ms * 1e3


class ValueDistribution(msgspec.Struct, frozen=True):
    """Many values of one unit; percentiles are interpolated linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class RequestCounts(msgspec.Struct, frozen=True):
    requests: int
    finished: int
    refused: int
    aborted: int
    errors: int
    lost: int
    unfinished: int

    @property
    def broken(self) -> int:
        """Requests that a cluster without faults would have finished."""
        return self.errors + self.lost + self.unfinished


class TokenTotals(msgspec.Struct, frozen=True):
    """Of finished requests."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    hit_rate: float | None
    """Cached ÷ input."""
    recomputed_share: float | None
    """Of all tokens whose KV was computed."""


class Throughputs(msgspec.Struct, frozen=True):
    """Per simulated second."""

    requests_per_s: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    good_per_s: float | None
    good_share: float | None
    """Share of all requests, refused ones included."""


class PoolShares(msgspec.Struct, frozen=True):
    """Shares of an instance's pool."""

    held_mean: float
    """By requests."""
    held_peak: float
    cached_mean: float
    """By no request, kept for the prefix cache."""
    free_mean: float
    leased_mean: float = 0.0
    """Leased for prefills of peers."""


class QueueLengths(msgspec.Struct, frozen=True):
    """Requests at one instance."""

    running_mean: float
    running_peak: int
    waiting_mean: float
    waiting_peak: int


class BusyShares(msgspec.Struct, frozen=True):
    """Share of the span in which instances computed."""

    least: float
    median: float
    most: float


class RoleSummary(msgspec.Struct, frozen=True):
    """Instances of one role."""

    role: str
    instances: int
    busy: BusyShares | None
    ledger: PoolShares | None
    queues: QueueLengths | None
    handovers: int
    refused: int
    failed: int
    gigabytes: float
    """Of KV, sent or received."""
    link_busy: float | None
    """Share of the span in which their links moved KV."""


class RunSummary(msgspec.Struct, frozen=True):
    label: str
    seed: int
    instances: int
    counts: RequestCounts
    ttft_s: ValueDistribution | None
    tpot_ms: ValueDistribution | None
    e2e_s: ValueDistribution | None
    queue_s: ValueDistribution | None
    tokens: TokenTotals
    rates: Throughputs
    preemptions: int
    preempted_requests: int
    ledger: PoolShares | None
    queues: QueueLengths | None
    busy: BusyShares | None
    span_s: float | None
    simulated_s: float
    steps: int
    wall_s: float
    simulated_per_wall: float | None
    handover_s: ValueDistribution | None = None
    """From the ask to the adoption."""
    transfer_s: ValueDistribution | None = None
    """Part of that which was neither queueing nor computing at the giver."""
    roles: list[RoleSummary] = []


class SimReport(msgspec.Struct, frozen=True):
    """The JSON file of `baton sim run`."""

    schema: int
    version: str
    settings: dict[str, Setting]
    ttft_target_s: float
    tpot_target_ms: float
    notes: list[str]
    runs: list[RunSummary]

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    def of(self, label: str) -> list[RunSummary]:
        return [run for run in self.runs if run.label == label]


def summarise(record: RunRecord, targets: LatencyTargets) -> RunSummary:
    check(record)
    finished = [request for request in record.requests if request.outcome in FINISHED]
    span_us = span_of(record)
    preempted = [request.preemptions for request in record.requests if request.preemptions]
    simulated_s = record.end_us / 1e6
    return RunSummary(
        label=record.label,
        seed=record.seed,
        instances=record.instances,
        counts=_counts(record.requests),
        ttft_s=describe(request.ttft_us for request in finished),
        tpot_ms=describe((request.tpot_us for request in finished), unit_us=1e3),
        e2e_s=describe(_e2e_us(request) for request in finished),
        queue_s=describe(request.queue_us for request in finished),
        tokens=_tokens(finished),
        rates=_rates(record.requests, finished, span_us, targets),
        preemptions=sum(preempted),
        preempted_requests=len(preempted),
        ledger=_ledger(record, record.samples),
        queues=_queues(record.samples),
        busy=_busy(busy_shares(record)),
        span_s=None if span_us is None else span_us / 1e6,
        simulated_s=simulated_s,
        steps=record.steps,
        wall_s=record.wall_s,
        simulated_per_wall=simulated_s / record.wall_s if record.wall_s > 0 else None,
        handover_s=describe(record.took_us),
        transfer_s=describe(request.transfer_us for request in finished if request.attempts),
        roles=[_role(record, role) for role in dict.fromkeys(record.roles)],
    )


def _role(record: RunRecord, role: str) -> RoleSummary:
    members = [number for number, its in enumerate(record.roles) if its == role]
    samples = [sample for sample in record.samples if sample.instance in members]
    handed = [record.handed[number] for number in members if number < len(record.handed)]
    shares, span_us = busy_shares(record), span_of(record)
    link_us = sum(one.busy_us for one in handed)
    return RoleSummary(
        role=role,
        instances=len(members),
        busy=_busy(None if shares is None else shares[members]),
        ledger=_ledger(record, samples),
        queues=_queues(samples),
        handovers=sum(one.made for one in handed),
        refused=sum(one.refused for one in handed),
        failed=sum(one.failed for one in handed),
        gigabytes=sum(one.bytes for one in handed) / 1e9,
        link_busy=link_us / len(members) / span_us if span_us else None,
    )


def check(record: RunRecord) -> None:
    """Raise BadRecord for a record that contradicts itself."""
    if record.instances < 1 or record.pool_blocks < 1 or record.block_size < 1:
        raise BadRecord(f"{record.instances} instances of {record.pool_blocks} blocks of {record.block_size} tokens")
    for request in record.requests:
        _check_request(request, record.instances)
    for sample in record.samples:
        blocks = sample.free_blocks + sample.evictable_blocks + sample.running_blocks + sample.leased_blocks
        if blocks != (pool := record.pool_of(sample.instance)):
            raise BadRecord(f"instance {sample.instance} had {blocks} blocks at {sample.at_us} µs, not {pool}")
    for name, instances in (
        ("look", {sample.instance for sample in record.samples}),
        ("step", {s.instance for s in record.spans}),
    ):
        if instances and not 0 <= min(instances) <= max(instances) < record.instances:
            raise BadRecord(f"a {name} is of instance {max(instances)} where there are {record.instances}")
    if record.roles and len(record.roles) != record.instances:
        raise BadRecord(f"{len(record.roles)} roles for {record.instances} instances")
    for span in record.spans:
        if span.end_us < span.begin_us:
            raise BadRecord(f"step {span.step} of instance {span.instance} ends before it begins")


def _check_request(request: SimulatedRequest, instances: int) -> None:
    who = f"request {request.index}"
    if request.instance is not None and not 0 <= request.instance < instances:
        raise BadRecord(f"{who} ran at instance {request.instance} where there are {instances}")
    if request.first_us is not None and request.first_us < request.arrived_us:
        raise BadRecord(f"{who} had its first token before it arrived")
    if request.ended_us is not None and request.ended_us < (request.first_us or request.arrived_us):
        raise BadRecord(f"{who} ended before it began")
    if request.cached_tokens > request.input_tokens:
        raise BadRecord(f"{who} found {request.cached_tokens} of {request.input_tokens} prompt tokens in the cache")
    if request.outcome in FINISHED and (request.first_us is None or request.ended_us is None):
        raise BadRecord(f"{who} ended as {request.outcome} without a first token or an end")


def span_of(record: RunRecord) -> int | None:
    """Microseconds from the first arrival to the last end."""
    ends_us = [request.ended_us for request in record.requests if request.ended_us is not None]
    if not ends_us:
        return None
    return max(ends_us) - min(request.arrived_us for request in record.requests)


def describe(values_us: Iterable[float | None], unit_us: float = 1e6) -> ValueDistribution | None:
    """None if there are no values."""
    values = np.array([value for value in values_us if value is not None], dtype=np.float64) / unit_us
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return ValueDistribution(len(values), float(values.mean()), p50, p90, p99, float(values.max()))


def _e2e_us(request: SimulatedRequest) -> int | None:
    return None if request.ended_us is None else request.ended_us - request.arrived_us


def _counts(requests: Sequence[SimulatedRequest]) -> RequestCounts:
    by_outcome = Counter(request.outcome for request in requests)
    return RequestCounts(
        requests=len(requests),
        finished=sum(by_outcome[outcome] for outcome in FINISHED),
        refused=by_outcome[RequestOutcome.REFUSED],
        aborted=by_outcome[RequestOutcome.ABORT],
        errors=by_outcome[RequestOutcome.ERROR],
        lost=by_outcome[RequestOutcome.LOST],
        unfinished=by_outcome[None],
    )


def _tokens(finished: Sequence[SimulatedRequest]) -> TokenTotals:
    asked = sum(request.input_tokens for request in finished)
    cached = sum(request.cached_tokens for request in finished)
    recomputed = sum(request.recomputed_tokens for request in finished)
    # The last token of an answer is never fed, so it has no KV.
    computed = asked - cached + sum(max(0, request.output_tokens - 1) for request in finished) + recomputed
    return TokenTotals(
        input_tokens=asked,
        cached_tokens=cached,
        output_tokens=sum(request.output_tokens for request in finished),
        recomputed_tokens=recomputed,
        hit_rate=cached / asked if asked else None,
        recomputed_share=recomputed / computed if computed else None,
    )


def _rates(
    requests: Sequence[SimulatedRequest], finished: Sequence[SimulatedRequest], span_us: int | None, targets: LatencyTargets
) -> Throughputs:
    good = sum(targets.met_by(request) for request in finished)
    share = good / len(requests) if requests else None
    if not span_us:
        return Throughputs(None, None, None, None, share)
    per_s = 1e6 / span_us
    return Throughputs(
        requests_per_s=len(finished) * per_s,
        input_tokens_per_s=sum(request.input_tokens for request in finished) * per_s,
        output_tokens_per_s=sum(request.output_tokens for request in finished) * per_s,
        good_per_s=good * per_s,
        good_share=share,
    )


def _ledger(record: RunRecord, samples: Sequence[InstanceSample]) -> PoolShares | None:
    if not samples:
        return None
    blocks = np.array([(o.running_blocks, o.evictable_blocks, o.free_blocks, o.leased_blocks) for o in samples])
    shares = blocks / np.array([[record.pool_of(o.instance)] for o in samples])
    held, cached, free, leased = shares.mean(axis=0).tolist()
    return PoolShares(held, float(shares[:, 0].max()), cached, free, leased)


def _queues(samples: Sequence[InstanceSample]) -> QueueLengths | None:
    if not samples:
        return None
    running = np.array([sample.running for sample in samples])
    waiting = np.array([sample.waiting for sample in samples])
    return QueueLengths(float(running.mean()), int(running.max()), float(waiting.mean()), int(waiting.max()))


def busy_shares(record: RunRecord) -> npt.NDArray[np.float64] | None:
    """One per instance."""
    span_us = span_of(record)
    return np.array(record.busy_us) / span_us if span_us and record.busy_us else None


def _busy(shares: npt.NDArray[np.float64] | None) -> BusyShares | None:
    if shares is None:
        return None
    return BusyShares(float(shares.min()), float(np.median(shares)), float(shares.max()))
