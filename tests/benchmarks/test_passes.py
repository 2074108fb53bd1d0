from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.bench.machine import OtherLoad
from benchmarks import passes as passes_module
from benchmarks.__main__ import app
from benchmarks.passes import PassKind, PassOptions, PassReport, PassRun, PassTimes, missed, show, time_passes
from benchmarks.runner import MeasurementFailed

SMALL = PassOptions(
    rounds=1, steps=150, warm_up=20, rows=16, clients=32, prompt_tokens=64, answer_tokens=64, prompts=24, pool_blocks=80,
    host_rows=40, block_bytes=256, step_ms=1.0, look_s=0.01,
)  # fmt: skip


def run(kind: PassKind, plan: PassTimes) -> PassRun:
    quiet = OtherLoad(0.0, 0.0, 0.0)
    return PassRun(kind, 0, plan, PassTimes(1, 1), PassTimes(1, 1), 100, 1.0, 1, 1, 1, 1, 1, 0, 0, quiet)


def test_requests_yield_and_their_kv_goes_to_the_store_and_comes_back(tmp_path: Path) -> None:
    found = time_passes(replace(SMALL, folder=tmp_path), PassKind.FILE, 0)
    assert min(found.preemptions, found.saved, found.loaded, found.stored, found.fetched) > 0
    assert found.plan.p50 <= found.plan.p99
    assert found.in_all.p50 >= found.plan.p50
    assert list(tmp_path.iterdir()) == []  # the store is gone


def test_without_a_store_nothing_is_stored() -> None:
    found = time_passes(SMALL, PassKind.NONE, 0)
    assert found.saved > 0
    assert (found.stored, found.fetched, found.late, found.breaker_opened) == (0, 0, 0, 0)


def test_a_store_that_never_answers_is_given_up_and_steps_go_on() -> None:
    found = time_passes(SMALL, PassKind.SILENT, 0)
    assert (found.steps, found.stored, found.fetched) == (SMALL.steps, 0, 0)
    assert found.late > 0
    assert found.breaker_opened > 0


def test_steps_that_never_come_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_module, "RUN_LIMIT_S", 0.0)
    with pytest.raises(MeasurementFailed, match="were not planned"):
        time_passes(SMALL, PassKind.NONE, 0)


def test_ratios_are_taken_within_a_round_and_held_against_the_limits() -> None:
    runs = [
        run(PassKind.NONE, PassTimes(100, 200)),
        run(PassKind.FILE, PassTimes(109, 320)),
        run(PassKind.SLOW, PassTimes(120, 290)),
        run(PassKind.SILENT, PassTimes(90, 290)),
    ]
    report = PassReport(settings={}, runs=runs)
    assert report.ratios(PassKind.FILE, "plan", "p50").median == pytest.approx(1.09)
    first, second = missed(report)
    assert first.startswith("file: plan p99 is 1.60")
    assert second.startswith("file, 100× slower: plan p50 is 1.20")


@pytest.mark.slow
def test_the_command_shows_every_kind_and_writes_what_it_measured(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    ran = CliRunner().invoke(app, ["passes", "--rounds", "1", "--steps", "100", "--rows", "8", "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    report = json.loads(out.read_text())
    assert [each["kind"] for each in report["runs"]] == list(PassKind)
    assert report["settings"]["rows"] == 8
    for kind in PassKind:
        assert kind.split(",")[0] in ran.output


def test_a_table_has_three_parts_for_each_kind() -> None:
    ones = ("rows", "clients", "prompt_tokens", "answer_tokens", "pool_blocks", "host_rows", "step_ms")
    settings: dict[str, str | int | float] = dict.fromkeys(ones, 1)
    settings |= {"block_bytes": 65536, "rounds": 1, "steps": 100}
    report = PassReport(settings=settings, runs=[run(kind, PassTimes(1, 1)) for kind in PassKind])
    console = Console(record=True, width=200)
    show(console, report)
    text = console.export_text()
    assert text.count("settle") == len(PassKind)
    assert "64 KiB" in text
