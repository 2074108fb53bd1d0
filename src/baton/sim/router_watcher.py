"""What a watcher of a simulated router is told, whether it checks anything or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.request import Submission
from baton.core.routing.events import Session
from baton.core.routing.identity import RequestNumber
from baton.wire.router_messages import FromInstance
from baton.wire.router_sessions import Act


class RouterView(Protocol):
    """What the router itself believes."""

    def open_at(self) -> dict[Session, int]:
        """How many choices are open at each member."""

    def holders(self, key: bytes) -> tuple[Session, ...]:
        """Who has this prefix cached."""


class RouterWatcher:
    """Is told of everything that a router hears and does: where laws are checked. This one checks nothing."""

    kept: dict[bytes, set[int]]
    """By origin: which instances are at work on a body."""

    def __init__(self) -> None:
        self.kept = {}

    def members(self) -> dict[int, set[bytes]]:
        """What each instance has said that it has cached."""
        return {}

    def begin(self, now_us: int) -> None:
        """A life of the router begins."""

    def died(self) -> None:
        """It is over."""

    def woke(self, now_us: int) -> None: ...

    def connected(self, session: Session, instance: int) -> None: ...

    def lost(self, session: Session) -> None: ...

    def heard(self, number: Session, message: FromInstance, now_us: int) -> None: ...

    def asked(self, body: RequestNumber, group: Sequence[Submission], origin: bytes, now_us: int) -> None: ...

    def left(self, body: RequestNumber) -> None: ...

    def cut(self, body: RequestNumber, choice: int) -> None: ...

    def claimed(self, body: RequestNumber) -> None: ...

    def acted(self, act: Act, now_us: int) -> None:
        """The router is about to do this."""

    def looked(self, view: RouterView, now_us: int) -> None:
        """Everything that was to be done is done."""
