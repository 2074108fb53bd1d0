"""One in so many of equal cases for `make test`, the others for `make test-long`: together they run each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, cases: Iterable[object]) -> list[Any]:
    """The parameters of a test: the first of every so many is quick, the others are slow."""
    return [case if place % every == 0 else _slow(case) for place, case in enumerate(cases)]


def _slow(case: object) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
