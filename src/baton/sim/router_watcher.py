"""The interface of watchers of a simulated router; the base class checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.request import Submission
from baton.core.routing.events import Session
from baton.core.routing.identity import RequestNumber
from baton.wire.router_messages import FromInstance
from baton.wire.router_sessions import Act


class RouterView(Protocol):
    """State of the router that a watcher may compare with its own record."""

    def open_at(self) -> dict[Session, int]:
        """Number of open choices at each member."""

    def yields_of(self, origin: bytes) -> tuple[int, ...]:
        """By choice: how often it was preempted anywhere, as far as the router knows; empty if it is not open."""

    def holders(self, key: bytes) -> tuple[Session, ...]:
        """Sessions of the members that have this prefix cached."""


class RouterWatcher:
    """Called for every message, act and crash of a router. This one checks nothing."""

    kept: dict[bytes, set[int]]
    """By origin: the instances that were computing a request when the router crashed."""

    def __init__(self) -> None:
        self.kept = {}

    def members(self) -> dict[int, set[bytes]]:
        """By instance: the prefix keys that it has reported as cached."""
        return {}

    def begin(self, now_us: int) -> None:
        """A life of the router begins."""

    def died(self) -> None:
        """The router crashed."""

    def woke(self, now_us: int) -> None: ...

    def connected(self, session: Session, instance: int) -> None: ...

    def lost(self, session: Session, now_us: int) -> None: ...

    def heard(self, number: Session, message: FromInstance, now_us: int) -> None: ...

    def asked(self, number: RequestNumber, group: Sequence[Submission], origin: bytes, now_us: int) -> None: ...

    def left(self, number: RequestNumber) -> None: ...

    def cut(self, number: RequestNumber, choice: int) -> None: ...

    def claimed(self, number: RequestNumber) -> None: ...

    def acted(self, act: Act, now_us: int) -> None:
        """Called before each act of the router."""

    def looked(self, view: RouterView, now_us: int) -> None:
        """Called when all acts of an event have been carried out."""
