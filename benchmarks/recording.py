"""What the flight recorder costs: the scheduler's time per step with and without it, in turns, in one process."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console

from baton.bench.scheduler import InstantEngine, loaded_engine
from baton.core.engine.worker import Worker
from baton.wire.captured_state import CapturedState, capture
from baton.wire.flight_recorder import CALL_BYTES, SEGMENT_BYTES, SNAPSHOTS, FlightRecorder
from baton.wire.watched_worker import ROW_BYTES, weight_of
from benchmarks.options import JsonIfGiven
from benchmarks.runner import Columns, Experiment, Progress, run_benchmark, table_of

Rows = Annotated[list[int], typer.Option(min=1, max=100_000, help="Decoding requests; repeat for several sizes.")]
Windows = Annotated[int, typer.Option(min=1, max=1000, help="Pairs of windows to time.")]

WINDOW_STEPS = 50
WARM_UP_STEPS = 60
CALLS_A_STEP = 2
STEP_US = 10_000
"""A decode step of an 8B model on a GPU takes about as long; more rows take longer."""


class RecordingTiming(msgspec.Struct, frozen=True):
    rows: int
    plain_us: float
    """CPU time of a step of the scheduler alone, without a model."""
    calls_us: float
    """What recording the calls of a step adds."""
    snapshot_us: float
    snapshot_bytes: int
    steps_a_snapshot: float

    @property
    def added_us(self) -> float:
        return self.calls_us + self.snapshot_us / self.steps_a_snapshot

    def share(self, step_us: float) -> float:
        """Of the time of a step with a model."""
        return self.added_us / (step_us + self.plain_us)


class RecordingReport(msgspec.Struct, frozen=True):
    timings: list[RecordingTiming]


def recording(rows: Rows = [16, 256, 1024], windows: Windows = 20, json: JsonIfGiven = None) -> None:  # noqa: B006
    """Time the scheduler's steps with and without the flight recorder.

    There is no model: what the recorder adds is compared with the smallest step there can be. Windows with and without it
    take turns in one process, so that a busy machine hits both.
    """
    run_benchmark(partial(_sizes, rows, windows), show, json)


def _sizes(sizes: list[int], windows: int, progress: Progress) -> Experiment[RecordingReport]:
    def run() -> RecordingReport:
        timings = []
        for size in sizes:
            progress.doing(f"{size:,} rows")
            timings.append(time_recording(size, windows))
            progress.done()
        return RecordingReport(timings)

    return Experiment(len(sizes), run)


def time_recording(rows: int, windows: int) -> RecordingTiming:
    engine = loaded_engine(rows, blocks=20_000, block_size=16)
    worker, results = engine.worker, list[bytes]()
    recorder = FlightRecorder(worker, worker.hashes, weight_of, segment_bytes=1 << 60)
    _window_us(engine, WARM_UP_STEPS)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * windows):
        is_recorded = bool(number % 2)
        engine.watch(recorder if is_recorded else None)
        worker.hashes.results = results if is_recorded else None
        spent[is_recorded].append(_window_us(engine, WINDOW_STEPS))
    plain, recorded = np.array(spent[False]), np.array(spent[True])
    state = capture(worker)
    snapshot_us, data = min(_capture_us(worker, state) for _ in range(5))
    segment_bytes = max(SEGMENT_BYTES, SNAPSHOTS * data)
    steps = segment_bytes / (CALLS_A_STEP * CALL_BYTES + rows * ROW_BYTES)
    calls_us = float(np.median(recorded - plain))
    return RecordingTiming(rows, float(np.median(plain)), calls_us, snapshot_us, data, steps)


def _capture_us(worker: Worker, previous: CapturedState) -> tuple[float, int]:
    """Of what an engine's loop waits for; the copy is encoded when a file is written, by another thread."""
    began_ns = time.process_time_ns()
    state = capture(worker, previous)
    return (time.process_time_ns() - began_ns) / 1000, state.estimated_bytes


def _window_us(engine: InstantEngine, steps: int) -> float:
    """CPU microseconds a step."""
    gc.collect()
    began_ns = time.process_time_ns()
    for _ in range(steps):
        engine.step()
    return (time.process_time_ns() - began_ns) / 1000 / steps


COLUMNS: Columns[RecordingTiming] = (
    ("rows", lambda timing: f"{timing.rows:,}"),
    ("µs a step", lambda timing: f"{timing.plain_us:,.0f}"),
    ("calls add", lambda timing: f"{timing.calls_us:+.1f}"),
    ("a copy of the state", lambda timing: f"{timing.snapshot_us / 1000:.1f} ms, {timing.snapshot_bytes / 1e6:.1f} MB"),
    ("every", lambda timing: f"{timing.steps_a_snapshot:,.0f} steps"),
    ("added in all", lambda timing: f"{timing.added_us:.1f} µs"),
    ("of a step of 10 ms", lambda timing: f"{timing.share(STEP_US):.2%}"),
)


def show(console: Console, report: RecordingReport) -> None:
    console.print(table_of("flight recorder, CPU time of the scheduler alone", COLUMNS, report.timings))
