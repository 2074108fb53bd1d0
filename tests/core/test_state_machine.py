"""A state machine obeys its table and counts what was taken."""

from __future__ import annotations

from enum import Enum

import pytest

from baton.core.errors import IllegalTransition
from baton.core.state_machine import StateMachine


class Lamp(Enum):
    DARK = "dark"
    LIT = "lit"


class Press(Enum):
    ON = "on"
    OFF = "off"


TABLE = {(Lamp.DARK, Press.ON): Lamp.LIT, (Lamp.LIT, Press.OFF): Lamp.DARK}


def test_a_move_of_the_table_leads_where_the_table_says_and_is_counted() -> None:
    machine = StateMachine(TABLE, "a lamp")
    assert machine.after(Lamp.DARK, Press.ON) is Lamp.LIT
    assert machine.moves() == {(Lamp.DARK, Press.ON): 1, (Lamp.LIT, Press.OFF): 0}


def test_any_other_move_is_an_error_that_names_both_sides_and_is_not_counted() -> None:
    machine = StateMachine(TABLE, "a lamp")
    assert not machine.allows(Lamp.LIT, Press.ON)
    with pytest.raises(IllegalTransition, match="a lamp in LIT cannot take the move ON"):
        machine.after(Lamp.LIT, Press.ON)
    assert not any(machine.moves().values())


def test_counts_are_a_copy() -> None:
    machine = StateMachine(TABLE, "a lamp")
    machine.moves()[Lamp.DARK, Press.ON] = 9
    assert machine.moves()[Lamp.DARK, Press.ON] == 0
