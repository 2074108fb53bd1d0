"""Reports: nothing is lost on the way through JSON, and eyes see what was missed and what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.gpu_floor import GpuRates
from baton.bench.gpu_report import (
    BadGpuReport,
    GpuReport,
    GpuRow,
    PartResult,
    StepPoint,
    markdown_of,
    merged,
    middle,
    read_report,
    table_of,
    write_report,
)

MACHINE = {"gpu": "NVIDIA H200", "memory": "140 GiB", "torch": "2.11", "triton": "3.6", "python": "3.12"}
DECODE = PartResult(
    "decode",
    GpuRates(4.34e12, 790e12),
    [
        GpuRow("batch 1", 4.1, "ms", "floor 3.52 ms", 1.165, at_most=1.25),
        GpuRow("batch 256", 17.0, "ms", "floor 13.8 ms", 1.23, at_most=1.15),
    ],
    [StepPoint("qwen3-8b", 4100.0, decodes=1, context_tokens=1024)],
    ["a note", "a table\nof lines"],
    12.5,
)
FAILED = PartResult("moe", error="Traceback\nRuntimeError: out of memory")
REPORT = GpuReport("2026-11-16T01:00:00+00:00", MACHINE, [DECODE, FAILED])


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    write_report(tmp_path / "deep" / "gpu.json", REPORT)
    assert read_report(tmp_path / "deep" / "gpu.json") == REPORT


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 9}', '{"schema": 1, "made": "x", "machine": {}, "parts": [{}]}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BadGpuReport, match=r"other\.json"):
        read_report(path)


def test_the_table_says_what_was_met_missed_and_failed() -> None:
    table = table_of(REPORT)
    assert "4.10 ms" in table
    assert [line.split()[-1] for line in table.splitlines()[2:5]] == ["met", "MISSED", "FAILED"]
    assert "RuntimeError: out of memory" in table
    assert table.splitlines()[-1] == "missed: decode: batch 256; failed: moe"


def test_the_page_names_date_machine_and_versions() -> None:
    page = markdown_of(REPORT)
    for words in ("2026-11-16", "NVIDIA H200, 140 GiB", "torch 2.11, triton 3.6", "4.34 TB/s", "790 TFLOP/s"):
        assert words in page
    assert "| batch 256 | 17.00 ms | floor 13.8 ms | 1.230 | ≤ 1.15 (missed) |" in page
    assert "```\na table\nof lines\n```" in page
    assert "Not measured: RuntimeError: out of memory" in page


def test_what_was_done_again_replaces_what_was_done_before() -> None:
    again = GpuReport("2026-11-17", MACHINE, [PartResult("moe"), PartResult("peer")])
    assert [(part.part, part.error) for part in merged(REPORT, again).parts] == [("decode", ""), ("moe", ""), ("peer", "")]


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (GpuRow("a", 1.0, "ms"), None),
        (GpuRow("a", 1.0, "ms", ratio=2.0), None),
        (GpuRow("a", 1.0, "ms", ratio=2.0, at_most=2.0), True),
        (GpuRow("a", 1.0, "ms", ratio=2.0, at_most=1.9), False),
        (GpuRow("a", 1.0, "ms", ratio=0.6, at_least=0.6), True),
        (GpuRow("a", 1.0, "ms", ratio=0.5, at_least=0.6), False),
    ],
)
def test_a_target_is_met_at_its_bound(row: GpuRow, met: bool | None) -> None:
    assert row.met is met


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_as_many_lie_below_the_middle_as_above(values: list[float]) -> None:
    found = middle(values)
    assert abs(sum(value < found for value in values) - sum(value > found for value in values)) <= values.count(found)
    assert json.loads(json.dumps(found)) == found
