"""A Worker whose calls a CallWatch makes: all calls that change it, and only those."""

from __future__ import annotations

from typing import Any

from baton.core.engine.block_contents import BlockEvents
from baton.core.engine.change_journal import EngineChanges
from baton.core.engine.orders import Submit
from baton.core.engine.worker import Effect, Event, StepDone, Worker
from baton.wire.engine_messages import asked_bytes
from baton.wire.flight_recorder import CALL_BYTES, CallWatch

METHODS = ("handle", "changes", "block_events", "retell_blocks")
ROW_BYTES = 56
"""Of a row in a plan, its result and what is delivered of it."""


class WatchedWorker:
    def __init__(self, worker: Worker, watch: CallWatch) -> None:
        self._worker = worker
        self._watch = watch

    def handle(self, event: Event, now_us: int) -> list[Effect]:
        return self._watch.call("handle", self._worker.handle, event, now_us)

    def changes(self, now_us: int) -> EngineChanges:
        return self._watch.call("changes", self._worker.changes, now_us)

    def block_events(self) -> BlockEvents:
        return self._watch.call("block_events", self._worker.block_events)

    def retell_blocks(self) -> None:
        self._watch.call("retell_blocks", self._worker.retell_blocks)

    @property
    def has_block_events(self) -> bool:
        return self._worker.has_block_events

    def next_deadline(self) -> int | None:
        return self._worker.next_deadline()


def weight_of(arguments: tuple[Any, ...]) -> int:
    """Estimated bytes of a recorded call."""
    event = arguments[0] if arguments else None
    if type(event) is StepDone:
        return CALL_BYTES + ROW_BYTES * len(event.result.slots)
    if type(event) is Submit:
        return CALL_BYTES + sum(map(asked_bytes, event.group))
    return CALL_BYTES
