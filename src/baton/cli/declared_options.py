"""Commands made of declared settings: an option for each field that has a `Setting`.

Owns how a declaration becomes an option (flag, BATON_ variable, type, default, place in `--help`), and how what was given
becomes the field's value again. Knows a settings value by its fields alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from baton.core.setting import Panel, Setting, Unit, notes_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = Callable[..., None]

SIZE = "SIZE"
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PANELS = list(Panel)


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """One field with a `Setting`, as an option of a command."""

    field: str
    setting: Setting
    kind: Any
    """Python type of the option."""
    default: Any
    is_repeated: bool

    @property
    def parameter(self) -> str:
        """The name of the command's parameter, by which a TOML file knows it too."""
        return self.setting.name.replace("-", "_")

    def value(self, given: Any) -> Any:
        """The field's value."""
        if self.is_repeated:
            return tuple(given or ())
        if given is None or self.setting.unit is Unit.AS_IS:
            return given
        return parse_bytes(given, f"--{self.setting.name}") if self.setting.unit is Unit.BYTES else round(given * 1e6)


class GivenOptions:
    """The options of a command as they were given, by parameter name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def fields_of(self, owner: type[DataclassInstance]) -> dict[str, Any]:
        """Values for the fields of `owner`, without those whose option was not given and has no default."""
        return {
            option.field: option.value(self._values[option.parameter])
            for option in declared(owner)
            if not (option.setting.is_optional and self._values[option.parameter] is None)
        }


def parse_bytes(text: str, hint: str = "--kv-memory") -> int:
    """`2G`, `512MiB`, `1.5g` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 512M or 2G", param_hint=hint)
    return int(float(match[1]) * _SIZES[match[2].upper()])


def variable(name: str) -> str:
    return "BATON_" + name.upper().replace("-", "_")


# ── from declarations to options ─────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def declared(owner: type[DataclassInstance]) -> tuple[DeclaredOption, ...]:
    """The options of a settings class: its own fields first, then those of its bases."""
    hints = get_type_hints(owner, include_extras=True)
    found: list[DeclaredOption] = []
    for field in sorted(dataclasses.fields(owner), key=lambda field: _depth_of(owner, field.name)):
        kind, notes = notes_of(hints[field.name])
        settings = (note for note in notes if isinstance(note, Setting))
        found += [_option_of(field.name, setting, kind, field.default) for setting in settings]
    return tuple(found)


def _depth_of(owner: type, name: str) -> int:
    """Position in the MRO of the class that declares the field."""
    return next(depth for depth, base in enumerate(owner.__mro__) if name in inspect.get_annotations(base))


def _option_of(field: str, setting: Setting, kind: Any, default: Any) -> DeclaredOption:
    is_repeated = get_origin(kind) is tuple
    if is_repeated:
        kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
    elif setting.unit is Unit.BYTES:
        kind, default = str | None, None
    elif setting.unit is Unit.SECONDS:
        kind, default = float, default / 1e6
    if setting.is_optional:
        kind, default = kind | None, None
    return DeclaredOption(field, setting, kind, default, is_repeated)


def option_of(owner: type[DataclassInstance], name: str) -> Any:
    """The typer annotation of the option `name`, for another command that takes it too."""
    (found,) = (option for option in declared(owner) if option.setting.name == name)
    return _typer_info(found, is_brief=True)


def _typer_info(option: DeclaredOption, is_brief: bool) -> Any:
    """`is_brief`: shorten the metavar in `--help`, so that option names are not cut off."""
    setting = option.setting
    name = setting.name
    envvar = variable(name) if setting.has_variable else None
    if setting.is_argument:
        return typer.Argument(help=setting.help, envvar=envvar, show_envvar=False)
    is_switch = option.kind is bool and not setting.is_flag
    metavar = setting.metavar
    if is_brief and metavar is None:
        metavar = " " if is_switch else SIZE if setting.unit is Unit.BYTES else "N" if setting.least is not None else None
    return typer.Option(
        f"--{name}/--no-{name}" if is_switch else f"--{name}", help=setting.help, envvar=envvar, show_envvar=False,
        rich_help_panel=setting.panel.value or None, min=setting.least, max=setting.most, metavar=metavar,
    )  # fmt: skip


# ── from options to a command ────────────────────────────────────────────────────────────────────────────────────────────


def taking_settings(*owners: type[DataclassInstance], is_brief: bool = True) -> Callable[[Command], Command]:
    """Make a command of a function: the settings declared by `owners` become options where its parameter `given` stands.

    The function gets them as one `GivenOptions`; its other parameters are as typer has them.
    """

    def make(run: Command) -> Command:
        hints = get_type_hints(run, include_extras=True)
        parameters: dict[str, inspect.Parameter] = {}
        own = [name for name in inspect.signature(run).parameters if name != "given"]
        for name, one in inspect.signature(run).parameters.items():
            if name == "given":
                parameters |= {found.name: found for found in _parameters(owners, is_brief)}
            else:
                parameters[name] = one.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(run)
        def command(**values: Any) -> None:
            run(given=GivenOptions(values), **{name: values[name] for name in own})

        # Typer reads both.
        command.__dict__["__signature__"] = inspect.Signature(list(parameters.values()))
        command.__annotations__ = {name: one.annotation for name, one in parameters.items()} | {"return": None}
        return command

    return make


def _parameters(owners: tuple[type[DataclassInstance], ...], is_brief: bool) -> Iterator[inspect.Parameter]:
    for option in _in_order([option for owner in owners for option in declared(owner)]):
        yield inspect.Parameter(
            option.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=Annotated[option.kind, _typer_info(option, is_brief)],
        )


def _in_order(options: list[DeclaredOption]) -> list[DeclaredOption]:
    """Sorted by panel; within a panel as declared, except those that name the option they follow."""
    ordered = [option for option in options if option.setting.after is None]
    for option in options:
        if option.setting.after is not None:
            before = [at for at, other in enumerate(ordered) if other.setting.name == option.setting.after]
            ordered.insert(before[0] + 1 if before else len(ordered), option)
    return sorted(ordered, key=lambda option: (not option.setting.is_argument, _PANELS.index(option.setting.panel)))
