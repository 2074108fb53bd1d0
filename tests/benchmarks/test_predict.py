"""Predictions about servers whose truth is known: made-up ones in virtual time, and a small real one."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.bench.calibrate import MeasuredTrial, ModelSizes, Trial, admission_costs_us, calibrate, make_grid
from baton.bench.client import RequestRecord
from baton.bench.load import RunResult
from baton.bench.machine import OtherLoad
from baton.bench.report import write_json
from baton.cli import main
from baton.cli import serve as serve_module
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor
from baton.node.engine_setup import worker_config
from baton.node.settings import EngineSettings
from baton.sim.step_times import StepTimes, load_step_times
from benchmarks import predict as predict_module
from benchmarks import servers as servers_module
from benchmarks.__main__ import app
from benchmarks.compare import SERVING_LOADS
from benchmarks.predict import (
    BadLoad,
    Figures,
    GivenTimes,
    Predict,
    PredictedRun,
    Prediction,
    PredictOptions,
    PredictReport,
    SurveyedTimes,
    command_of,
    config_of,
    report_of,
    settings_of,
    show,
    simulated_figures,
)
from benchmarks.runner import Progress, Spread
from benchmarks.servers import OURS, ServerCommand, ServingLoad

ROOT = Path(__file__).parents[2]
QUIET = Progress(say=lambda _line: None, doing=lambda _what: None, done=lambda: None)
SMALL = (ServingLoad(8, 32, 8), ServingLoad(2, 64, 16))
SIZES = ModelSizes(weight_bytes=2.7e8, token_flop=2.1e8, kv_bytes_per_token=23_040, pair_flop=69_120)
SETTINGS = settings_of("model", SMALL)
CONFIG = config_of(SETTINGS)
ADMISSION_US = 700.0


def trials() -> list[Trial]:
    return make_grid(ScriptedExecutor(ExecutorShape(64, 5000, 16, 4096)), 2048, quick=True)


def walk(slowness: float = 1.0) -> list[MeasuredTrial]:
    """One walk on a machine that is so many times slower than the first."""

    def true_us(trial: Trial) -> float:
        point = trial.point(1.0)
        fed = point.decodes + point.prefill_tokens
        return 12_000 + 600 * max(8, fed) + 250 * point.decodes + 0.5 * point.decode_context + 0.02 * point.prefill_pairs

    return [MeasuredTrial(trial, [slowness * true_us(trial)]) for trial in trials()]


@functools.cache
def times_of(slowness: float = 1.0) -> StepTimes:
    return StepTimes(calibrate(walk(slowness), SIZES, "known", "", 0.0, 0.0).file)


@dataclass
class FakeTurns:
    """A server that is as fast as the simulator says, times how slow it is at that run."""

    slowness: Callable[[int], float] = lambda _run: 1.0
    told: list[tuple[int, int, int, int]] = field(default_factory=list)
    warm_ups: int = len(SMALL)

    def run(self, _serving: object, load: ServingLoad, seed: int) -> RunResult:
        number = len(self.told) - self.warm_ups
        self.told.append((load.requests, load.input_tokens, load.output_tokens, seed))
        figures = simulated_figures(load, CONFIG, times_of(self.slowness(number)), ADMISSION_US)
        end_s = load.requests * load.output_tokens / figures.tokens_per_s
        records = [
            RequestRecord(index, 0, 0.0, 0.0, first_s=figures.ttft_ms / 1000, end_s=end_s, output_tokens=load.output_tokens)
            for index in range(load.requests)
        ]  # fmt: skip
        return RunResult(records)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> FakeTurns:
    fake = FakeTurns()

    @contextlib.contextmanager
    def server(_side: ServerCommand) -> Iterator[None]:
        yield None

    monkeypatch.setattr(predict_module, "server", server)
    monkeypatch.setattr(predict_module, "servers_in_turn", lambda _servers, _progress, _seed: (fake, {}))
    return fake


def options(repetitions: int = 3) -> PredictOptions:
    return PredictOptions(SMALL, repetitions, look_s=0.0, patience_s=0.0)


def predict_with(source: SurveyedTimes | GivenTimes, repetitions: int = 3) -> tuple[list[Prediction], list[str]]:
    return Predict(options(repetitions), command_of(SETTINGS), CONFIG, source, [ADMISSION_US] * 2, QUIET).run()


def test_a_machine_that_does_as_measured_is_predicted(turns: FakeTurns) -> None:
    predictions, failures = predict_with(SurveyedTimes(walk, SIZES, (0.0, 0.0)))
    assert failures == []
    assert [each.load for each in predictions] == [load.name for load in SMALL]
    for each in predictions:
        assert each.holds
        assert each.speed == Spread(*[pytest.approx(1.0, rel=1e-3)] * 3)
        assert each.ttft == Spread(*[pytest.approx(1.0, rel=1e-3)] * 3)
        assert [run.repetition for run in each.runs] == [0, 1, 2]


def test_loads_take_turns_and_share_no_prompt(turns: FakeTurns) -> None:
    predict_with(GivenTimes(times_of()), repetitions=2)
    a, b = (load.requests for load in SMALL)
    assert [requests for requests, *_ in turns.told] == [a, b, a, b, b, a]
    assert [tokens for _, _, tokens, _ in turns.told][:2] == [4, 4]  # the first two warm up
    seeds = [seed for *_, seed in turns.told]
    assert len(set(seeds)) == len(seeds)


def test_drift_of_the_machine_is_in_both_sides_of_a_ratio(turns: FakeTurns) -> None:
    slow = iter([1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0])
    turns.slowness = lambda run: {2: 3.0, 3: 3.0}.get(run, 1.0)
    predictions, _ = predict_with(SurveyedTimes(lambda: walk(next(slow)), SIZES, (0.0, 0.0)))
    for each in predictions:
        assert each.speed.median == pytest.approx(1.0, rel=0.01)
        assert each.holds
        assert max(run.real.ttft_ms for run in each.runs) > 2 * min(run.real.ttft_ms for run in each.runs)


def test_a_run_is_predicted_from_the_walks_beside_it() -> None:
    slow = iter([1.0, 2.0, 4.0])
    source = SurveyedTimes(lambda: walk(next(slow)), SIZES, (100.0, 10.0))
    for _ in range(3):
        source.look()
    for run, slowness in enumerate((1.5, 3.0)):
        wanted_us = times_of(slowness).step_us(16, 16 * 256, 0, 0) + 100 + 16 * 10
        assert source.times(run).step_us(16, 16 * 256, 0, 0) == pytest.approx(wanted_us, rel=1e-3)


@pytest.mark.parametrize(("slowness", "holds"), [(1.1, True), (1.2, False), (0.8, False)])
def test_a_machine_that_does_otherwise_is_not(turns: FakeTurns, slowness: float, holds: bool) -> None:
    turns.slowness = lambda _run: slowness
    predictions, _ = predict_with(GivenTimes(times_of()))
    assert [each.holds for each in predictions] == [holds, holds]
    for each in predictions:
        assert each.speed.median == pytest.approx(slowness, rel=0.03)


@dataclass
class Neighbours:
    """How busy others are at each look, and a clock that goes on by a second with each."""

    busy_cores: Iterator[float]
    now_s: float = 0.0

    def look_around(self, _look_s: float) -> OtherLoad:
        self.now_s += 1.0
        return OtherLoad(0.0, next(self.busy_cores, 0.0), 0.0)

    def clock_s(self) -> float:
        return self.now_s


def looks_beside(neighbours: Neighbours, patience_s: float) -> tuple[list[Prediction], list[float]]:
    """What is predicted on a machine that becomes a tenth slower with every walk, and how slow it was at each."""
    slowness: list[float] = []

    def slower() -> list[MeasuredTrial]:
        slowness.append(1.0 + 0.1 * len(slowness))
        return walk(slowness[-1])

    source = SurveyedTimes(slower, SIZES, (0.0, 0.0))
    asked = replace(options(repetitions=1), patience_s=patience_s)
    side = command_of(SETTINGS)
    work = Predict(asked, side, CONFIG, source, [ADMISSION_US] * 2, QUIET, neighbours.clock_s, neighbours.look_around)
    return work.run()[0], slowness


def test_a_run_waits_for_others_and_is_repeated_if_they_came(turns: FakeTurns) -> None:
    # Busy before the first run, quiet, busy after it; quiet, quiet: again, well; the second load has no trouble.
    neighbours = Neighbours(iter([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]))
    predictions, slowness = looks_beside(neighbours, patience_s=100.0)
    assert [requests for requests, *_ in turns.told[turns.warm_ups :]] == [
        SMALL[0].requests,
        *(load.requests for load in SMALL),
    ]
    assert len(slowness) == 4
    assert [len(each.runs) for each in predictions] == [1, 1]
    # The run that counts is predicted from the walks beside it, not from those beside the one that was repeated.
    wanted = [
        simulated_figures(load, CONFIG, times_of(slow), ADMISSION_US) for load, slow in zip(SMALL, (1.15, 1.25), strict=True)
    ]
    for each, figures in zip(predictions, wanted, strict=True):
        assert each.runs[0].simulated.tokens_per_s == pytest.approx(figures.tokens_per_s, rel=1e-3)


def test_patience_ends(turns: FakeTurns) -> None:
    neighbours = Neighbours(iter([1.0] * 1000))
    predictions, slowness = looks_beside(neighbours, patience_s=20.0)
    assert neighbours.now_s == 20.0
    assert len(slowness) == 3
    assert [len(each.runs) for each in predictions] == [1, 1]


def test_a_server_that_dies_is_told() -> None:
    dead = ServerCommand(OURS, (sys.executable, "-c", "raise SystemExit('no such thing')"))
    predictions, failures = Predict(options(), dead, CONFIG, GivenTimes(times_of()), [0.0, 0.0], QUIET).run()
    assert predictions == []
    assert "no such thing" in failures[0]


def test_admission_delays_the_first_token_of_all_but_the_first() -> None:
    load, times = ServingLoad(16, 64, 4), times_of()
    at_once = simulated_figures(load, CONFIG, times, 0.0)
    one_by_one = simulated_figures(load, CONFIG, times, 200_000.0)
    assert one_by_one.ttft_ms > at_once.ttft_ms + 500
    assert one_by_one.tokens_per_s < at_once.tokens_per_s


def test_a_child_whose_cache_helped_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "IDLE_LOOK_S", 0.05)
    # This server says of every prompt that a half of it was cached.
    side = ServerCommand(OURS, (sys.executable, "-m", "tests.bench.server", "--token-s", "0.001"), {"PYTHONPATH": str(ROOT)})
    work = Predict(options(repetitions=1), side, CONFIG, GivenTimes(load_step_times("cpu")), [ADMISSION_US] * 2, QUIET)
    assert work.measurements == 2
    predictions, failures = work.run()
    assert predictions == []
    assert failures == [f"{SMALL[0].name}: 128 tokens came from the prefix cache"]


def test_the_server_gets_the_settings_that_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineSettings] = []
    monkeypatch.setattr(serve_module, "_run", lambda **settings: asked.append(settings["engine"]))
    side = command_of(settings_of("model", SERVING_LOADS))
    elsewhere = {"BATON_MAX_NUM_SEQS": "3", "BATON_KV_BLOCKS": "9", "BATON_RESERVE": "none", "BATON_MAX_WAITING": "5"}
    ran = CliRunner().invoke(main.app, side.launch[side.launch.index("serve") :], env=elsewhere)
    assert ran.exit_code == 0, ran.output
    (engine,) = asked
    shape = ExecutorShape(engine.slots, engine.blocks or 0, engine.block_size, engine.context_tokens or 0)
    assert worker_config(engine, shape) == config_of(settings_of("model", SERVING_LOADS))


def test_loads_without_room_are_refused() -> None:
    with pytest.raises(BadLoad, match="at most 4,096 tokens"):
        settings_of("model", [ServingLoad(1, 4000, 97)])
    with pytest.raises(BadLoad, match="can wait"):
        settings_of("model", [ServingLoad(2000, 1, 1)])


def test_admission_costs_something() -> None:
    few, many = admission_costs_us([(4, 16), (16, 64)])
    assert min(few, many) > 0.0


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def made_report(ratio: float, failures: tuple[str, ...] = ()) -> PredictReport:
    run = PredictedRun(0, Figures(100.0, 50.0), Figures(100.0 * ratio, 50.0), OtherLoad(0.0, 0.5, 0.0))
    spread = Spread(ratio, ratio, ratio)
    each = Prediction("64 at once", 700.0, [run], spread, Spread(1.0, 1.0, 1.0), abs(ratio - 1) <= 0.15)
    return report_of("smol", command_of(SETTINGS), "step times of a test", ([each], list(failures)))


def test_the_table_shows_both_sides_and_whether_it_holds() -> None:
    console = Console(width=180, record=True, file=io.StringIO())
    show(console, made_report(1.3, ("the server died",)))
    text = console.export_text()
    for word in ("64 at once", "100", "130", "1.30", "NO", "15%", "25%", "others kept", "the server died"):
        assert word in text


@pytest.mark.parametrize(("report", "code"), [(made_report(1.1), 0), (made_report(1.3), 1), (made_report(1.0, ("x",)), 1)])
def test_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: PredictReport, code: int
) -> None:
    monkeypatch.setattr(predict_module, "model_folder", lambda _model, _progress: tmp_path)
    monkeypatch.setattr(predict_module, "predicted", lambda *_: report)
    out = tmp_path / "new" / "predict.json"
    ran = CliRunner().invoke(app, ["predict", "--step-times", "cpu", "--json", str(out)])
    assert ran.exit_code == code, ran.output
    assert json.loads(out.read_text())["predictions"][0]["load"] == "64 at once"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--load", "64x128"], "64x128x64"), (["--load", "0x1x1"], "64x128x64"), (["--step-times", "none"], "no step times"),
     (["--load", "1x4000x100"], "at most 4,096")],
)  # fmt: skip
def test_wrong_options_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], word: str) -> None:
    monkeypatch.setattr(predict_module, "model_folder", lambda _model, _progress: tmp_path)
    ran = CliRunner().invoke(app, ["predict", *arguments])
    assert ran.exit_code == 2
    assert word in ran.output


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    write_json(tmp_path / "r.json", made_report(1.0))
    assert json.loads((tmp_path / "r.json").read_text())["speed_off_max"] == 0.15
