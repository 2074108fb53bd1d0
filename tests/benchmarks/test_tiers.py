from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.bench.machine import OtherLoad
from benchmarks import servers as servers_module
from benchmarks import tier_sides as sides_module
from benchmarks import tiers as tiers_module
from benchmarks.__main__ import app
from benchmarks.runner import Measured, Progress
from benchmarks.slow_link import slow_link
from benchmarks.store_servers import valkey_why_not
from benchmarks.tier_sides import COUNTERS, StoreKind, TierSide, gained, store_args
from benchmarks.tiers import LOADS, Load, TierBench, TierOptions, TierReport, TierRow, TierTable, show

QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)
TINY = ["--pairs", "1", "--requests", "12", "--input-tokens", "64", "--output-tokens", "64", "--our-args", "--step-ms 1"]


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "IDLE_LOOK_S", 0.05)
    monkeypatch.setattr(tiers_module, "versions_of", lambda _peer, _failures: {"Baton": "0"})


def test_every_load_has_half_the_pool_that_it_fills_and_starts_with_nothing_behind_it() -> None:
    for shape in LOADS.values():
        each = -(-(shape.load.input_tokens + shape.load.output_tokens) // shape.block_size)
        assert shape.pool_blocks == each * shape.load.requests // 2
        assert shape.sides[0].store is None
        assert "--host-memory" not in shape.sides[0].args


@pytest.mark.slow
def test_kv_that_was_kept_is_not_computed_again(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    command = ["tiers", "scripted", "--load", "short", *TINY, "--folder", str(tmp_path), "--json", str(out)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    (table,) = json.loads(out.read_text())["tables"]
    rows = {row["side"]: row for row in table["rows"]}
    assert list(rows) == [side.name for side in LOADS[Load.SHORT].sides]
    counts = {side: row["counts"][0] for side, row in rows.items()}
    assert counts["recompute"]["preemptions"] > 0
    assert counts["recompute"]["recomputed tokens"] > 0
    assert counts["recompute"]["loaded"] == 0
    for side in ("host", "host + file"):
        assert counts[side]["loaded"] > 0
        # Of so short requests the last, half full blocks are much.
        assert counts[side]["recomputed tokens"] * 2 < counts["recompute"]["recomputed tokens"]
    assert counts["host + file"]["stored"] > 0
    assert rows["host"]["ratio"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["o.json"]  # the stores are gone


@pytest.mark.slow
@pytest.mark.skipif(valkey_why_not() is not None, reason=str(valkey_why_not()))
def test_a_store_behind_a_slow_link_is_used_like_any_other(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    ran = CliRunner().invoke(app, ["tiers", "scripted", "--load", "slow-store", *TINY, "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    (table,) = json.loads(out.read_text())["tables"]
    assert "link of 12 MB/s" in table["told"]
    always = table["rows"][1]
    assert always["counts"][0]["stored"] > 0


def test_a_side_that_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "why_not", lambda side: "no server here" if side.store is not None else None)
    asked = TierOptions(None, (Load.SLOW_STORE,), 1, requests=4, input_tokens=64, output_tokens=64, look_s=0.01)
    work = TierBench(asked, QUIET)
    assert work.measurements == 1
    report = work.run()
    assert report.failures == []
    console = Console(record=True, width=220)
    show(console, report)
    assert console.export_text().count("no server here") == 2


def test_an_instance_that_does_not_start_is_a_failure_and_not_a_crash() -> None:
    asked = TierOptions(None, (Load.SHORT,), 1, args=("--no-such-option",), look_s=0.01)
    (failure,) = TierBench(asked, QUIET).run().failures
    assert "--no-such-option" in failure


def test_sides_are_held_against_the_first_in_the_same_pair() -> None:
    def speeds(*values: float) -> list[Measured]:
        return [Measured(pair, value, OtherLoad(0, 0, 0)) for pair, value in enumerate(values)]

    none = dict.fromkeys(COUNTERS, 0)
    slow = TierRow("recompute", speed=speeds(100, 50), counts=[none | {"recomputed tokens": 900}] * 2)
    quick = TierRow("host", speed=speeds(150, 60), counts=[none | {"recomputed tokens": 30, "loaded": 4}] * 2)
    table = TierTable(Load.SHORT, "a load", 32, 10, [slow, quick])
    assert table.fewer(quick) == 30
    report = TierReport(versions={}, model="m", tables=[table])
    console = Console(record=True, width=220)
    show(console, report)
    text = console.export_text()
    assert "30.0×" in text
    assert "128" in text  # restored tokens


def test_only_what_a_run_added_is_counted() -> None:
    before = dict.fromkeys(COUNTERS, 5)
    assert gained(before, before | {"loaded": 9})["loaded"] == 4
    assert set(gained(before, before).values()) == {0}


@pytest.mark.skipif(valkey_why_not() is not None, reason=str(valkey_why_not()))
def test_a_slow_store_is_reached_through_its_link_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, float]] = []

    def noted(port: int, bytes_per_s: float):  # type: ignore[no-untyped-def]
        asked.append((port, bytes_per_s))
        return slow_link(port, bytes_per_s)

    monkeypatch.setattr(sides_module, "slow_link", noted)
    with store_args(TierSide("s", store=StoreKind.SLOW_VALKEY), tmp_path, "64M", 1e6) as args:
        assert args[0] == "--kv-store"
        assert f":{asked[0][0]}/" not in args[1]
    assert asked[0][1] == 1e6
