"""Options that are not declared settings: those of client commands, and --config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from baton.cli.declared_options import variable
from baton.cli.toml_options import NOTHING, Command, read_options


def option(name: str, panel: str, text: str) -> Any:
    return typer.Option(f"--{name}", help=text, envvar=variable(name), show_envvar=False, rich_help_panel=panel)


def config_file(command: Callable[[], Command], settled: Mapping[str, str] = NOTHING) -> Any:
    """The --config option. `command` is a callable, since the command itself has it. `settled`: see `read_options`."""

    def apply(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            read = read_options(path, command(), "config", settled)
            context.default_map = {**(context.default_map or {}), **read}
        return path

    return typer.Option(
        "--config",
        help="A TOML file of options, such as max-num-seqs = 64. Flags and the environment go before it.",
        envvar=variable("config"),
        show_envvar=False,
        callback=apply,
        is_eager=True,  # the file's values become defaults before any other option is read
        metavar="FILE",
    )
