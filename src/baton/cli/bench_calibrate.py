"""`baton bench calibrate`: a step-time model of this machine, measured on the real executor, for the simulator."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.bench.calibrate import (
    Calibration,
    CalibrationRow,
    MeasuredTrial,
    Trial,
    delivery_cost_us,
    host_costs_us,
    make_grid,
    measure,
    model_sizes,
)
from baton.bench.calibrate import calibrate as make_model
from baton.bench.child_processes import ChildFailed
from baton.bench.machine import OtherLoad, describe_machine, other_load
from baton.bench.report import write_json
from baton.cli.bench_screen import model_folder, progress_bar, refuse, wide_console
from baton.cli.declared_options import option_of, parse_bytes
from baton.core.errors import BatonError
from baton.node.settings import Dtype, EngineSettings

BUSY_CORES = 0.3
"""Warn when other processes use more cores than this."""

ModelName = Annotated[str, typer.Argument(help="A folder of safetensors, a GGUF file, or the built-in name smollm2.")]
Out = Annotated[Path, typer.Option("--out", dir_okay=False, help="Where the model goes, as JSON; its name is the file's.")]
Seconds = Annotated[float | None, typer.Option(min=1.0, help="Time for measuring [75, --quick 15]; one walk in any case.")]
Delivery = Annotated[bool, typer.Option(help="Add what front end and client take from the cores that compute.")]
DtypeOption = Annotated[Dtype, option_of(EngineSettings, "dtype")]
Threads = Annotated[int | None, option_of(EngineSettings, "threads")]
MaxNumSeqs = Annotated[int, option_of(EngineSettings, "max-num-seqs")]
MaxBatched = Annotated[int, option_of(EngineSettings, "max-num-batched-tokens")]
BlockSize = Annotated[int, option_of(EngineSettings, "block-size")]
KvMemory = Annotated[str | None, option_of(EngineSettings, "kv-memory")]
Quick = Annotated[bool, typer.Option("--quick", help="A coarse grid.")]


def calibrate(
    out: Out,
    model: ModelName = "smollm2",
    quick: Quick = False,
    delivery: Delivery = True,
    seconds: Seconds = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    threads: Threads = None,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxBatched = 2048,
    block_size: BlockSize = 16,
    kv_memory: KvMemory = None,
) -> None:
    """Measure how long steps take here, and write a model of it for the simulator.

    Runs the executor of `baton serve` alone, on steps of many sizes, and fits a roofline; points and fit go into one file.
    Steps that mix prefill and decodes are measured too but not fitted: they show how far to trust the model. Wants a quiet
    machine.
    """
    console = wide_console()
    folder = model_folder(console, model)
    settings = EngineSettings(
        "", str(folder), b"", dtype=dtype, threads=threads, slots=max_num_seqs, block_size=block_size,
        kv_memory_bytes=None if kv_memory is None else parse_bytes(kv_memory), step_tokens=max_num_batched_tokens,
    )  # fmt: skip
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        load = other_load()
        measured = _measure(console, settings, seconds or (15.0 if quick else 75.0), quick)
        host_us, host_row_us = host_costs_us()
        if delivery:
            console.print("measuring what it takes to deliver tokens", style="dim")
            host_row_us += delivery_cost_us()
        about = _describe(settings, model, load, delivery)
        made = make_model(measured, model_sizes(folder, dtype), out.stem, about, host_us, host_row_us)
        write_json(out, made.file)
    except (BatonError, ChildFailed) as error:
        console.print(f"baton bench calibrate: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except OSError as error:
        raise refuse(console, error) from error
    _show(console, made)
    _warn(console, load)
    console.print(f"Written to {out}.", style="dim")


def _measure(console: Console, settings: EngineSettings, budget_s: float, quick: bool) -> list[MeasuredTrial]:
    # Imported here because `baton --help` must not wait for it.
    from baton.node.engine_setup import build_executor

    with progress_bar(console) as bar:
        task = bar.add_task("loading the model", total=None)
        # The same call as in the engine process, so that threads and kernels are those that serve.
        executor = build_executor(settings).executor
        try:
            trials = make_grid(executor, settings.step_tokens, quick)
            bar.update(task, total=len(trials), description="warming up")
            walked = count(1)

            def advance(trial: Trial) -> None:
                # The number of walks is not known beforehand: the bar grows by one walk at a time.
                walks = -(-next(walked) // len(trials))
                bar.update(task, advance=1, total=walks * len(trials), description=str(trial))

            return measure(executor, trials, budget_s, advance=advance)
        finally:
            executor.close()


def _describe(settings: EngineSettings, model: str, load: OtherLoad, delivery: bool) -> str:
    machine = describe_machine()
    threads = settings.threads or "default"
    host = "deciding, front end and client" if delivery else "deciding alone"
    return (
        f"{Path(model).name}, {settings.dtype}, {threads} threads, {machine['cpu']} with {os.cpu_count()} cores, "
        f"block size {settings.block_size}; host: {host}; {datetime.now(UTC):%Y-%m-%d}, "
        f"others kept {load.busy_cores:.1f} cores busy"
    )


def _show(console: Console, made: Calibration) -> None:
    table = Table(
        "step", "ms", "runs", "max ÷ min", "roofline", "model", title="step times: measured, and how far off each is"
    )
    for row in made.rows:
        if not row.measured.trial.is_mixed:
            _add(table, row)
    table.add_section()
    for row in made.rows:
        if row.measured.trial.is_mixed:
            _add(table, row)
    console.print(table)
    roofline = made.file.roofline
    console.print(
        f"a step {roofline.launch_us / 1000:.2f} ms + weights {roofline.weights_us / 1000:.2f} ms, or "
        f"{roofline.prefill_token_us:,.0f} µs a token if that is more; {roofline.row_us:,.0f} µs a decode; "
        f"{roofline.context_token_us:.3f} µs a token of context; {roofline.pair_us:.4f} µs a pair; "
        f"host {made.file.host_us:,.0f} µs + {made.file.host_row_us:.1f} µs a decode",
        highlight=False,
    )
    console.print(
        f"worst: roofline {made.worst(mixed=False):.0%} where it was fitted, "
        f"model {made.worst(mixed=True):.0%} on mixed steps, which it was not told",
        highlight=False,
    )


def _add(table: Table, row: CalibrationRow) -> None:
    one = row.measured
    table.add_row(
        str(one.trial), f"{one.us / 1000:,.1f}", str(len(one.times_us)), f"{one.spread:.2f}",
        f"{row.roofline_error:+.0%}", f"{row.model_error:+.1%}",
    )  # fmt: skip


def _warn(console: Console, load: OtherLoad) -> None:
    if load.busy_cores > BUSY_CORES:
        console.print(
            f"Others kept {load.busy_cores:.1f} cores busy: measure again on a quiet machine before trusting this.",
            style="yellow",
        )
