"""Commands whose modules are imported when they are called: `baton serve` does not wait for what a benchmark imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

Places = Mapping[str, str]
"""Of a command, the module and the name in it: a function, or a group of commands."""


def loading(places: Places) -> type[TyperGroup]:
    """A class of groups with these commands, in this order; give it to Typer as `cls`."""

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = _OnDemand(places)

    return Group


class _OnDemand(MutableMapping[str, Any]):
    def __init__(self, places: Places) -> None:
        self._commands: dict[str, Any] = dict.fromkeys(places)
        self._places = places

    def __getitem__(self, name: str) -> Any:
        if self._commands[name] is None:
            self._commands[name] = _load(name, self._places[name])
        return self._commands[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._commands[name] = command

    def __delitem__(self, name: str) -> None:
        del self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def __len__(self) -> int:
        return len(self._commands)


def _load(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(name)(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    return command
