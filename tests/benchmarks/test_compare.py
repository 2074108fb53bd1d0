from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.machine import OtherLoad
from baton.bench.report import write_json
from benchmarks import compare as compare_module
from benchmarks import servers as servers_module
from benchmarks.compare import Compare, CompareOptions, ComparisonRow, Section, sides_of
from benchmarks.runner import Measured, Progress
from benchmarks.servers import NO_PEER, OURS, PEER, ServerCommand, ServingLoad

ROOT = Path(__file__).parents[2]
QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)
IDLE = OtherLoad(0.0, 0.0, 0.0)


def side(name: str, *more: str) -> ServerCommand:
    return ServerCommand(name, (sys.executable, "-m", "tests.bench.server", *more), {"PYTHONPATH": str(ROOT)})


def options(folder: Path, **more: object) -> CompareOptions:
    made = CompareOptions(model=folder, peer=None, peer_script=None, traces=None, pairs=2, look_s=0.01)
    return replace(made, **more)  # type: ignore[arg-type]


@pytest.fixture
def small_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "SERVING_LOADS", (ServingLoad(4, 8, 6),))
    monkeypatch.setattr(servers_module, "IDLE_LOOK_S", 0.1)


@pytest.mark.usefixtures("small_loads")
def test_both_sides_are_measured_in_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "versions_of", lambda _peer, _failures: {"Baton": "0"})
    (tmp_path / "conv.csv").write_text("num_prefill_tokens,num_decode_tokens\n5,4\n6,3\n")
    asked = options(tmp_path, peer="", traces=tmp_path, sections=(Section.SERVING, Section.PREFIX, Section.TRACE))
    printed: list[str] = []
    sides = [side(OURS, "--token-s", "0.001"), side(PEER, "--token-s", "0.02")]
    taken: list[None] = []
    work = Compare(asked, sides, Progress(printed.append, lambda _what: None, lambda: taken.append(None)))
    found = work.run()
    assert len(taken) == work.measurements == 12
    assert found.failures == []
    serving, prefix, trace = found.rows
    assert [measured.pair for measured in serving.ours] == [measured.pair for measured in serving.peer] == [0, 1]
    speed_up = serving.ratio
    assert speed_up is not None
    assert speed_up.min > 1.5
    assert len(prefix.ours) == len(trace.peer) == 2
    assert set(found.idle_busy_cores) == {OURS, PEER}
    runs = [line.split(":")[1] for line in printed if line.startswith(serving.name)]
    assert [run.split(", ")[1] for run in runs] == [OURS, PEER, PEER, OURS]  # who goes first changes
    assert all("steal" in line for line in printed if line.startswith(serving.name))
    write_json(tmp_path / "out.json", found)
    assert json.loads((tmp_path / "out.json").read_text())["ratios"]


def test_start_up_is_timed_from_the_start_of_the_process(tmp_path: Path) -> None:
    found = Compare(options(tmp_path, pairs=1, sections=(Section.STARTUP,)), [side(OURS)], QUIET).run()
    (row,) = found.rows
    assert 0.1 < row.ours[0].value < 20.0
    assert row.peer_absent == NO_PEER


def test_a_server_that_dies_shows_its_last_words(tmp_path: Path) -> None:
    dead = ServerCommand(OURS, (sys.executable, "-c", "import sys; sys.exit('no such weights')"))
    found = Compare(options(tmp_path, sections=(Section.STARTUP,)), [dead], QUIET).run()
    (failure,) = found.failures
    assert "ended with code 1" in failure
    assert "no such weights" in failure


@pytest.mark.usefixtures("small_loads")
def test_absent_traces_are_said(tmp_path: Path) -> None:
    found = Compare(options(tmp_path, sections=(Section.TRACE,)), [side(OURS)], QUIET).run()
    assert found.failures == []
    assert "BATON_TRACES" in found.notes[0]


def test_the_scheduler_of_both_sides_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_our_scheduler_us", lambda: 50.0)
    monkeypatch.setattr(compare_module, "versions_of", lambda _peer, _failures: {})
    script = tmp_path / "peer.py"
    script.write_text("import sys; print('vllm slots=%s us_per_step=%d' % (sys.argv[2], 10 * int(sys.argv[3])))")
    asked = options(tmp_path, peer="env", peer_script=script, pairs=1, sections=(Section.SCHEDULER,))
    (row,) = Compare(asked, [], QUIET).run().rows
    assert (row.ours[0].value, row.peer[0].value) == (50.0, 2000.0)


def test_the_ratio_is_made_pair_by_pair() -> None:
    row = ComparisonRow("s", "n", "u", "higher")
    row.ours = [Measured(0, 2.0, IDLE), Measured(1, 30.0, IDLE), Measured(2, 9.0, IDLE)]
    row.peer = [Measured(1, 10.0, IDLE), Measured(0, 1.0, IDLE)]
    spread = row.ratio
    assert spread is not None
    assert (spread.min, spread.median, spread.max) == (2.0, 2.5, 3.0)
    assert ComparisonRow("s", "n", "u", "higher").ratio is None


def test_both_servers_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    ours, peer = sides_of(options(tmp_path, peer="run-in peer"))
    shared = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", "--block-size", "32", "--port", "99"]
    assert ours.command(99)[-10:] == peer.command(99)[-10:] == shared
    assert peer.command(99)[:3] == ["run-in", "peer", "python"]
    assert peer.env["VLLM_CPU_KVCACHE_SPACE"] == "2"  # what the caller says is kept
    assert peer.env["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
