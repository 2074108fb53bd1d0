"""Bounds are declared with a field, and checked by one function."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Annotated

import pytest

from baton.core.setting import BadConfig, Bounds, Panel, Setting, Unit, check_bounds


@dataclass(frozen=True)
class Oven:
    racks: Annotated[int, Setting("racks", Panel.PLAIN, "", 1, 3)] = 1
    salt: Annotated[float, Bounds(least=0)] = 0.0
    heat: Annotated[float, Bounds(above=0)] = 1.0
    baking_us: Annotated[int, Setting("baking", Panel.PLAIN, "", 0.5, unit=Unit.SECONDS), Bounds(least=1)] = 1
    guests: Annotated[int | None, Bounds(least=1)] = None
    name: str = "oven"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("racks", 0, "racks must be at least 1, not 0"),
        ("racks", 4, "racks must be at most 3, not 4"),
        ("salt", -0.5, "salt must not be negative, but is -0.5"),
        ("salt", nan, "salt must not be negative, but is nan"),
        ("heat", 0, "heat must be more than 0, not 0"),
        ("baking_us", 0, "baking_us must be at least 1, not 0"),
        ("guests", 0, "guests must be at least 1, not 0"),
    ],
)
def test_a_value_outside_of_its_bounds_is_told_with_its_name(field: str, value: float, told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        check_bounds(Oven(**{field: value}))  # type: ignore[arg-type]


def test_values_at_their_bounds_are_accepted() -> None:
    check_bounds(Oven(racks=3, salt=0, heat=0.001, baking_us=1, guests=1))
    check_bounds(Oven(racks=1))
