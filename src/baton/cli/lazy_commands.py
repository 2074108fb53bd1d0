"""Commands whose modules are imported when they are called: `baton serve` does not wait for what a benchmark imports."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from baton.cli.option_help import WIDTH_MAX, ListedCommand

NOTHING_MOVED: Mapping[str, str] = {}


def loading(places: Mapping[str, str], moved: Mapping[str, str] = NOTHING_MOVED) -> type[TyperGroup]:
    """A Typer group class (`cls`) with these commands in this order.

    A place is `module:name`, of a function or of a group of its own. `moved` maps the name of a former command to
    what replaces it, which is printed instead of running anything (exit code 2).
    """

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            named: dict[str, Any] = dict.fromkeys(places)
            self.commands = named

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in moved:
                typer.echo(f"{ctx.command_path} {cmd_name} has moved: {moved[cmd_name]}", err=True)
                raise typer.Exit(2)
            if cmd_name in places and self.commands[cmd_name] is None:
                self.commands[cmd_name] = _load(cmd_name, places[cmd_name])
            return super().get_command(ctx, cmd_name)

    return Group


def _load(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(name, cls=ListedCommand, context_settings={"max_content_width": WIDTH_MAX})(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    return command
