"""A trace file as the calls of simulated clients.

Owns which requests of a trace are run and when. Requests that could never run (no input, no output, longer than a sequence
may be) are passed over and counted. Requests that share a timestamp are spread until the next one. Seed 0 keeps the trace's
times; any other moves each arrival by up to two mean gaps, so that seeds differ as one hour of a service from the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from baton.bench.traces import HASH_BLOCK_TOKENS, TracedRequest, read_trace, smear
from baton.core.errors import InvariantViolated
from baton.sim.cluster import PREFIX_ID_TOKENS, PlannedRequest
from baton.sim.workload import CALLS_MAX, BadWorkload, poisson_us

_JITTER = 1
JITTER_GAPS = 2.0

if HASH_BLOCK_TOKENS != PREFIX_ID_TOKENS:
    raise InvariantViolated(f"traces name prefixes in {HASH_BLOCK_TOKENS} tokens, the simulator in {PREFIX_ID_TOKENS}")


@dataclass(frozen=True, slots=True)
class TraceLoad:
    requests: tuple[TracedRequest, ...]
    max_tokens: int | None
    """`max_tokens` of every request; None: the length of its answer. Never less than that."""
    skipped: int
    """Requests left out because they could never run."""
    bunched: int
    """Requests with the timestamp of the previous one, before spreading."""

    @property
    def is_timed(self) -> bool:
        return all(request.at_s is not None for request in self.requests)

    @property
    def gap_s(self) -> float:
        """Mean time between arrivals."""
        first_s, last_s = (self.requests[place].at_s or 0.0 for place in (0, -1))
        return (last_s - first_s) / len(self.requests)

    def at_their_times(self, seed: int, speed: float) -> list[PlannedRequest]:
        if not self.is_timed:
            raise BadWorkload("the trace has no times")
        moved_s = np.zeros(len(self.requests))
        if seed:
            moved_s = np.random.default_rng([seed, _JITTER]).uniform(0.0, JITTER_GAPS * self.gap_s, len(self.requests))
        times_us = (
            round(((request.at_s or 0.0) + late_s) / speed * 1e6)
            for request, late_s in zip(self.requests, moved_s.tolist(), strict=True)
        )
        return self._calls(times_us)

    def at_rate(self, seed: int, rate_per_s: float) -> list[PlannedRequest]:
        return self._calls(poisson_us(rate_per_s, seed))

    def when_a_client_is_free(self) -> list[PlannedRequest]:
        return self._calls(repeat(None))

    def _calls(self, times_us: Iterable[int | None]) -> list[PlannedRequest]:
        calls = [
            PlannedRequest(
                at_us=at_us,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                max_tokens=_declared(request, self.max_tokens),
                prefix_ids=request.prefix_blocks,
            )
            for request, at_us in zip(self.requests, times_us, strict=False)
        ]
        return sorted(calls, key=lambda call: call.at_us or 0)


def read_load(path: Path, limit: int | None, max_tokens: int | None, sequence_tokens_max: int) -> TraceLoad:
    """The first `limit` requests of the trace that can run."""
    bunches = _Bunches(read_trace(path))
    fitting: list[TracedRequest] = []
    skipped = 0
    for request in smear(bunches):
        tokens = request.input_tokens + _declared(request, max_tokens)
        if request.input_tokens < 1 or request.output_tokens < 1 or tokens > sequence_tokens_max:
            skipped += 1
            continue
        fitting.append(request)
        if len(fitting) == limit:
            break
        if len(fitting) > CALLS_MAX:
            raise BadWorkload(f"{path} has more than {CALLS_MAX:,} requests; take the first ones (--limit)")
    if not fitting:
        raise BadWorkload(f"{path} has no request that fits {sequence_tokens_max:,} tokens")
    return TraceLoad(tuple(fitting), max_tokens, skipped, bunches.shared)


def _declared(request: TracedRequest, max_tokens: int | None) -> int:
    return max(request.output_tokens, max_tokens or 0)


class _Bunches:
    """Iterates over requests and counts those with the timestamp of the previous one."""

    def __init__(self, requests: Iterator[TracedRequest]) -> None:
        self._requests = requests
        self.shared = 0

    def __iter__(self) -> Iterator[TracedRequest]:
        before_s: float | None = None
        for request in self._requests:
            self.shared += request.at_s is not None and request.at_s == before_s
            before_s = request.at_s
            yield request
