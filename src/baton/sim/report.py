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
from baton.sim.run_records import InstanceSample, RequestOutcome, RequestRecord, RunRecord

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

    def met_by(self, journey: RequestRecord) -> bool:
        if journey.outcome not in FINISHED or journey.ttft_us is None or journey.ttft_us > self.ttft_s * 1e6:
            return False
        return journey.tpot_us is None or journey.tpot_us <= self.tpot_ms * 1e3


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
    finished = [journey for journey in record.journeys if journey.outcome in FINISHED]
    span_us = span_of(record)
    preempted = [journey.preemptions for journey in record.journeys if journey.preemptions]
    simulated_s = record.end_us / 1e6
    return RunSummary(
        label=record.label,
        seed=record.seed,
        instances=record.instances,
        counts=_counts(record.journeys),
        ttft_s=describe(journey.ttft_us for journey in finished),
        tpot_ms=describe((journey.tpot_us for journey in finished), unit_us=1e3),
        e2e_s=describe(_e2e_us(journey) for journey in finished),
        queue_s=describe(journey.queue_us for journey in finished),
        tokens=_tokens(finished),
        rates=_rates(record.journeys, finished, span_us, targets),
        preemptions=sum(preempted),
        preempted_requests=len(preempted),
        ledger=_ledger(record, record.looks),
        queues=_queues(record.looks),
        busy=_busy(busy_shares(record)),
        span_s=None if span_us is None else span_us / 1e6,
        simulated_s=simulated_s,
        steps=record.steps,
        wall_s=record.wall_s,
        simulated_per_wall=simulated_s / record.wall_s if record.wall_s > 0 else None,
        handover_s=describe(record.took_us),
        transfer_s=describe(journey.transfer_us for journey in finished if journey.attempts),
        roles=[_role(record, role) for role in dict.fromkeys(record.roles)],
    )


def _role(record: RunRecord, role: str) -> RoleSummary:
    members = [number for number, its in enumerate(record.roles) if its == role]
    looks = [look for look in record.looks if look.instance in members]
    handed = [record.handed[number] for number in members if number < len(record.handed)]
    shares, span_us = busy_shares(record), span_of(record)
    link_us = sum(one.busy_us for one in handed)
    return RoleSummary(
        role=role,
        instances=len(members),
        busy=_busy(None if shares is None else shares[members]),
        ledger=_ledger(record, looks),
        queues=_queues(looks),
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
    for journey in record.journeys:
        _check_journey(journey, record.instances)
    for look in record.looks:
        blocks = look.free_blocks + look.evictable_blocks + look.running_blocks + look.leased_blocks
        if blocks != (pool := record.pool_of(look.instance)):
            raise BadRecord(f"instance {look.instance} had {blocks} blocks at {look.at_us} µs, not {pool}")
    for name, instances in (
        ("look", {look.instance for look in record.looks}),
        ("step", {s.instance for s in record.spans}),
    ):
        if instances and not 0 <= min(instances) <= max(instances) < record.instances:
            raise BadRecord(f"a {name} is of instance {max(instances)} where there are {record.instances}")
    if record.roles and len(record.roles) != record.instances:
        raise BadRecord(f"{len(record.roles)} roles for {record.instances} instances")
    for span in record.spans:
        if span.end_us < span.begin_us:
            raise BadRecord(f"step {span.step} of instance {span.instance} ends before it begins")


def _check_journey(journey: RequestRecord, instances: int) -> None:
    who = f"request {journey.index}"
    if journey.instance is not None and not 0 <= journey.instance < instances:
        raise BadRecord(f"{who} ran at instance {journey.instance} where there are {instances}")
    if journey.first_us is not None and journey.first_us < journey.arrived_us:
        raise BadRecord(f"{who} had its first token before it arrived")
    if journey.ended_us is not None and journey.ended_us < (journey.first_us or journey.arrived_us):
        raise BadRecord(f"{who} ended before it began")
    if journey.cached_tokens > journey.input_tokens:
        raise BadRecord(f"{who} found {journey.cached_tokens} of {journey.input_tokens} prompt tokens in the cache")
    if journey.outcome in FINISHED and (journey.first_us is None or journey.ended_us is None):
        raise BadRecord(f"{who} ended as {journey.outcome} without a first token or an end")


def span_of(record: RunRecord) -> int | None:
    """Microseconds from the first arrival to the last end."""
    ends_us = [journey.ended_us for journey in record.journeys if journey.ended_us is not None]
    if not ends_us:
        return None
    return max(ends_us) - min(journey.arrived_us for journey in record.journeys)


def describe(values_us: Iterable[float | None], unit_us: float = 1e6) -> ValueDistribution | None:
    """None if there are no values."""
    values = np.array([value for value in values_us if value is not None], dtype=np.float64) / unit_us
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return ValueDistribution(len(values), float(values.mean()), p50, p90, p99, float(values.max()))


def _e2e_us(journey: RequestRecord) -> int | None:
    return None if journey.ended_us is None else journey.ended_us - journey.arrived_us


def _counts(journeys: Sequence[RequestRecord]) -> RequestCounts:
    by_outcome = Counter(journey.outcome for journey in journeys)
    return RequestCounts(
        requests=len(journeys),
        finished=sum(by_outcome[outcome] for outcome in FINISHED),
        refused=by_outcome[RequestOutcome.REFUSED],
        aborted=by_outcome[RequestOutcome.ABORT],
        errors=by_outcome[RequestOutcome.ERROR],
        lost=by_outcome[RequestOutcome.LOST],
        unfinished=by_outcome[None],
    )


def _tokens(finished: Sequence[RequestRecord]) -> TokenTotals:
    asked = sum(journey.input_tokens for journey in finished)
    cached = sum(journey.cached_tokens for journey in finished)
    recomputed = sum(journey.recomputed_tokens for journey in finished)
    # The last token of an answer is never fed, so it has no KV.
    computed = asked - cached + sum(max(0, journey.output_tokens - 1) for journey in finished) + recomputed
    return TokenTotals(
        input_tokens=asked,
        cached_tokens=cached,
        output_tokens=sum(journey.output_tokens for journey in finished),
        recomputed_tokens=recomputed,
        hit_rate=cached / asked if asked else None,
        recomputed_share=recomputed / computed if computed else None,
    )


def _rates(
    journeys: Sequence[RequestRecord], finished: Sequence[RequestRecord], span_us: int | None, targets: LatencyTargets
) -> Throughputs:
    good = sum(targets.met_by(journey) for journey in finished)
    share = good / len(journeys) if journeys else None
    if not span_us:
        return Throughputs(None, None, None, None, share)
    per_s = 1e6 / span_us
    return Throughputs(
        requests_per_s=len(finished) * per_s,
        input_tokens_per_s=sum(journey.input_tokens for journey in finished) * per_s,
        output_tokens_per_s=sum(journey.output_tokens for journey in finished) * per_s,
        good_per_s=good * per_s,
        good_share=share,
    )


def _ledger(record: RunRecord, looks: Sequence[InstanceSample]) -> PoolShares | None:
    if not looks:
        return None
    blocks = np.array([(o.running_blocks, o.evictable_blocks, o.free_blocks, o.leased_blocks) for o in looks])
    shares = blocks / np.array([[record.pool_of(o.instance)] for o in looks])
    held, cached, free, leased = shares.mean(axis=0).tolist()
    return PoolShares(held, float(shares[:, 0].max()), cached, free, leased)


def _queues(looks: Sequence[InstanceSample]) -> QueueLengths | None:
    if not looks:
        return None
    running = np.array([look.running for look in looks])
    waiting = np.array([look.waiting for look in looks])
    return QueueLengths(float(running.mean()), int(running.max()), float(waiting.mean()), int(waiting.max()))


def busy_shares(record: RunRecord) -> npt.NDArray[np.float64] | None:
    """One per instance."""
    span_us = span_of(record)
    return np.array(record.busy_us) / span_us if span_us and record.busy_us else None


def _busy(shares: npt.NDArray[np.float64] | None) -> BusyShares | None:
    if shares is None:
        return None
    return BusyShares(float(shares.min()), float(np.median(shares)), float(shares.max()))
