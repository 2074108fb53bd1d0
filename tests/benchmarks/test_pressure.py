from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from baton.bench.report import write_json
from benchmarks import pressure as pressure_module
from benchmarks import servers as servers_module
from benchmarks.pressure import PooledServer, Pressure, PressureOptions, pooled_servers, show
from benchmarks.runner import MeasurementFailed, Progress
from benchmarks.servers import NO_PEER, OURS, PEER, ServerCommand, ServingLoad, counter_total

ROOT = Path(__file__).parents[2]
QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "IDLE_LOOK_S", 0.05)
    monkeypatch.setattr(pressure_module, "versions_of", lambda _peer, _failures: {"Baton": "0"})


def options(folder: Path, **more: object) -> PressureOptions:
    made = PressureOptions(folder, peer=None, pairs=1, load=ServingLoad(4, 8, 6), look_s=0.01)
    return replace(made, **more)  # type: ignore[arg-type]


def fake(name: str, pool_blocks: int, *more: str) -> PooledServer:
    launch = (sys.executable, "-m", "tests.bench.server", *more)
    return PooledServer(name, pool_blocks, ServerCommand(f"{name}, {pool_blocks} blocks", launch, {"PYTHONPATH": str(ROOT)}))


def test_the_pools_are_what_the_load_fills_half_and_a_quarter(tmp_path: Path) -> None:
    assert PressureOptions(tmp_path, None).pools == (640, 320, 160)
    assert PressureOptions(tmp_path, None).shape.max_model_len == 4096
    small = PressureOptions(tmp_path, None, load=ServingLoad(8, 64, 48))
    assert small.pools == (32, 16, 8)
    assert small.shape.max_model_len == 256  # no longer than the smallest pool


def test_both_sides_get_the_same_pool(tmp_path: Path) -> None:
    ours, peer = pooled_servers(PressureOptions(tmp_path, "run-in peer"))[2:4]
    assert (ours.name, peer.name, ours.pool_blocks, peer.pool_blocks) == (OURS, PEER, 320, 320)
    assert ours.side.launch[-2:] == ("--kv-blocks", "320")
    assert peer.side.launch[-2:] == ("--num-gpu-blocks-override", "321")  # it keeps one for itself


def test_each_pool_is_measured_on_both_sides_in_turns(tmp_path: Path) -> None:
    printed: list[str] = []
    asked = options(tmp_path, peer="", pairs=2)
    pools = asked.pools
    ours = ("--token-s", "0.002", "--preemptions-name", "baton_num_preemptions_total")
    peers = ("--token-s", "0.05", "--preemptions-name", "vllm:num_preemptions_total")
    pooled = [fake(OURS, pools[0], *ours), fake(PEER, pools[0], *peers), fake(OURS, pools[1], "--token-s", "0.05")]
    work = Pressure(asked, pooled, Progress(printed.append, lambda _what: None, lambda: None))
    report = work.run()
    assert report.failures == []
    whole, half, quarter = report.points
    assert whole.ours_preemptions == whole.peer_preemptions == [4, 4]  # one for each request of a run
    assert half.ours_preemptions == [None, None]  # that server does not tell
    assert whole.ratio is not None
    assert whole.ratio.min > 1.5
    assert half.ours_of_own is not None
    assert half.ours_of_own.max < 0.7
    assert (half.peer_of_own, quarter.ratio) == (None, None)
    runs = [line.split(":")[0] + line.split(",")[1].split(":")[0] for line in printed if "round" in line]
    room, less = f"{pools[0]} blocks", f"{pools[1]} blocks"
    assert runs == [
        f"{room} {OURS}",
        f"{room} {PEER}",
        f"{less} {OURS}",
        f"{less} {OURS}",
        f"{room} {PEER}",
        f"{room} {OURS}",
    ]
    write_json(tmp_path / "out.json", report)
    assert json.loads((tmp_path / "out.json").read_text())["points"][0]["ratio"]["median"] > 1.5


def test_an_absent_peer_is_said(tmp_path: Path) -> None:
    asked = options(tmp_path)
    report = Pressure(asked, [fake(OURS, asked.pools[0])], QUIET).run()
    console = Console(record=True, width=200)
    show(console, report)
    assert NO_PEER in console.export_text()


def test_a_server_that_dies_is_a_failure_and_not_a_crash(tmp_path: Path) -> None:
    asked = options(tmp_path)
    dead = PooledServer(
        OURS, asked.pools[0], ServerCommand(OURS, (sys.executable, "-c", "import sys; sys.exit('no memory')"))
    )
    (failure,) = Pressure(asked, [dead], QUIET).run().failures
    assert "no memory" in failure


def test_a_counter_is_summed_over_its_labels() -> None:
    page = '# TYPE a:b counter\na:b_total{x="1"} 3.0\na:b_total{x="2"} 4.0\na:b_created{x="1"} 99.0\n'
    assert counter_total(page, "a:b_total") == 7
    assert counter_total(page, "other_total") is None
    with pytest.raises(MeasurementFailed):
        counter_total("a{ 3", "a")
