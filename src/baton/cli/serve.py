"""`baton serve`: options in, one ServeSettings out, and where the log goes.

Every option can also be set as BATON_<NAME> in the environment, or in a TOML file given with --config. The options are
declared by the fields of InstanceSettings and EngineSettings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from baton.cli.declared_options import GivenOptions, taking_settings
from baton.cli.options import config_file
from baton.cli.stage_display import LiveStages
from baton.core.config import OnPreempt
from baton.core.errors import EXIT_SETUP, BatonError, SetupError
from baton.node.gc_pauses import without_gc
from baton.node.log_lines import OPERATOR, formatter_of, json_line
from baton.node.settings import EngineSettings, ExecutorKind, HttpSettings, InstanceSettings, LogFormat, LogLevel
from baton.node.stderr_queue import queue_stderr

if TYPE_CHECKING:
    from baton.node.engine_launch import LaunchedEngine
    from baton.node.start_stages import StageView

console = Console(stderr=True, highlight=False)
FAILURE = "red"
EXIT_FAILED = 1

SCRIPTED_MODEL = "scripted"
"""Model name of the scripted executor."""

Config = Annotated[Path | None, config_file(lambda: serve)]


@taking_settings(InstanceSettings, EngineSettings)
def serve(*, given: GivenOptions, config: Config = None) -> None:  # noqa: ARG001  its callback has made it the others' defaults
    """Serve a model behind an OpenAI-compatible API.

    [dim]baton serve[/dim] serves the built-in SmolLM2-135M at http://127.0.0.1:8000;
    [dim]baton serve ./my-model --port 9000[/dim] a folder of safetensors;
    [dim]baton serve model.gguf --dtype float32[/dim] a GGUF file, converted once.

    Each option can also be set in the environment (--max-num-seqs as BATON_MAX_NUM_SEQS) or in a TOML file given with
    --config (max-num-seqs = 64); a flag goes before the environment, that before the file.
    """
    settings, engine = process_fields(given, InstanceSettings), given.fields_of(EngineSettings)
    if engine["router"] is not None:
        engine.setdefault("on_preempt", OnPreempt.RESCHEDULE)
    engine["kv_store"] = engine["kv_store"] or None
    logs = {name: settings[name] for name in ("log_level", "log_format")}
    made = EngineSettings("", None, b"", **logs, **engine)
    _run(engine=made, **settings)


def process_fields(given: GivenOptions, owner: type[HttpSettings]) -> dict[str, Any]:
    """Fields of a server's settings; the scripted executor has no model."""
    settings = given.fields_of(owner)
    if settings["executor"] is ExecutorKind.SCRIPTED:
        settings["model"] = SCRIPTED_MODEL
    return settings


def log_to_stderr(settings: Mapping[str, Any]) -> None:
    """Log Baton's loggers to standard error as configured, and what asyncio and the HTTP server say of failures.

    From here on nothing that this process writes there waits for its reader.
    """
    queue_stderr(settings["log_format"])
    handler = logging.StreamHandler()
    handler.setFormatter(formatter_of(settings["log_format"]))
    ours = logging.getLogger("baton")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel(settings["log_level"].upper())
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).handlers[:] = [handler]
    logging.getLogger("baton.access").setLevel(logging.NOTSET if settings["access_log"] else logging.WARNING)


def tell(line: str, log_format: LogFormat, style: str = "dim") -> None:
    """Print a line for the operator, whatever the log level is."""
    if log_format is LogFormat.JSON:
        level = "ERROR" if style == FAILURE else "INFO"
        sys.stderr.write("".join(json_line(part, level, OPERATOR) + "\n" for part in line.splitlines()))
    else:
        console.print(line, style=style, markup=False, soft_wrap=True)


def _nothing() -> None:
    """The default: nothing has to end first."""


@contextlib.contextmanager
def told_in_one_line(command: str, settings: Mapping[str, Any], before: Callable[[], None] = _nothing) -> Iterator[None]:
    """End the command with one line for what is raised inside, after `before`; where it comes from is told those who debug.

    The exit code is EXIT_SETUP where starting again cannot help.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        before()
        if settings["log_level"] == LogLevel.DEBUG:
            tell("".join(traceback.format_exception(error)).rstrip(), settings["log_format"])
        reason = str(error) if isinstance(error, BatonError) else _unexpected(error)
        tell(f"{command}: {reason}", settings["log_format"], FAILURE)
        raise typer.Exit(EXIT_SETUP if isinstance(error, SetupError) else EXIT_FAILED) from error


def _unexpected(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first} (unexpected; --log-level debug shows where)"


def is_live(log_format: LogFormat) -> bool:
    """Whether standard error is a terminal on which a line can be written over."""
    return log_format is LogFormat.TEXT and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def stage_view(log_format: LogFormat, say: Callable[[str], None] | None = None) -> StageView:
    """Stages of a start: live on a terminal, else a line each, through `say` where it is given."""
    from baton.node.start_stages import StageLines

    if is_live(log_format):
        return LiveStages()
    return StageLines(say or (lambda line: tell(line, log_format)))


def _run(**settings: Any) -> None:
    log_to_stderr(settings)
    log_format = settings["log_format"]
    with _engine_launched(settings) as launched, without_gc():
        # Imported late: `baton --help` must not wait for the libraries of a server, nor must the engine.
        from baton.node import service
        from baton.node.start_stages import StartStages

        stages = StartStages(stage_view(log_format))
        with told_in_one_line("baton serve", settings, stages.close):
            service.serve(service.ServeSettings(**settings), lambda line: tell(line, log_format), stages, launched)


@contextlib.contextmanager
def _engine_launched(settings: Mapping[str, Any]) -> Iterator[LaunchedEngine | None]:
    """The engine's process, which imports torch meanwhile. Under a router it is started later: instances start together
    there, with a lower share of the cores that they hand on."""
    if settings["executor"] is ExecutorKind.SCRIPTED or settings["engine"].router is not None:
        yield None
        return
    from baton.node.descriptors import raise_descriptor_limit
    from baton.node.engine_launch import LaunchedEngine

    raise_descriptor_limit()  # it has this process's
    launched = LaunchedEngine(imports_torch=True)
    try:
        yield launched
    finally:
        launched.abandon()
