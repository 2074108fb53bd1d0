"""RouterSessions whose calls a CallWatch makes: all calls that change them, and only those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.core.engine.request import Submission
from baton.core.routing.events import Session
from baton.core.routing.identity import RequestNumber
from baton.core.routing.router import Router
from baton.wire.engine_messages import StepOutput, asked_bytes
from baton.wire.flight_recorder import CALL_BYTES, CallWatch
from baton.wire.router_messages import FromInstance
from baton.wire.router_sessions import Act, RouterSessions

METHODS = ("connected", "lost", "receive", "submit", "leave", "stop_choice", "claim", "mask_came", "drain", "tick")
ROW_BYTES = 400
"""Of a row of a step in its message and in what is delivered of it."""


class WatchedSessions:
    def __init__(self, sessions: RouterSessions, watch: CallWatch) -> None:
        self._sessions = sessions
        self._call = watch.call

    @property
    def router(self) -> Router:
        return self._sessions.router

    def next_deadline(self) -> int | None:
        return self._sessions.next_deadline()

    def connected(self, now_us: int) -> Session:
        return self._call("connected", self._sessions.connected, now_us)

    def lost(self, number: Session, reason: str, now_us: int) -> list[Act]:
        return self._call("lost", self._sessions.lost, number, reason, now_us)

    def receive(self, number: Session, message: FromInstance, now_us: int) -> list[Act]:
        return self._call("receive", self._sessions.receive, number, message, now_us)

    def submit(
        self, tenant: str, group: Sequence[Submission], origin: bytes, now_us: int
    ) -> tuple[RequestNumber, list[Act]]:
        return self._call("submit", self._sessions.submit, tenant, tuple(group), origin, now_us)

    def leave(self, number: RequestNumber, now_us: int) -> list[Act]:
        return self._call("leave", self._sessions.leave, number, now_us)

    def stop_choice(self, number: RequestNumber, choice: int, keep: int, now_us: int) -> list[Act]:
        return self._call("stop_choice", self._sessions.stop_choice, number, choice, keep, now_us)

    def claim(self, number: RequestNumber, now_us: int, group: Sequence[Submission] = ()) -> list[Act]:
        return self._call("claim", self._sessions.claim, number, now_us, tuple(group))

    def mask_came(self, number: RequestNumber, choice: int, outputs: int, digest: bytes, now_us: int) -> list[Act]:
        return self._call("mask_came", self._sessions.mask_came, number, choice, outputs, digest, now_us)

    def drain(self, name: str, now_us: int) -> list[Act]:
        return self._call("drain", self._sessions.drain, name, now_us)

    def tick(self, now_us: int) -> list[Act]:
        return self._call("tick", self._sessions.tick, now_us)


def weight_of(arguments: tuple[Any, ...]) -> int:
    """Estimated bytes of a recorded call."""
    if len(arguments) == 4 and type(arguments[2]) is bytes:  # submit
        group: tuple[Submission, ...] = arguments[1]
        return CALL_BYTES + len(arguments[2]) + sum(map(asked_bytes, group))
    if len(arguments) == 3 and type(arguments[1]) is StepOutput:
        rows = len(arguments[1].serials) // 8
        return CALL_BYTES + ROW_BYTES * rows
    return CALL_BYTES
