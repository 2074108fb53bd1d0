"""Accuracy of the simulator: the same loads on a real server and in virtual time.

Owns the server's settings, which both sides get, the order of things and the verdict. Step times are measured in the same
run, between the loads, because a machine is not the same from hour to hour: a load is predicted from the walks of the grid
just before and just after it. A run into which others came is repeated, as long as patience lasts. What a request costs on
its way to the engine is measured too. Nothing is fitted to what the server then does.

    walk ─ load A ─ walk ─ load B ─ walk ─ load B ─ walk ─ load A ─ walk …      prediction of a load: the walks beside it
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Annotated, Protocol

import msgspec
import typer
from rich.console import Console

from baton.bench.calibrate import MeasuredTrial as Visited
from baton.bench.calibrate import (
    ModelSizes,
    Survey,
    admission_costs_us,
    calibrate,
    delivery_cost_us,
    host_costs_us,
    joined,
    make_grid,
    model_sizes,
)
from baton.bench.child_processes import ChildFailed
from baton.bench.machine import OtherLoad, other_load
from baton.bench.report import summarise
from baton.core.config import WorkerConfig
from baton.executor.contract import ExecutorShape
from baton.node.baton_command import baton_command
from baton.node.engine_setup import worker_config
from baton.node.settings import EngineSettings
from baton.sim.cluster import PlannedRequest, RunSpec, simulate
from baton.sim.run_records import RunRecord
from baton.sim.step_times import StepTimes, load_step_times
from benchmarks.compare import SERVING_LOADS
from benchmarks.options import JsonIfGiven, ModelArgument, Seed
from benchmarks.runner import (
    OTHERS_CORES_MAX,
    BadBenchmarkOptions,
    Columns,
    Experiment,
    MeasurementFailed,
    Progress,
    Report,
    Rounds,
    Spread,
    alternating,
    model_folder,
    notes_on_other_load,
    print_remarks,
    run_benchmark,
    shown_ratio,
    shown_spread,
    table_of,
)
from benchmarks.servers import OURS, RunningServer, ServerCommand, ServersInTurn, ServingLoad, server, servers_in_turn

SPEED_OFF_MAX, TTFT_OFF_MAX = 0.15, 0.25
BLOCKS, CONTEXT_TOKENS = 4096, 4096
WARM_UP_TOKENS = 4


class BadLoad(BadBenchmarkOptions):
    """A load that cannot be run; the message says why."""


@dataclass(frozen=True, slots=True)
class PredictOptions:
    loads: tuple[ServingLoad, ...] = SERVING_LOADS
    repetitions: int = 3
    seed: int = 0
    look_s: float = 1.0
    patience_s: float = 120.0
    """Total seconds for waiting until other load is gone, and for repeating disturbed runs."""


class TimesSource(Protocol):
    """A source of step times."""

    @property
    def description(self) -> str: ...

    def look(self) -> None:
        """Called before each run of a load, and once after the last."""

    def times(self, look: int) -> StepTimes:
        """Step times between that look, counted from 0, and the next."""


@dataclass(frozen=True, slots=True)
class GivenTimes:
    """A fixed step-time model."""

    model: StepTimes

    @property
    def description(self) -> str:
        return f"step times {self.model.name}: {self.model.file.measured_on}"

    def look(self) -> None:
        """No-op."""

    def times(self, look: int) -> StepTimes:  # noqa: ARG002  the same for all
        return self.model


class SurveyedTimes:
    """Measures the grid at each look; a run's model is made from the walks before and after it."""

    def __init__(self, walk: Callable[[], list[Visited]], sizes: ModelSizes, host_costs_us: tuple[float, float]) -> None:
        self._walk = walk
        self._sizes = sizes
        self._host_costs_us = host_costs_us
        self._walks: list[list[Visited]] = []

    @property
    def description(self) -> str:
        step_us, row_us = self._host_costs_us
        return f"step times measured beside each run; host {step_us:,.0f} µs a step and {row_us:.1f} µs a token"

    def look(self) -> None:
        self._walks.append(self._walk())

    def times(self, look: int) -> StepTimes:
        visited = joined(self._walks[look : look + 2])
        return StepTimes(calibrate(visited, self._sizes, "here", "", *self._host_costs_us).file)


def settings_of(model_folder: str, loads: Sequence[ServingLoad], blocks: int = BLOCKS) -> EngineSettings:
    """Settings of the server, the calibrated executor and the simulated instance."""
    settings = EngineSettings("", model_folder, b"", blocks=blocks, context_tokens=CONTEXT_TOKENS)
    room = config_of(settings).sequence_tokens_max
    for load in loads:
        if load.input_tokens + load.output_tokens > room:
            raise BadLoad(f"{load.name}: a sequence has at most {room:,} tokens here")
        if load.requests > settings.waiting_max:
            raise BadLoad(f"{load.name}: at most {settings.waiting_max:,} requests can wait")
    return settings


def config_of(settings: EngineSettings) -> WorkerConfig:
    """The server's WorkerConfig, without an executor: the settings contain every choice of the executor."""
    shape = ExecutorShape(
        settings.slots, settings.blocks or BLOCKS, settings.block_size, settings.context_tokens or CONTEXT_TOKENS
    )
    return worker_config(settings, shape)


def command_of(settings: EngineSettings) -> ServerCommand:
    """Command of the server with all flags, which override the environment."""
    flags = {
        "--dtype": settings.dtype, "--max-model-len": settings.context_tokens, "--max-num-seqs": settings.slots,
        "--max-num-batched-tokens": settings.step_tokens, "--block-size": settings.block_size,
        "--kv-blocks": settings.blocks, "--plan-ahead": settings.depth, "--reserve": settings.reserve,
        "--victims": settings.victims, "--max-waiting": settings.waiting_max,
    }  # fmt: skip
    arguments = [part for name, value in flags.items() for part in (name, str(value))]
    return ServerCommand(OURS, baton_command("serve", str(settings.model_folder), *arguments))


class Figures(msgspec.Struct, frozen=True):
    tokens_per_s: float
    ttft_ms: float
    """Mean time to first token."""


class PredictedRun(msgspec.Struct, frozen=True):
    """One run of one load."""

    repetition: int
    real: Figures
    simulated: Figures
    other_load: OtherLoad


class Prediction(msgspec.Struct, frozen=True):
    load: str
    admission_us: float
    """Time of a request from its client to the engine."""
    runs: list[PredictedRun]
    speed: Spread
    """Simulated ÷ real speed, run by run."""
    ttft: Spread
    holds: bool


class PredictReport(Report, kw_only=True):
    model: str
    command: str
    step_times: str
    speed_off_max: float = SPEED_OFF_MAX
    ttft_off_max: float = TTFT_OFF_MAX
    predictions: list[Prediction]

    @property
    def holds(self) -> bool:
        return not self.failures and bool(self.predictions) and all(each.holds for each in self.predictions)


@dataclass(frozen=True, slots=True)
class _Measurements:
    """One run of a real server."""

    load: ServingLoad
    repetition: int
    look: int
    """Number of the last look before the run."""
    figures: Figures
    other_load: OtherLoad


class Predict:
    def __init__(
        self,
        options: PredictOptions,
        side: ServerCommand,
        config: WorkerConfig,
        source: TimesSource,
        admission_us: Sequence[float],
        progress: Progress,
        clock_s: Callable[[], float] = perf_counter,
        look_around: Callable[[float], OtherLoad] = other_load,
    ) -> None:
        """`admission_us`: time of a request before it reaches the engine, by load."""
        self._options = options
        self._side = side
        self._config = config
        self._source = source
        self._admission_us = dict(zip(options.loads, admission_us, strict=True))
        self._progress = progress
        self._seeds = count(options.seed)
        """A new seed for every run, since two loads of one seed begin with the same tokens."""
        self._clock_s = clock_s
        self._other_load = look_around
        self._patience_s = options.patience_s
        self._looks = 0
        self._taken: list[_Measurements] = []

    @property
    def measurements(self) -> int:
        return self._options.repetitions * len(self._options.loads)

    def run(self) -> tuple[list[Prediction], list[str]]:
        """The prediction of each load, and failures; nothing is predicted after a failure."""
        try:
            with server(self._side) as serving:
                turns, _ = servers_in_turn([serving], self._progress, next(self._seeds))
                self._real(turns, serving)
        except (ChildFailed, MeasurementFailed) as error:
            return [], [str(error)]
        runs = [self._beside(taken) for taken in self._taken]
        return [self._conclude(load, runs) for load in self._options.loads], []

    # ── the real server ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _real(self, turns: ServersInTurn, serving: RunningServer) -> None:
        options = self._options
        for load in options.loads:  # warm-up: the first step of a size allocates buffers that later ones reuse
            self._progress.doing(f"warming up: {load.name}")
            turns.run(serving, replace(load, output_tokens=WARM_UP_TOKENS), next(self._seeds))
        for repetition, load in alternating(options.loads, options.repetitions):
            self._take_undisturbed(turns, serving, load, repetition)
        self._look()

    def _take_undisturbed(self, turns: ServersInTurn, serving: RunningServer, load: ServingLoad, repetition: int) -> None:
        while True:
            self._wait_for_quiet()
            self._look()
            began_s = self._clock_s()
            taken = self._take(turns, serving, load, repetition)
            if self._patience_s <= 0.0 or not self._is_busy():
                self._taken.append(taken)
                self._progress.done()
                return
            self._patience_s -= self._clock_s() - began_s
            self._progress.say("others came meanwhile: once more")

    def _wait_for_quiet(self) -> None:
        began_s = self._clock_s()
        self._progress.doing("waiting for a quiet machine")
        while self._patience_s - (self._clock_s() - began_s) > 0.0 and self._is_busy():
            pass
        self._patience_s -= self._clock_s() - began_s

    def _is_busy(self) -> bool:
        return self._other_load(self._options.look_s).busy_cores > OTHERS_CORES_MAX

    def _look(self) -> None:
        self._progress.doing("measuring step times")
        self._source.look()
        self._looks += 1

    def _take(self, turns: ServersInTurn, serving: RunningServer, load: ServingLoad, repetition: int) -> _Measurements:
        options = self._options
        figures: list[Figures] = []

        def work() -> tuple[float, str]:
            summary = summarise(turns.run(serving, load, next(self._seeds)))
            if summary.counts.cached_tokens:
                raise MeasurementFailed(f"{load.name}: {summary.counts.cached_tokens} tokens came from the prefix cache")
            first = summary.latency.ttft_ms
            if first is None:
                raise MeasurementFailed(f"{load.name}: no request gave a token")
            figures.append(Figures(summary.throughput.output_tokens_per_s, first.mean))
            return figures[0].tokens_per_s, f"TTFT {first.mean:,.0f} ms"

        rounds = Rounds(replace(self._progress, done=lambda: None), options.repetitions, options.look_s)
        taken = rounds.measure(load.name, "tokens/s", self._side.name, repetition, work)
        return _Measurements(load, repetition, self._looks - 1, figures[0], taken.load)

    # ── the simulated one ────────────────────────────────────────────────────────────────────────────────────────────────

    def _beside(self, taken: _Measurements) -> tuple[ServingLoad, PredictedRun]:
        times = self._source.times(taken.look)
        simulated = simulated_figures(taken.load, self._config, times, self._admission_us[taken.load])
        return taken.load, PredictedRun(taken.repetition, taken.figures, simulated, taken.other_load)

    def _conclude(self, load: ServingLoad, runs: Sequence[tuple[ServingLoad, PredictedRun]]) -> Prediction:
        own = [run for of, run in runs if of is load]
        speed = Spread.of([run.simulated.tokens_per_s / run.real.tokens_per_s for run in own])
        ttft = Spread.of([run.simulated.ttft_ms / run.real.ttft_ms for run in own])
        holds = abs(speed.median - 1.0) <= SPEED_OFF_MAX and abs(ttft.median - 1.0) <= TTFT_OFF_MAX
        return Prediction(load.name, round(self._admission_us[load], 1), own, speed, ttft, holds)


def simulated_figures(load: ServingLoad, config: WorkerConfig, times: StepTimes, admission_us: float) -> Figures:
    """The same load in virtual time: one client per request, as in the load generator."""
    call = PlannedRequest(None, load.input_tokens, load.output_tokens, load.output_tokens)
    spec = RunSpec(
        load.name, 1, config, times, [call] * load.requests, concurrency=load.requests, host_us=round(admission_us),
        spans_max=0,
    )  # fmt: skip
    return _figures(simulate(spec))


def _figures(record: RunRecord) -> Figures:
    journeys = record.requests
    began_us = min(journey.arrived_us for journey in journeys)
    ended_us = max(journey.ended_us or 0 for journey in journeys)
    first_us = [journey.ttft_us or 0 for journey in journeys]
    tokens = sum(journey.output_tokens for journey in journeys)
    return Figures(tokens / (ended_us - began_us) * 1e6, sum(first_us) / len(first_us) / 1000)


def report_of(model: str, side: ServerCommand, step_times: str, found: tuple[list[Prediction], list[str]]) -> PredictReport:
    predictions, failures = found
    return PredictReport(
        model=model,
        command=side.shell_line(),
        step_times=step_times,
        predictions=predictions,
        notes=notes_on_other_load([run.other_load for each in predictions for run in each.runs]),
        failures=failures,
    )


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


StepTimesName = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="A shipped model of step times or a JSON file [measured in this run]."),
]
LoadTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--load", metavar="N×IN×OUT", help="Requests at once, tokens in, tokens out, as 64x128x64; repeat for more."
    ),
]
Repetitions = Annotated[int, typer.Option(min=1, max=20, help="Times that each load is run.")]
Patience = Annotated[
    float, typer.Option(min=0.0, help="Seconds to wait in all for others to leave the machine, and for runs to repeat.")
]


def predict(
    model: ModelArgument = "smollm2",
    step_times: StepTimesName = None,
    load: LoadTexts = None,
    repetitions: Repetitions = 3,
    patience: Patience = 120.0,
    seed: Seed = 0,
    json_file: JsonIfGiven = None,
) -> None:
    """Run loads on a real server and in the simulator, and see how far the simulator is off.

    Starts the server itself and measures step times of this machine between the loads, so that both sides meet the same
    machine. Exits with 1 where a prediction does not hold. Takes about four minutes on two cores that nobody else uses.
    """

    def prepare(progress: Progress) -> Experiment[PredictReport]:
        loads = tuple(_load(text) for text in load) if load else SERVING_LOADS
        given = GivenTimes(load_step_times(step_times)) if step_times is not None else None
        settings = settings_of(str(model_folder(model, progress)), loads)
        options = PredictOptions(loads, repetitions, seed, patience_s=patience)
        return Experiment(repetitions * len(loads), lambda: predicted(options, settings, given, progress))

    if not run_benchmark(prepare, show, json_file).holds:
        raise typer.Exit(1)


def _load(text: str) -> ServingLoad:
    match = re.fullmatch(r"(\d{1,4})[x×](\d{1,5})[x×](\d{1,5})", text)
    if match is None or not all(numbers := [int(number) for number in match.groups()]):
        raise typer.BadParameter(f"{text!r} is not N×IN×OUT, such as 64x128x64", param_hint="--load")
    return ServingLoad(*numbers)


def predicted(
    options: PredictOptions, settings: EngineSettings, given: TimesSource | None, progress: Progress
) -> PredictReport:
    progress.doing("measuring what a request costs outside the engine")
    admission_us = admission_costs_us([(load.requests, load.input_tokens) for load in options.loads])
    with contextlib.nullcontext(given) if given is not None else _surveyed(settings, progress) as source:
        side = command_of(settings)
        found = Predict(options, side, config_of(settings), source, admission_us, progress).run()
        return report_of(Path(str(settings.model_folder)).name, side, source.description, found)


@contextlib.contextmanager
def _surveyed(settings: EngineSettings, progress: Progress) -> Iterator[TimesSource]:
    # Imported here because help must not wait for it.
    from baton.node.engine_setup import build_executor

    host_us, host_row_us = host_costs_us()
    host_row_us += delivery_cost_us()
    progress.doing("loading the model")
    # The same call as in the engine process, so that threads and kernels are those that serve.
    executor = build_executor(settings).executor
    try:
        survey = Survey(executor, make_grid(executor, settings.step_tokens, quick=True))
        sizes = model_sizes(Path(str(settings.model_folder)), settings.dtype)
        yield SurveyedTimes(survey.walk, sizes, (host_us, host_row_us))
    finally:
        executor.close()


def _two_places(value: float) -> str:
    """Two decimals, for a ratio near 1."""
    return f"{value:.2f}"


COLUMNS: Columns[Prediction] = (
    ("load", lambda each: each.load),
    ("tokens/s", lambda each: shown_spread([run.real.tokens_per_s for run in each.runs])),
    ("simulated", lambda each: shown_spread([run.simulated.tokens_per_s for run in each.runs])),
    ("ratio", lambda each: shown_ratio(each.speed, _two_places)),
    ("TTFT, s", lambda each: shown_spread([run.real.ttft_ms / 1000 for run in each.runs])),
    ("simulated", lambda each: shown_spread([run.simulated.ttft_ms / 1000 for run in each.runs])),
    ("ratio", lambda each: shown_ratio(each.ttft, _two_places)),
    ("holds", lambda each: "yes" if each.holds else "NO"),
)


def show(console: Console, report: PredictReport) -> None:
    machine = report.machine
    title = f"{report.model} on {machine['cpu']}, {machine['cores']} cores\n{report.step_times}"
    console.print(table_of(title, COLUMNS, report.predictions))
    legend = (
        f"Median of the runs (smallest – largest); ratio: simulated ÷ real, run by run. A prediction holds within "
        f"{report.speed_off_max:.0%} of the tokens a second and {report.ttft_off_max:.0%} of the mean time to first token."
    )
    print_remarks(console, report, legend)
