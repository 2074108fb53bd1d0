"""Makes a step-time model for the simulator from a report of `baton bench gpu`.

The points are those that were measured; the roofline between them is fitted as for any other machine (see `calibrate`).
"""

from __future__ import annotations

from pathlib import Path

from baton.bench.calibrate import MeasuredTrial, ModelSizes, Trial, fit_roofline
from baton.bench.gpu_floor import sizes_of
from baton.bench.gpu_report import GpuReport, StepPoint
from baton.bench.report import write_json
from baton.core.errors import BatonError
from baton.executor.model_shapes import shape_fields
from baton.sim.step_times import StepTimes, StepTimesFile


class TooFewPoints(BatonError):
    """The report lacks steps needed for a model; the message says which."""


def step_times_of(report: GpuReport, shape: str, name: str) -> StepTimesFile:
    measured = _measured([point for part in report.parts for point in part.points if point.shape == shape])
    if not any(one.trial.decodes for one in measured) or not any(one.trial.sequences for one in measured):
        raise TooFewPoints(
            f"the report has no decode steps or no prefills of {shape}: run the parts decode, prefill and grid"
        )
    sizes = sizes_of(shape_fields(shape))
    of_model = ModelSizes(
        weight_bytes=float(sizes.weight_bytes),
        token_flop=sizes.token_flop,
        kv_bytes_per_token=float(sizes.kv_bytes_per_token),
        pair_flop=sizes.pair_flop,
    )
    file = StepTimesFile(
        name=name,
        measured_on=_words(report, shape, len(measured)),
        roofline=fit_roofline(measured, of_model),
        layers=sizes.layers,
        points=tuple(one.trial.point(round(one.us, 1)) for one in measured),
    )
    StepTimes(file)  # validates
    return file


def write_step_times(path: Path, report: GpuReport, shape: str) -> None:
    """Write the model; its name is that of the file."""
    write_json(path, step_times_of(report, shape, path.stem))


def _measured(points: list[StepPoint]) -> list[MeasuredTrial]:
    """One trial per distinct step, with the median of its measurements."""
    found: dict[Trial, MeasuredTrial] = {}
    for point in points:
        trial = Trial(point.decodes, point.context_tokens, point.sequences, point.chunk_tokens, point.begin_tokens)
        found.setdefault(trial, MeasuredTrial(trial)).times_us.append(point.us)
    return list(found.values())


def _words(report: GpuReport, shape: str, points: int) -> str:
    machine, rates = report.machine, report.rates
    measured = "" if rates is None else (
        f" Memory was read at {rates.read_bytes_per_s / 1e12:.2f} TB/s, and bf16 matrices were multiplied at "
        f"{rates.matrix_flop_per_s / 1e12:,.0f} TFLOP/s in the same run."
    )  # fmt: skip
    return (
        f"{shape} shape in bf16 with random weights on one {machine.get('gpu', 'GPU')}, {report.made[:10]}, torch "
        f"{machine.get('torch', '?')}, triton {machine.get('triton', '?')}: {points} steps of the CUDA executor, several in "
        f"flight, decodes and short chunks as CUDA graphs. The roofline is fitted to them.{measured} What the engine spends "
        "on a step is hidden behind the one before it."
    )
