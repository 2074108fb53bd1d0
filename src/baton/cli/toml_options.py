"""Options from a TOML file: the keys are the names of a command's options, without the dashes in front.

Owns reading and checking such a file. Promises that a key that is no option, or a value of the wrong type or outside of
the option's range, is reported with the key and the file. Precedence: flag, environment, file, default. Knows a command
only by its signature.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.models import ParameterInfo

Command = Callable[..., None]
_INTEGER_END = 1 << 63
NOTHING: Mapping[str, str] = MappingProxyType({})


def read_options(path: Path, command: Command, reserved: str, settled: Mapping[str, str] = NOTHING) -> dict[str, Any]:
    """The file's values by parameter name, as a default map wants them. `reserved` is the option that names the file.

    `settled`: options of commands that this one starts which are not to be given, and why.
    """
    hints = get_type_hints(command, include_extras=True)
    options = {name.replace("_", "-"): hint for name, hint in hints.items() if hint is not typer.Context}
    del options["return"], options[reserved]
    given = _load(path)
    for key, value in given.items():
        if key not in options:
            raise _bad(path, key, settled.get(key) or "is not an option" + _hint(key, options))
        _check(path, key, value, options[key])
    return {key.replace("-", "_"): value for key, value in given.items()}


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise typer.BadParameter(f"{path}: {error}") from None
    except RecursionError:
        raise typer.BadParameter(f"{path}: it is nested too deeply") from None


def _check(path: Path, key: str, value: object, hint: object) -> None:
    kind, info = _kind_of(hint)
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _bad(path, key, f"is wrong: {error}") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):  # an integer may be too large to ask
            raise _bad(path, key, f"is {value}, which is no finite number")
        if isinstance(value, int) and not -_INTEGER_END < value < _INTEGER_END:
            raise _bad(path, key, "is an integer of more than 64 bits")
        if info.min is not None and value < info.min:
            raise _bad(path, key, f"is {value}; the least is {info.min:g}")
        if info.max is not None and value > info.max:
            raise _bad(path, key, f"is {value}; the most is {info.max:g}")


def _kind_of(hint: object) -> tuple[object, ParameterInfo]:
    """The type and the typer parameter info of an option."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        for note in notes:
            if isinstance(note, ParameterInfo):
                return kind, note
    raise TypeError(f"{hint} is not annotated as an option")


def _hint(key: str, options: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-").lower(), options, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _bad(path: Path, key: str, what: str) -> typer.BadParameter:
    return typer.BadParameter(f"{path}: '{key}' {what}")
