"""The router's connections: one that proves the key and then sends nothing is closed, and an error ends what drives them."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.api.engine import EngineDead
from baton.core.errors import InvariantViolated
from baton.core.routing.config import RouterConfig
from baton.core.routing.router import Router
from baton.node.sealed_connection import SealedConnection, connect
from baton.router.instance_connections import InstanceConnections
from baton.wire.engine_messages import WireError
from baton.wire.router_messages import ORIGIN_BYTES_MAX, AllHeldSaid, encode_membership
from baton.wire.router_sessions import Act, RouterSessions
from baton.wire.sealed_stream import ConnectionEnd, ConnectionStage

KEY = b"k" * 32
DEADLINE_S = 20.0


class Silent:
    def connected(self, line: SealedConnection) -> None: ...

    def opened(self, line: SealedConnection) -> None: ...

    def received(self, line: SealedConnection, frame: bytes) -> None: ...

    def ended(self, line: SealedConnection, end: ConnectionEnd) -> None: ...


async def test_who_says_nothing_is_hung_up_although_nothing_else_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.wire.router_sessions.JOIN_US", 50_000)
    sessions = InstanceConnections(RouterSessions(Router(RouterConfig(), b"secret", 1), "r"), KEY, "r")
    listener = socket.create_server(("127.0.0.1", 0))
    await sessions.open(listener)
    line = SealedConnection(KEY, "instance", Silent(), connects_to="r")
    try:
        async with asyncio.timeout(DEADLINE_S):
            end = await connect(line, "127.0.0.1", listener.getsockname()[1], DEADLINE_S)
        assert end.was is ConnectionStage.OPEN
    finally:
        sessions.close("the test is over")
        await line.closed.wait()


def driven(router_sessions: RouterSessions) -> InstanceConnections:
    sessions = InstanceConnections(router_sessions, KEY, "r")
    sessions.watch(lambda _act, _now_us: None)
    return sessions


def lost_books(*_: object) -> list[Act]:
    raise KeyError("books")


async def test_a_router_that_raised_is_driven_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    router_sessions = RouterSessions(Router(RouterConfig(), b"secret", 1), "r")
    sessions = driven(router_sessions)
    line = object()
    sessions.opened(line)  # type: ignore[arg-type]
    raised: list[int] = []

    def broken(*_: object) -> list[Act]:
        raised.append(1)
        raise InvariantViolated("the books do not add up")

    monkeypatch.setattr(router_sessions.router, "handle", broken)
    with pytest.raises(InvariantViolated):
        sessions.drain("anybody")
    assert sessions.failed.is_set()
    assert str(sessions.death) == "the router failed: the books do not add up"
    sessions.drain("anybody")
    sessions.received(line, encode_membership(AllHeldSaid()))  # type: ignore[arg-type]
    sessions.ended(line, ConnectionEnd(ConnectionStage.OPEN, None, "gone"))  # type: ignore[arg-type]
    with pytest.raises(EngineDead, match="the books do not add up"):
        sessions.submit("tenant", [], b"", lambda _number, _now_us: None)
    assert len(raised) == 1


async def test_a_deadline_that_raises_does_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router_sessions = RouterSessions(Router(RouterConfig(), b"secret", 1), "r")
    monkeypatch.setattr(router_sessions.router, "next_deadline", lambda: 0)
    monkeypatch.setattr(router_sessions, "tick", lost_books)
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    sessions = driven(router_sessions)
    sessions.opened(object())  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        await sessions.failed.wait()
    await asyncio.sleep(0.01)
    assert len(told) == 1
    assert str(sessions.death) == "the router failed: KeyError: 'books'"


async def test_a_watcher_that_raises_ends_the_router_too() -> None:
    router_sessions = RouterSessions(Router(RouterConfig(), b"secret", 1), "r")
    sessions = driven(router_sessions)
    sessions.watch(lost_books)
    with pytest.raises(KeyError):
        sessions.submit("tenant", [], bytes(ORIGIN_BYTES_MAX + 1), lambda _number, _now_us: None)
    assert sessions.failed.is_set()


async def test_an_instance_that_breaks_the_protocol_ends_its_connection_and_not_the_router() -> None:
    sessions = driven(RouterSessions(Router(RouterConfig(), b"secret", 1), "r"))
    line = object()
    sessions.opened(line)  # type: ignore[arg-type]
    with pytest.raises(WireError):
        sessions.received(line, encode_membership(AllHeldSaid()))  # type: ignore[arg-type]
    assert not sessions.failed.is_set()
    sessions.close("the test is over")
