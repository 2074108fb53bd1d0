"""`baton serve`: options in, one ServeSettings out, and where the log goes.

Every option can also be set as BATON_<NAME> in the environment, or in a TOML file given with --config. The options are
declared by the fields of InstanceSettings and EngineSettings.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.cli.declared_options import GivenOptions, taking_settings
from baton.cli.options import config_file
from baton.core.config import OnPreempt
from baton.core.errors import BatonError
from baton.node.settings import EngineSettings, ExecutorKind, HttpSettings, InstanceSettings, LogLevel

console = Console(stderr=True, highlight=False)

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
    made = EngineSettings("", None, b"", log_level=settings["log_level"], **engine)
    _run(engine=made, **settings)


def process_fields(given: GivenOptions, owner: type[HttpSettings]) -> dict[str, Any]:
    """Fields of a server's settings; the scripted executor has no model."""
    settings = given.fields_of(owner)
    if settings["executor"] is ExecutorKind.SCRIPTED:
        settings["model"] = SCRIPTED_MODEL
    return settings


def log_to_stderr(level: LogLevel, access_log: bool) -> None:
    """Log Baton's loggers to standard error at the configured level; other libraries are not logged."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    ours = logging.getLogger("baton")
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())
    logging.getLogger("baton.access").setLevel(logging.NOTSET if access_log else logging.WARNING)


def _run(**settings: Any) -> None:
    # Imported late: `baton --help` must not wait for the libraries of a server.
    from baton.node import service

    log_to_stderr(settings["log_level"], settings["access_log"])
    try:
        service.serve(
            service.ServeSettings(**settings), lambda line: console.print(line, style="dim", markup=False, soft_wrap=True)
        )
    except BatonError as error:
        console.print(f"baton serve: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
