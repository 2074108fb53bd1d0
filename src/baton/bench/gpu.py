"""`python -m baton.bench.gpu`: builds, checks and times everything on one GPU, and prints one table.

Imports only what a bare machine with torch, triton and transformers has, so that it runs there without the servers; `baton
bench gpu` is the same with help. Results can be kept as JSON, from which the page in docs/ and the step-time model of the
simulator are made, on any machine:

    python -m baton.bench.gpu --json gpu.json
    python -m baton.bench.gpu --from gpu.json --markdown docs/benchmarks.md --step-times src/baton/sim/models/h200-8b.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from baton.bench.gpu_part_processes import ALL_S, PartLimits, do_parts, own_command
from baton.bench.gpu_report import GpuReport, markdown_of, merged, read_report, table_of, write_report
from baton.core.errors import BatonError
from baton.executor.torch_build import need_torch

SHAPE, ATTENTION, BLOCK_SIZE = "qwen3-8b", "auto", 16
DONE, MISSED, WRONG = 0, 1, 2
"""Exit codes: all parts were done and all targets met; something was not; the command was wrong."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    only: tuple[str, ...] = ()
    """Parts to run; empty: all."""
    shape: str = SHAPE
    attention: str = ATTENTION
    block_size: int = BLOCK_SIZE
    limit_s: float = ALL_S
    json_file: Path | None = None
    markdown_file: Path | None = None
    step_times_file: Path | None = None
    source: Path | None = None
    """A report to show instead of measuring."""
    merge: bool = False
    """Merge the results into `json_file`; its other parts stay."""


def run(options: GpuOptions, say: Callable[[str], None]) -> GpuReport:
    """Measure or read a report, and write the requested outputs."""
    report = _measure(options, say) if options.source is None else read_report(options.source)
    if options.json_file is not None:
        if options.merge and options.json_file.exists():
            report = merged(read_report(options.json_file), report)
        write_report(options.json_file, report)
    if options.markdown_file is not None:
        options.markdown_file.write_text(markdown_of(report))
    if options.step_times_file is not None:
        # Imported here because the simulator's libraries are not on every machine with a GPU.
        from baton.bench.gpu_model import write_step_times

        write_step_times(options.step_times_file, report, options.shape)
    return report


def exit_code(report: GpuReport) -> int:
    return MISSED if report.failed or report.missed else DONE


def _measure(options: GpuOptions, say: Callable[[str], None]) -> GpuReport:
    need_torch()
    # Imported here because it imports torch, which showing a report does not need.
    from baton.bench.gpu_parts import PARTS, need_device, parts_named

    parts = parts_named(options.only or tuple(PARTS))
    need_device()
    sizes = ("--shape", options.shape, "--attention", options.attention, "--block-size", str(options.block_size))

    def command(left: Sequence[str], notes: Path) -> list[str]:
        return own_command("--work", str(notes), "--only", ",".join(left), *sizes)

    made = datetime.now(UTC).isoformat(timespec="seconds")
    done = do_parts(parts, command, PartLimits(options.limit_s), say)
    return GpuReport(made, done.machine, done.parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.gpu", description="Measure the CUDA executor.")
    add = parser.add_argument
    add("--only", default="", metavar="PARTS", help="names of parts, with commas between; default: all")
    add("--shape", default=SHAPE, help="the model that is measured")
    add("--attention", default=ATTENTION, help="which attention kernels the executor takes")
    add("--block-size", type=int, default=BLOCK_SIZE)
    add("--limit-s", type=float, default=ALL_S, help="for all of it")
    add("--json", type=Path, metavar="FILE", help="keep the numbers here")
    add("--merge", action="store_true", help="replace only the parts that were done now in that file")
    add("--markdown", type=Path, metavar="FILE", help="write the page of docs/ here")
    add("--step-times", type=Path, metavar="FILE", help="write the simulator's model of this machine here")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: take the numbers of this file")
    add("--work", type=Path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    only = tuple(name for name in given.only.split(",") if name)
    if given.work is not None:
        from baton.bench.gpu_parts import Scale
        from baton.bench.gpu_worker import work

        work(only, given.work, Scale(shape=given.shape, attention=given.attention, block_size=given.block_size))
        return DONE
    options = GpuOptions(
        only, given.shape, given.attention, given.block_size, given.limit_s, given.json, given.markdown, given.step_times,
        given.source, given.merge,
    )  # fmt: skip
    try:
        report = run(options, _say)
    except BatonError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG
    _say(table_of(report))
    return exit_code(report)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
