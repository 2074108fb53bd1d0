"""Timelines of runs for ui.perfetto.dev and chrome://tracing: JSON in the Chrome trace format.

    process "instance 3"
      steps               one slice per step: "decode 7", "prefill 2048 + 7"
      KV blocks           counter: requests, cached, free
      requests            counter: running, waiting
      preemptions         counter, since the start
      request             async slices, packed by the viewer: request ⊃ queue, prefill, decode
    process "front end"   requests that no instance took

Owns the form of that file and a bound on its size: only the latest steps and requests are shown (a record keeps the latest
steps), samples are thinned evenly, and `otherData` gives the numbers left out. A preempted request went through queue and
prefill more than once and the record has only sums, so its time before the first token is one slice, with the sums as
arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.sim.run_records import InstanceSample, RunRecord, SimulatedRequest, StepSpan

STEPS_MAX = 200_000
REQUESTS_MAX = 20_000
SAMPLES_MAX = 50_000
STEPS_TRACK = 1
FRONT_PROCESS = 1
"""Not 0, which viewers treat specially."""

Argument = str | int | float | None


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the format; the names are the format's own. Times are in microseconds."""

    name: str
    ph: str
    pid: int
    ts: int | None = None
    dur: int | None = None
    tid: int | None = None
    cat: str | None = None
    id: str | None = None
    args: dict[str, Argument] | None = None


class LeftOut(msgspec.Struct, frozen=True):
    """Numbers of events left out of a timeline to bound its size."""

    steps: int
    requests: int
    samples: int

    @property
    def told(self) -> str | None:
        parts = [("steps", self.steps), ("requests", self.requests), ("looks", self.samples)]
        missing = ", ".join(f"{count:,} {name}" for name, count in parts if count)
        return f"Left out of the timeline to keep it small: {missing}." if missing else None


class PerfettoTimeline(
    msgspec.Struct, frozen=True, rename={"events": "traceEvents", "unit": "displayTimeUnit", "about": "otherData"}
):
    """The whole file."""

    events: list[TraceEvent]
    about: dict[str, Argument]
    unit: str = "ms"


def timeline(
    record: RunRecord, steps_max: int = STEPS_MAX, requests_max: int = REQUESTS_MAX, samples_max: int = SAMPLES_MAX
) -> tuple[PerfettoTimeline, LeftOut]:
    spans = sorted(record.spans, key=lambda span: (span.begin_us, span.instance))
    requests = [request for request in record.requests if request.ended_us is not None]
    requests.sort(key=lambda request: (request.arrived_us, request.index))
    # All instances are sampled at the same times, so whole rounds of samples are kept or dropped.
    rounds = sorted({sample.at_us for sample in record.samples})
    every = max(1, -(-len(record.samples) // samples_max))
    shown = frozenset(rounds[::every])
    samples = [sample for sample in record.samples if sample.at_us in shown]
    left_out = LeftOut(
        steps=record.spans_left_out + max(0, len(spans) - steps_max),
        requests=len(record.requests) - min(len(requests), requests_max),
        samples=len(record.samples) - len(samples),
    )
    events = list(_processes(record))
    events.extend(map(_step, spans[-steps_max:]))
    for sample in samples:
        events.extend(_counters(sample))
    for request in requests[-requests_max:]:
        events.extend(_request(request))
    about: dict[str, Argument] = {
        "run": record.label,
        "seed": record.seed,
        "pool blocks an instance": record.pool_blocks,
        "steps left out": left_out.steps,
        "requests left out": left_out.requests,
        "looks left out": left_out.samples,
    }
    return PerfettoTimeline(events, about), left_out


def write_timeline(path: Path, record: RunRecord) -> LeftOut:
    made, left_out = timeline(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(made) + b"\n")
    return left_out


def process_of(instance: int | None) -> int:
    return FRONT_PROCESS if instance is None else FRONT_PROCESS + 1 + instance


def _processes(record: RunRecord) -> Iterator[TraceEvent]:
    yield from _process(None, "front end")
    for instance in range(record.instances):
        role = f", {record.roles[instance]}" if record.roles else ""
        yield from _process(instance, f"instance {instance}{role}")
        pid = process_of(instance)
        yield TraceEvent("thread_name", "M", pid, tid=STEPS_TRACK, args={"name": "steps"})


def _process(instance: int | None, name: str) -> Iterator[TraceEvent]:
    pid = process_of(instance)
    yield TraceEvent("process_name", "M", pid, args={"name": name})
    yield TraceEvent("process_sort_index", "M", pid, args={"sort_index": pid})


def _step(span: StepSpan) -> TraceEvent:
    name = f"prefill {span.prefill_tokens} + {span.decodes}" if span.prefill_tokens else f"decode {span.decodes}"
    args: dict[str, Argument] = {"step": span.step, "decodes": span.decodes, "prefill tokens": span.prefill_tokens}
    pid = process_of(span.instance)
    return TraceEvent(name, "X", pid, span.begin_us, span.end_us - span.begin_us, STEPS_TRACK, "step", args=args)


def _counters(sample: InstanceSample) -> Iterator[TraceEvent]:
    pid = process_of(sample.instance)
    blocks: dict[str, Argument] = {
        "requests": sample.running_blocks,
        "leased": sample.leased_blocks,
        "cached": sample.evictable_blocks,
        "free": sample.free_blocks,
    }
    yield TraceEvent("KV blocks", "C", pid, sample.at_us, args=blocks)
    yield TraceEvent("requests", "C", pid, sample.at_us, args={"running": sample.running, "waiting": sample.waiting})
    yield TraceEvent("preemptions", "C", pid, sample.at_us, args={"preemptions": sample.preemptions})


def _request(request: SimulatedRequest) -> Iterator[TraceEvent]:
    """Slices of one id nest, so the outer one is opened first and closed last."""
    if request.ended_us is None:
        return
    yield _edge("b", "request", request, request.arrived_us, _told(request))
    for name, begin_us, end_us in _stages(request, request.ended_us):
        yield _edge("b", name, request, begin_us)
        yield _edge("e", name, request, end_us)
    yield _edge("e", "request", request, request.ended_us)


def _stages(request: SimulatedRequest, ended_us: int) -> Iterator[tuple[str, int, int]]:
    first_us = request.first_us
    if first_us is None:
        yield "no token", request.arrived_us, ended_us
        return
    if request.preemptions:
        yield "queue and prefill", request.arrived_us, first_us
        yield "decode, preempted", first_us, ended_us
        return
    computed_us = max(request.arrived_us, first_us - request.transfer_us)
    started_us = max(request.arrived_us, computed_us - request.prefill_us)
    yield "queue", request.arrived_us, started_us
    yield "prefill", started_us, computed_us
    if computed_us < first_us:
        yield "hand-over", computed_us, first_us
    yield "decode", first_us, ended_us


def _edge(ph: str, name: str, request: SimulatedRequest, at_us: int, args: dict[str, Argument] | None = None) -> TraceEvent:
    pid = process_of(request.instance)
    return TraceEvent(name, ph, pid, at_us, tid=STEPS_TRACK, cat="request", id=str(request.index), args=args)


def _told(request: SimulatedRequest) -> dict[str, Argument]:
    return {
        "request": request.index,
        "outcome": request.outcome,
        "input tokens": request.input_tokens,
        "cached tokens": request.cached_tokens,
        "output tokens": request.output_tokens,
        "preemptions": request.preemptions,
        "recomputed tokens": request.recomputed_tokens,
        "queue ms": request.queue_us / 1e3,
        "prefill ms": request.prefill_us / 1e3,
        "transfer ms": request.transfer_us / 1e3,
        "attempts": request.attempts,
        "decode ms": request.decode_us / 1e3,
    }
