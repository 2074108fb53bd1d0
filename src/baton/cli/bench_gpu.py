"""`baton bench gpu`: checks and times the CUDA executor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.gpu import ATTENTION, BLOCK_SIZE, SHAPE, GpuOptions, exit_code, run
from baton.bench.gpu_part_processes import ALL_S
from baton.bench.gpu_report import table_of
from baton.cli.bench_screen import refuse, wide_console
from baton.core.errors import BatonError

Only = Annotated[str, typer.Option(metavar="PARTS", help="Names of parts, such as decode,prefill. Default: all.")]
ShapeName = Annotated[str, typer.Option("--shape", help="The model that is measured, with random weights.")]
AttentionName = Annotated[str, typer.Option("--attention", help="Which attention kernels the executor takes.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Token positions a KV block.")]
Seconds = Annotated[float, typer.Option("--limit-s", min=1.0, help="For all of it; what does not fit is left out.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Keep the numbers here.")]
Merge = Annotated[bool, typer.Option("--merge", help="Replace only the parts that were done now in that file.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", dir_okay=False, help="Write the page of docs/ here.")]
StepTimes = Annotated[
    Path | None, typer.Option("--step-times", dir_okay=False, help="Write the simulator's model of this machine here.")
]
Source = Annotated[
    Path | None,
    typer.Option("--from", exists=True, dir_okay=False, help="Measure nothing: take the numbers of this file."),
]


def gpu(
    only: Only = "",
    shape: ShapeName = SHAPE,
    attention: AttentionName = ATTENTION,
    block_size: BlockSize = BLOCK_SIZE,
    limit_s: Seconds = ALL_S,
    json: JsonFile = None,
    merge: Merge = False,
    markdown: Markdown = None,
    step_times: StepTimes = None,
    source: Source = None,
) -> None:
    """Build, check and time the CUDA executor: steps against what memory and arithmetic allow, and a whole engine.

    Both rates of the machine are measured in the same run. A part that fails does not stop the others. Wants a GPU of its
    own; on a machine without our servers' libraries, [dim]python -m baton.bench.gpu[/dim] does the same.
    """
    console = wide_console()
    names = tuple(name for name in only.split(",") if name)
    options = GpuOptions(
        names, shape, attention, block_size, limit_s, json, markdown, step_times, source, merge
    )  # fmt: skip
    try:
        report = run(options, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    except BatonError as error:
        raise refuse(console, error) from None
    console.print(table_of(report), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(exit_code(report))
