"""Console, progress bar and orderly exit, shared by `baton bench` and other commands."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from baton.core.errors import BatonError
from baton.node.models import resolve_model
from baton.node.stage_progress import StageNames

PIPE_COLUMNS = 150


def wide_console() -> Console:
    """A console that is wide enough for tables when the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=PIPE_COLUMNS)


def progress_bar(console: Console, *more: ProgressColumn) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=console, transient=True)


def refuse(console: Console, error: Exception) -> typer.Exit:
    """Print what was wrong with the command; returns the exit to raise."""
    console.print(str(error), style="red", markup=False, highlight=False)
    return typer.Exit(2)


def model_folder(console: Console, model: str) -> Path:
    try:
        return resolve_model(model, StageNames(console.print))
    except BatonError as error:
        raise refuse(console, error) from error


def stop_servers_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C, so that started servers are stopped."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
