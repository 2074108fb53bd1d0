"""Commands that take the options of other commands too, and pass on those that were given.

Owns how a signature is put together out of several, and how given options, also those of a file, become a command line
again. What was set in the environment is not passed on: a child process inherits it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from enum import Enum
from typing import Any, get_type_hints

import typer

Command = Callable[..., None]


def taking_options_of(own: Command, others: tuple[Command, ...], leave_out: Collection[str]) -> Command:
    """`own` with the options of `others` added to its signature. It receives only its own; the first of equal names wins."""
    signature = inspect.signature(own)
    hints = get_type_hints(own, include_extras=True)
    mine = tuple(signature.parameters)
    parameters = {name: one.replace(annotation=hints[name]) for name, one in signature.parameters.items()}
    for other in others:
        for name, one in options_of(other).items():
            if name not in leave_out:
                parameters.setdefault(name, one)

    @functools.wraps(own)
    def whole(**values: Any) -> None:
        own(**{name: values[name] for name in mine})

    whole.__name__ = own.__name__.lstrip("_")
    # Typer reads both.
    whole.__dict__["__signature__"] = signature.replace(parameters=list(parameters.values()))
    whole.__annotations__ = {name: one.annotation for name, one in parameters.items()} | {"return": None}
    return whole


def options_of(command: Command) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(command, include_extras=True)
    return {
        name: one.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in inspect.signature(command).parameters.items()
        if hints[name] is not typer.Context
    }


def given_for(context: typer.Context, command: Command, keep_back: Collection[str]) -> tuple[str, ...]:
    """The options of `command` that were given on the command line or in a file, as they would be given to it."""
    known = options_of(command)
    line: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if source_of(context, name) in ("COMMANDLINE", "DEFAULT_MAP") and name in known and name not in keep_back:
            line += _as_given(parameter, context.params[name])
    return tuple(line)


def source_of(context: typer.Context, name: str) -> str:
    """Name of the parameter source; the enum's module differs between versions of typer."""
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def _as_given(parameter: Any, value: Any) -> list[str]:
    flag = parameter.opts[0]
    if isinstance(value, bool):
        return [flag] if value else [parameter.secondary_opts[0]]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (flag, str(one.value if isinstance(one, Enum) else one))]
