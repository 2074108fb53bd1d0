"""What the router is told of masks: always something, also where they cannot be computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from baton.core.engine.request import Constraint
from baton.core.routing.events import RequestNumber, WantMask
from baton.router.mask_digests import MaskDigests

WANTED = WantMask(RequestNumber(3), 1, Constraint("llguidance", "1", "{}"), (5, 6))


class Computer:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def mask_digest(self, constraint: Constraint, outputs: Sequence[int]) -> bytes:
        if self.error is not None:
            raise self.error
        return b"digest"


class Connections:
    def __init__(self) -> None:
        self.came: list[tuple[int, int, int, bytes]] = []

    def mask_came(self, number: RequestNumber, choice: int, outputs: int, digest: bytes) -> None:
        self.came.append((number, choice, outputs, digest))


@pytest.mark.parametrize(
    ("error", "digest"), [(None, b"digest"), (RuntimeError("broken"), b""), (OSError("no descriptors"), b"")]
)
async def test_the_router_gets_an_answer_whatever_happens(
    caplog: pytest.LogCaptureFixture, error: Exception | None, digest: bytes
) -> None:
    connections = Connections()
    digests = MaskDigests(Computer(error), connections)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, "baton.constraints"):
        digests.take(WANTED, 0)
        for _ in range(5):
            await asyncio.sleep(0)
    assert connections.came == [(3, 1, 2, digest)]
    assert ("a mask could not be computed" in caplog.text) == (error is not None)
