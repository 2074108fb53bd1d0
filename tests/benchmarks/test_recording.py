"""The recording benchmark on a small engine: that it measures, not how fast anything is."""

from __future__ import annotations

from benchmarks.recording import time_recording


def test_calls_and_snapshots_are_timed_and_put_in_proportion() -> None:
    timing = time_recording(rows=4, windows=1)
    assert timing.plain_us > 0
    assert timing.snapshot_us > 0
    assert timing.snapshot_bytes > 1000
    assert timing.steps_a_snapshot > 10_000
    assert timing.share(10_000) < 0.02
