"""Declares a field of a configuration: its bounds, and the option that sets it.

    slots: Annotated[int, Setting("max-num-seqs", Panel.KV, "Most requests that run at once.", least=1)] = 64

The field has the default and the type. `baton.cli.declared_options` makes the option, the BATON_ variable and the TOML
key of it; `docs/reference/options.md` lists it; `check_bounds` checks it where a configuration is made in code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from baton.core.errors import SetupError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class BadConfig(SetupError):
    """A setting, or a pair of settings, that cannot work; the message names them."""


class Panel(StrEnum):
    """Headings of `--help`, in the order in which they are shown."""

    FLEET = "Fleet"
    API = "API"
    TLS = "TLS"
    CONNECTIONS = "Connections of clients"
    LIMITS = "Limits"
    PROMPTS = "Prompts and answers"
    MODEL = "Model"
    KV = "KV cache and scheduling"
    DRAFTS = "Speculative decoding"
    TRACED = "Load from a trace"
    MADE_UP = "Load that is made up"
    ARRIVING = "When requests come"
    CLUSTER = "Cluster"
    PRESSURE = "Under KV pressure"
    TIERS = "KV beyond the pool"
    PEERS = "Prefill here, decode there"
    EVENTS = "KV events for other routers"
    ROUTER = "Under a router"
    INSTANCES = "Instances"
    CARRYING = "Carrying requests"
    RESULTS = "Runs and results"
    PLAIN = ""
    """No heading of its own."""
    LOG = "Log"


class Unit(Enum):
    """The notation of an option, where it differs from the field."""

    AS_IS = "as it is"
    BYTES = "bytes"
    """A size such as 512M; the field is in bytes."""
    SECONDS = "seconds"
    """The field is in microseconds."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a field, in its own unit."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A field that an operator sets: as --NAME, as BATON_NAME in the environment, as NAME in a TOML file."""

    name: str
    panel: Panel
    help: str
    least: float | None = None
    """In the unit of the option. It bounds the field too, unless the units differ or the field has Bounds of its own."""
    most: float | None = None
    metavar: str | None = None
    unit: Unit = Unit.AS_IS
    is_optional: bool = False
    """The option has no default: where it is not given, the field's default follows from other settings."""
    after: str | None = None
    """The option that this one follows in `--help`. Default: the field before it."""
    has_variable: bool = True
    is_argument: bool = False
    """A positional argument, without --NAME."""
    is_flag: bool = False
    """There is no --no-NAME."""


def notes_of(hint: object) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and the annotations."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return kind, tuple(notes)
    return hint, ()


def check_bounds(config: DataclassInstance) -> None:
    """Raises BadConfig for the first field that is outside of its bounds. None is within all bounds."""
    for name, bounds in _bounds_of(type(config)):
        value = getattr(config, name)
        # Written so that NaN fails too.
        if value is None:
            continue
        if bounds.above is not None and not value > bounds.above:
            raise BadConfig(f"{name} must be more than {bounds.above:g}, not {value}")
        if bounds.least == 0 and not value >= 0:
            raise BadConfig(f"{name} must not be negative, but is {value}")
        if bounds.least is not None and not value >= bounds.least:
            raise BadConfig(f"{name} must be at least {bounds.least:g}, not {value}")
        if bounds.most is not None and not value <= bounds.most:
            raise BadConfig(f"{name} must be at most {bounds.most:g}, not {value}")


@functools.cache
def _bounds_of(kind: type[DataclassInstance]) -> tuple[tuple[str, Bounds], ...]:
    found = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for note in sorted(notes_of(hint)[1], key=lambda note: not isinstance(note, Bounds)):
            if isinstance(note, Bounds):
                found.append((name, note))
                break
            if isinstance(note, Setting) and note.unit is Unit.AS_IS:
                found.append((name, Bounds(note.least, note.most)))
    return tuple(found)
