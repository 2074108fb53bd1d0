"""The router's connections: one that proves the key and then sends nothing is closed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.core.routing.config import RouterConfig
from baton.core.routing.router import Router
from baton.node.sealed_connection import SealedConnection, connect
from baton.router.instance_connections import InstanceConnections
from baton.wire.router_sessions import RouterSessions
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
