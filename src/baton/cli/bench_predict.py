"""`baton bench predict`: the simulator beside the real server, on the same loads and this machine."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.bench.calibrate import Survey, admission_costs_us, delivery_cost_us, host_costs_us, make_grid, model_sizes
from baton.bench.children import ChildFailed
from baton.bench.compare import SERVING_LOADS, ServingLoad
from baton.bench.predict import (
    Given,
    Predict,
    PredictOptions,
    PredictReport,
    Surveyed,
    TimesSource,
    config_of,
    report_of,
    settings_of,
    show,
    side_of,
)
from baton.bench.report import write_json
from baton.bench.turns import Voice
from baton.cli.bench_compare import Seed
from baton.cli.bench_screen import model_folder, progress_bar, refuse, stop_servers_on_sigterm, voice_of, wide_console
from baton.core.errors import BatonError
from baton.node.settings import EngineSettings
from baton.sim.steptime import load_step_times

ModelName = Annotated[str, typer.Argument(help="Model folder, or the name of a built-in model.")]
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
PredictJson = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]


def predict(
    model: ModelName = "smollm2",
    step_times: StepTimesName = None,
    load: LoadTexts = None,
    repetitions: Repetitions = 3,
    patience: Patience = 120.0,
    seed: Seed = 0,
    json_file: PredictJson = None,
) -> None:
    """Run loads on a real server and in the simulator, and see how far the simulator is off.

    Starts the server itself and measures step times of this machine between the loads, so that both sides meet the same
    machine. Exits with 1 where a prediction does not hold. Takes about four minutes on two cores that nobody else uses.
    """
    console = wide_console()
    stop_servers_on_sigterm()
    folder = model_folder(console, model)
    loads = tuple(_load(text) for text in load) if load else SERVING_LOADS
    try:
        given = Given(load_step_times(step_times)) if step_times is not None else None
        settings = settings_of(str(folder), loads)
    except BatonError as error:
        raise refuse(console, error) from error
    try:
        report = _predict(console, PredictOptions(loads, repetitions, seed, patience_s=patience), settings, given)
    except (BatonError, ChildFailed) as error:
        console.print(f"baton bench predict: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    show(console, report)
    if json_file is not None:
        write_json(json_file, report)
        console.print(f"Written to {json_file}.", style="dim")
    if not report.holds:
        raise typer.Exit(1)


def _load(text: str) -> ServingLoad:
    match = re.fullmatch(r"(\d{1,4})[x×](\d{1,5})[x×](\d{1,5})", text)
    if match is None or not all(numbers := [int(number) for number in match.groups()]):
        raise typer.BadParameter(f"{text!r} is not N×IN×OUT, such as 64x128x64", param_hint="--load")
    return ServingLoad(*numbers)


def _predict(
    console: Console, options: PredictOptions, settings: EngineSettings, given: TimesSource | None
) -> PredictReport:
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=None)
        voice = voice_of(console, bar, task)
        voice.doing("measuring what a request costs outside the engine")
        admission_us = admission_costs_us([(load.requests, load.input_tokens) for load in options.loads])
        with contextlib.nullcontext(given) if given is not None else _surveyed(settings, voice) as source:
            side = side_of(settings)
            work = Predict(options, side, config_of(settings), source, admission_us, voice)
            bar.update(task, total=work.measurements)
            found = work.run()
            return report_of(Path(str(settings.model_folder)).name, side, source.told, found)


@contextlib.contextmanager
def _surveyed(settings: EngineSettings, voice: Voice) -> Iterator[TimesSource]:
    # Imported here because `baton --help` must not wait for it.
    from baton.node.engine_setup import build_executor

    host_us, host_row_us = host_costs_us()
    host_row_us += delivery_cost_us()
    voice.doing("loading the model")
    # The same call as in the engine process, so that threads and kernels are those that serve.
    executor, _ = build_executor(settings)
    try:
        survey = Survey(executor, make_grid(executor, settings.step_tokens, quick=True))
        sizes = model_sizes(Path(str(settings.model_folder)), settings.dtype)
        yield Surveyed(survey.walk, sizes, (host_us, host_row_us))
    finally:
        executor.close()
