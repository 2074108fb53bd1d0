"""Calibration against an executor whose step times are known, on a clock that only it moves."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench.calibrate import (
    CalibrationStepper,
    CannotCalibrate,
    MeasuredTrial,
    ModelSizes,
    Trial,
    calibrate,
    delivery_cost_us,
    fit_roofline,
    make_grid,
    measure,
    model_sizes,
)
from baton.cli.main import app
from baton.core.engine.plan import StepPlan, StepResult
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import ScriptedExecutor
from baton.node.scripted_text import write_byte_tokenizer
from baton.sim.step_times import load_step_times
from tests.support.tiny import family_config, save_random

SHAPE = ExecutorShape(slots=64, blocks=5000, block_size=16, context_tokens=4096)
SIZES = ModelSizes(weight_bytes=2.7e8, token_flop=2.1e8, kv_bytes_per_token=23_040, pair_flop=69_120)


def true_us(decodes: int, context: int, fed: int, pairs: int) -> float:
    """The machine that is pretended: its knee is at 8 tokens."""
    return 12_000 + 600 * max(8, decodes + fed) + 250 * decodes + 0.5 * context + 0.02 * pairs


class PacedScript:
    """The scripted executor on a clock of its own; remembers each step's arguments and lengths of tables."""

    def __init__(self, shape: ExecutorShape = SHAPE, slowness: Callable[[int], float] = lambda _step: 1.0) -> None:
        self._inner = ScriptedExecutor(shape)
        self.shape, self.vocabulary, self.fingerprint = shape, self._inner.vocabulary, self._inner.fingerprint
        self.now_us = 0.0
        self.steps: list[tuple[int, int, int, int]] = []
        self.in_flight_max = 0
        self.closed = False
        self._plans: deque[StepPlan] = deque()
        self._known: dict[int, int] = {}
        self._slowness = slowness

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)
        self._plans.append(plan)
        self.in_flight_max = max(self.in_flight_max, len(self._plans))

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        self._known.update((start.slot, len(start.tokens)) for start in plan.starts)
        slots = plan.decode_slots.tolist()
        pairs = sum(sum(range(chunk.begin + 1, chunk.end + 1)) for chunk in plan.chunks)
        step = (len(slots), sum(self._known[slot] for slot in slots), plan.tokens - len(slots), pairs)
        self._known.update({slot: self._known[slot] + 1 for slot in slots})
        if plan.tokens:
            self.now_us += true_us(*step) * self._slowness(len(self.steps))
        self.steps.append(step)
        return self._inner.collect()

    def close(self) -> None:
        self.closed = True

    def clock_us(self) -> float:
        return self.now_us


def save_tiny(folder: Path) -> Path:
    save_random(family_config("llama"), folder)
    return folder


def measured_with(executor: PacedScript, budget_s: float = 1.0, quick: bool = True) -> list[MeasuredTrial]:
    return measure(executor, make_grid(executor, 2048, quick), budget_s, executor.clock_us)


@pytest.mark.parametrize(
    "trial", [Trial(4, 100), Trial(0, 0, 3, 64, 32), Trial(5, 70, 2, 40), Trial(0, 0, 2, 300), Trial(2, 40, 1, 600)], ids=str
)
def test_a_visit_runs_the_step_that_the_trial_names(trial: Trial) -> None:
    executor = PacedScript()
    times_us = CalibrationStepper(executor, executor.clock_us).visit(trial)
    point = trial.point(1.0)
    wanted = (point.decodes, point.decode_context, point.prefill_tokens, point.prefill_pairs)
    counted = executor.steps[:1] if trial.is_large else executor.steps[1:-1]
    assert sum(step[1] for step in counted) / len(counted) == pytest.approx(wanted[1], abs=trial.decodes / 2 + 1e-9)
    assert [(step[0], *step[2:]) for step in counted] == [(wanted[0], *wanted[2:])] * len(counted)
    assert times_us == pytest.approx([true_us(*step) for step in counted])
    assert executor.steps[-1] == (0, 0, 0, 0)
    assert executor.in_flight_max == 2


def test_the_fit_finds_the_machine() -> None:
    executor = PacedScript()
    roofline = fit_roofline(measured_with(executor, quick=False), SIZES)
    assert roofline.launch_us == pytest.approx(12_000, rel=0.02)
    assert roofline.weights_us == pytest.approx(8 * 600, rel=0.02)
    assert roofline.prefill_token_us == pytest.approx(600, rel=0.01)
    assert roofline.row_us == pytest.approx(250, rel=0.05)
    assert roofline.context_token_us == pytest.approx(0.5, rel=0.05)
    assert roofline.pair_us == pytest.approx(0.02, rel=0.05)
    assert roofline.token_flop / roofline.prefill_flop_per_s * 1e6 == pytest.approx(600, rel=0.01)


def test_the_model_is_right_about_mixed_steps_that_it_was_not_told() -> None:
    made = calibrate(measured_with(PacedScript()), SIZES, "known", "a script", 300.0, 2.0)
    assert made.worst(mixed=True) < 0.02
    assert made.worst(mixed=False) < 0.02
    assert any(row.measured.trial.is_mixed for row in made.rows)
    assert all(bool(point.decodes) != bool(point.prefill_tokens) for point in made.file.points)
    assert (made.file.host_us, made.file.host_row_us) == (300.0, 2.0)


def test_a_neighbour_who_is_busy_for_one_walk_changes_nothing() -> None:
    alone = PacedScript()
    grid = make_grid(alone, 2048, quick=True)
    steps_a_walk = sum(2 if trial.is_large else 5 for trial in grid)
    busy = PacedScript(slowness=lambda step: 3.0 if 100 < step < 100 + steps_a_walk else 1.0)
    quiet_us = [one.us for one in measured_with(alone, 80.0)]
    assert [one.us for one in measured_with(busy, 80.0)] == pytest.approx(quiet_us, rel=0.01)


def test_the_grid_is_walked_as_often_as_fits_but_once_at_least() -> None:
    once, often = PacedScript(), PacedScript()
    assert {len(one.times_us) for one in measured_with(once, 0.001) if one.trial.is_large} == {1}
    walks = {len(one.times_us) for one in measured_with(often, 60.0) if one.trial.is_large}
    assert len(walks) == 1
    assert min(walks) > 2
    assert often.now_us <= 60e6


def test_the_grid_covers_the_load_it_is_for_and_leaves_out_what_does_not_fit() -> None:
    full = make_grid(PacedScript(), 2048)
    assert {64, 256, 768} <= {trial.context_tokens for trial in full if trial.decodes == 64}
    assert max(trial.prefill_tokens for trial in full) == 2048
    assert any(trial.sequences >= 16 for trial in full)
    small = PacedScript(ExecutorShape(slots=8, blocks=40, block_size=16, context_tokens=300))
    some = make_grid(small, 256)
    assert 0 < len(some) < len(full)
    assert all(trial.decodes + trial.sequences <= 8 and trial.blocks(16) <= 40 for trial in some)
    assert calibrate(measure(small, some, 0.01, small.clock_us), SIZES, "small", "", 0.0, 0.0).file.points


def test_an_executor_without_room_is_refused() -> None:
    with pytest.raises(CannotCalibrate, match="too few slots"):
        make_grid(PacedScript(ExecutorShape(slots=1, blocks=1, block_size=4, context_tokens=8)), 2048)


def test_rows_that_compute_nothing_are_not_a_measurement() -> None:
    executor = PacedScript()
    stepper = CalibrationStepper(executor, executor.clock_us)
    forgotten = stepper._plans.start

    def short(slot: int, known: int, computed: int, limit: int, first_block: int) -> object:
        return forgotten(slot, known, computed, known // 2, first_block)

    stepper._plans.start = short  # type: ignore[method-assign, assignment]
    with pytest.raises(CannotCalibrate, match=r"1 × 64 prefill: 1 of 1 rows computed nothing .*out_of_blocks"):
        stepper.visit(Trial(0, 0, 1, 64))


def test_sizes_come_from_the_model_folder(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = model_sizes(folder, "bfloat16")
    assert sizes.kv_bytes_per_token == 2 * 2 * config["num_key_value_heads"] * head_dim * config["num_hidden_layers"]
    assert sizes.pair_flop == 4 * config["num_attention_heads"] * head_dim * config["num_hidden_layers"]
    assert 0 < sizes.token_flop <= sizes.weight_bytes == model_sizes(folder, "float32").weight_bytes / 2


@pytest.mark.slow
def test_delivering_costs_something() -> None:
    assert delivery_cost_us() > 0.0


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_a_model_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "new" / "mine.json"
    folder = save_tiny(tmp_path / "model")
    write_byte_tokenizer(folder)
    command = [
        "bench",
        "calibrate",
        str(folder),
        "--out",
        str(out),
        "--quick",
        "--seconds",
        "1",
        "--kv-memory",
        "64M",
        "--no-delivery",
    ]
    ran = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    for word in ("1 decodes at 64", "roofline", "worst"):
        assert word in ran.output
    times = load_step_times(str(out))
    assert times.name == "mine"
    assert times.step_us(4, 1000, 0, 0) > 0


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    nowhere = CliRunner().invoke(app, ["bench", "calibrate", str(tmp_path / "none"), "--out", str(tmp_path / "x.json")])
    assert nowhere.exit_code == 2
    assert "there is no folder or file" in nowhere.output
    (tmp_path / "file").write_text("in the way")
    folder = save_tiny(tmp_path / "model")
    blocked = CliRunner().invoke(app, ["bench", "calibrate", str(folder), "--out", str(tmp_path / "file" / "x.json")])
    assert blocked.exit_code == 2
