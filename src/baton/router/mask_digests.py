"""Answers the router's questions about masks, with the processes that compile constraints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.request import Constraint
from baton.core.routing.events import WantMask
from baton.router.instance_connections import InstanceConnections
from baton.wire.router_sessions import Act

log = logging.getLogger("baton.constraints")


class MaskComputer(Protocol):
    async def mask_digest(self, constraint: Constraint, outputs: Sequence[int]) -> bytes:
        """Empty where it cannot be computed."""


class MaskDigests:
    def __init__(self, computer: MaskComputer, connections: InstanceConnections) -> None:
        self._computer = computer
        self._connections = connections
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, act: Act, now_us: int) -> None:  # noqa: ARG002  a Watcher
        if isinstance(act, WantMask):
            task = asyncio.create_task(self._answer(act))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    async def _answer(self, wanted: WantMask) -> None:
        try:
            digest = await self._computer.mask_digest(wanted.constraint, wanted.outputs)
        except Exception:
            self._came(wanted, b"")  # the router waits for an answer, whatever happens
            raise
        self._came(wanted, digest)

    def _came(self, wanted: WantMask, digest: bytes) -> None:
        self._connections.mask_came(wanted.request, wanted.choice, len(wanted.outputs), digest)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a mask could not be computed", exc_info=error)
