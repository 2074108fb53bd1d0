"""The overlap benchmark on a tiny model: what it counts, not how fast anything is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.overlap import run
from benchmarks.runner import Progress
from tests.support.tiny import family_config, save_random


def test_nothing_leaves_early_only_where_it_was_held_back(tmp_path: Path) -> None:
    save_random(family_config("llama"), tmp_path)
    told: list[str] = []
    progress = Progress(say=told.append, doing=told.append, done=lambda: None)
    report = run(tmp_path, "float32", ["shm", "tcp"], prompt_tokens=200, step_tokens=64, rounds=1, progress=progress)
    assert report.kv_bytes == 13 * 16 * 3 * 2 * 2 * 32 * 4  # blocks, tokens, layers, K and V, heads, their size, float32
    assert {(item.mode.kind, item.mode.after_prefill, item.mode.throttled) for item in report.modes} == {
        (kind, after, throttled) for kind in ("shm", "tcp") for after in (False, True) for throttled in (False, True)
    }
    for item in report.modes:
        for one in item.runs:
            assert one.left_share == 0 if item.mode.after_prefill else 0 <= one.left_share <= 1
            assert one.ttft_s >= one.prefill_s > 0
            assert (one.bytes_per_s is not None) == item.mode.throttled
    assert len(told) == 10
