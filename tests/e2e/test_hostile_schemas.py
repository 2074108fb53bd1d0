"""Schemas made to be dear are refused within two seconds, the first after a start too. Three times that is allowed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from benchmarks.hostile_schemas import ANSWER_S_MAX, KINDS, STATUSES, body_of, posted
from tests.support.server import ServerProcess, baton_router, baton_serve

pytestmark = [pytest.mark.slow, pytest.mark.timed]

LIMIT_S = 3 * ANSWER_S_MAX
DEAR = "counted pattern"
"""Takes all the time that compiling may take."""
CODES = ("constraint_too_complex", "unsupported_constraint")


def _answered(server: ServerProcess, kind: str, number: int) -> tuple[float, int, str]:
    body = body_of(KINDS[kind](number))
    began = time.monotonic()
    status, code = posted(server.url, body)
    took_s = time.monotonic() - began
    print(f"{kind}: {status} {code}, {took_s:.2f} s")
    return took_s, status, code


@pytest.mark.parametrize("start", [baton_serve, baton_router], ids=["serve", "router"])
def test_the_first_schema_after_a_start_is_refused_in_time(
    start: Callable[..., AbstractContextManager[ServerProcess]],
) -> None:
    with start("--executor", "scripted") as server:
        for number in (1, 2, 3):
            took_s, status, code = _answered(server, DEAR, number)
            assert status == 400
            assert code in CODES
            assert took_s <= LIMIT_S
        assert sum(server.metric("baton_constraints_total", outcome=ended) for ended in ("too_complex", "refused")) == 3
        assert server.metric("baton_constraint_compile_seconds_count") == 3


def test_every_kind_of_hostile_schema_is_answered_in_time() -> None:
    with baton_serve("--executor", "scripted") as server:
        for kind in KINDS:
            took_s, status, code = _answered(server, kind, 1)
            assert status in STATUSES, (kind, status, code)
            assert took_s <= LIMIT_S, kind
        assert server.metric("baton_constraint_cache_bytes") > 0
