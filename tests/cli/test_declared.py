"""A field that is declared once is an option, a variable and a key of the file, and becomes the field again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.declared_options import GivenOptions, parse_bytes, taking_settings
from baton.cli.options import config_file
from baton.core.setting import Bounds, Panel, Setting, Unit


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Walls:
    wall: Annotated[str, Setting("wall", Panel.PLAIN, "Which.", is_argument=True)] = "north"
    colour: Annotated[Colour, Setting("colour", Panel.KV, "Of the paint.")] = Colour.RED
    coats: Annotated[int, Setting("coats", Panel.KV, "How many.", 1, 9)] = 2


@dataclass(frozen=True, kw_only=True)
class Room(Walls):
    door: Annotated[str, Setting("door-name", Panel.API, "A name.", is_optional=True)] = "oak"
    brushes: Annotated[tuple[str, ...], Setting("brush", Panel.API, "Repeat.")] = ()
    bucket_bytes: Annotated[int | None, Setting("bucket", Panel.API, "A size.", unit=Unit.BYTES, after="brush")] = None
    drying_us: Annotated[int, Setting("drying", Panel.API, "Seconds.", 0.1, unit=Unit.SECONDS), Bounds(1)] = 500_000
    dust: Annotated[bool, Setting("dust", Panel.API, "Sweep.")] = True
    loud: Annotated[bool, Setting("loud", Panel.API, "A flag.", is_flag=True, has_variable=False)] = False
    made_here: int = 7


made: list[Room] = []
Config = Annotated[Path | None, config_file(lambda: paint)]


@taking_settings(Room)
def paint(*, given: GivenOptions, config: Config = None) -> None:
    """Paint a room."""
    made.append(Room(**given.fields_of(Room)))


def call(*arguments: str, **environment: str) -> str:
    made.clear()
    app = typer.Typer()
    app.command()(paint)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment}).output


def test_without_options_the_fields_have_their_defaults() -> None:
    call()
    assert made == [Room()]


def test_every_way_to_set_a_field_gives_the_same_value(tmp_path: Path) -> None:
    file = tmp_path / "paint.toml"
    file.write_text(
        'colour = "blue"\ncoats = 3\ndoor-name = "elm"\nbrush = ["a", "b"]\nbucket = "2K"\ndrying = 1.5\ndust = false\n'
    )
    wanted = Room(
        colour=Colour.BLUE, coats=3, door="elm", brushes=("a", "b"), bucket_bytes=2048, drying_us=1_500_000, dust=False
    )
    flags = ("--colour", "blue", "--coats", "3", "--door-name", "elm", "--brush", "a", "--brush", "b", "--no-dust")
    call(*flags, "--bucket", "2K", "--drying", "1.5")
    assert made == [wanted]
    call("--config", str(file))
    assert made == [wanted]
    call(
        BATON_COLOUR="blue", BATON_COATS="3", BATON_DOOR_NAME="elm", BATON_BRUSH="a b", BATON_BUCKET="2K",
        BATON_DRYING="1.5", BATON_DUST="0",
    )  # fmt: skip
    assert made == [wanted]


def test_an_argument_is_given_by_its_place_and_a_flag_has_no_opposite() -> None:
    call("south", "--loud", BATON_LOUD="0")
    assert (made[0].wall, made[0].loud) == ("south", True)
    assert "No such option: --no-loud" in call("--no-loud")


@pytest.mark.parametrize("options", [("--coats", "0"), ("--coats", "10"), ("--drying", "0.01")])
def test_bounds_are_those_of_the_declaration(options: tuple[str, str]) -> None:
    assert f"Invalid value for '{options[0]}'" in re.sub(r"\x1b\[[0-9;]*m", "", call(*options))
    assert not made


def test_help_has_panels_in_their_order_and_options_as_declared() -> None:
    shown = call("--help")
    order = [name for name in re.findall(r"--([a-z-]+)", shown) if not name.startswith("no-")]
    wanted = ["door-name", "brush", "bucket", "drying", "dust", "loud", "colour", "coats"]
    assert [name for name in dict.fromkeys(order) if name in wanted] == wanted


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("1.5k", 1536), ("512MiB", 512 << 20), ("2 GB", 2 << 30)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_what_is_no_size_is_told() -> None:
    with pytest.raises(typer.BadParameter, match="'lots' is not a size"):
        parse_bytes("lots")
