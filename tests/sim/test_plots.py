from __future__ import annotations

import struct
from pathlib import Path

import pytest

from baton.sim.plots import RUNS_MAX, draw
from baton.sim.report import LatencyTargets
from baton.sim.run_records import RunRecord
from tests.sim.made_records import busy_hour, record, request_record

pytest.importorskip("matplotlib")
TARGETS = LatencyTargets(10.0, 100.0)


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_one_run_and_several_are_drawn_at_full_size(tmp_path: Path) -> None:
    hours = [
        busy_hour(label, slow=slow, instances=4, count=3_000)
        for label, slow in (("none/newest", 1.0), ("none/cheapest", 2.0))
    ]
    draw(hours[:1], TARGETS, "one", tmp_path / "deep" / "one.png")
    draw(hours, TARGETS, "two", tmp_path / "two.png")
    assert size(tmp_path / "deep" / "one.png") == size(tmp_path / "two.png") == (1400, 1000)


def test_what_was_not_seen_is_said_and_not_drawn(tmp_path: Path) -> None:
    """Warnings are errors here: empty axes, one moment, one request."""
    for place, made in enumerate(
        (RunRecord("empty", 0, 1, 100, 16), record(request_record(0, 0, 0, 0)), busy_hour(instances=80, count=500))
    ):
        draw([made], TARGETS, made.label, tmp_path / f"{place}.png")
        assert size(tmp_path / f"{place}.png") == (1400, 1000)


@pytest.mark.parametrize("count", [0, RUNS_MAX + 1])
def test_a_picture_has_a_bounded_number_of_runs(count: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 to"):
        draw([record()] * count, TARGETS, "no", tmp_path / "no.png")
    assert not (tmp_path / "no.png").exists()
