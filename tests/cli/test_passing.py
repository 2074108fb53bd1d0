"""Commands that take the options of others: what is theirs, what is passed on, and how it looks then."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.testing import CliRunner

from baton.cli.option_forwarding import given_for, taking_options_of


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def paint(
    wall: Annotated[str, typer.Argument()] = "north",
    colour: Annotated[Colour, typer.Option("--colour", envvar="PAINT_COLOUR")] = Colour.RED,
    coats: Annotated[int, typer.Option("--coats")] = 1,
    brush: Annotated[list[str] | None, typer.Option("--brush")] = None,
    dry: Annotated[bool, typer.Option("--dry/--no-dry")] = True,
) -> None: ...


def sweep(
    coats: Annotated[int, typer.Option("--coats")] = 9, broom: Annotated[str, typer.Option("--broom")] = "x"
) -> None: ...


seen: dict[str, tuple[str, ...]] = {}


def _renovate(context: typer.Context, wall: Annotated[str, typer.Argument()] = "south") -> None:
    seen["paint"] = given_for(context, paint, keep_back={"wall"})
    seen["sweep"] = given_for(context, sweep, keep_back=())
    seen["wall"] = (wall,)


def renovate(*arguments: str, **environment: str) -> str:
    seen.clear()
    app = typer.Typer()
    app.command()(taking_options_of(_renovate, (paint, sweep), leave_out={"brush"} if "no brushes" in environment else ()))
    result = CliRunner().invoke(app, list(arguments), env=environment)
    return result.output


def test_what_is_given_is_passed_on_as_it_was_given() -> None:
    renovate("west", "--colour", "blue", "--brush", "a", "--brush", "b", "--no-dry", "--broom", "y")
    assert seen["wall"] == ("west",)
    assert seen["paint"] == ("--colour", "blue", "--brush", "a", "--brush", "b", "--no-dry")
    assert seen["sweep"] == ("--broom", "y")


def test_what_is_not_given_is_not_passed_on() -> None:
    renovate()
    assert (seen["paint"], seen["sweep"]) == ((), ())


def test_an_option_of_both_goes_to_both() -> None:
    renovate("--coats", "3")
    assert (seen["paint"], seen["sweep"]) == (("--coats", "3"), ("--coats", "3"))


def test_what_the_environment_says_the_children_will_read_there() -> None:
    renovate(PAINT_COLOUR="blue")
    assert seen["paint"] == ()


def test_an_option_that_is_left_out_is_refused() -> None:
    assert "No such option: --brush" in renovate("--brush", "a", **{"no brushes": "1"})
    assert not seen
