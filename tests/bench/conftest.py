from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.bench.server import Faults, OpenAiServer


@pytest.fixture
def serve() -> Iterator[Callable[[Faults | None], OpenAiServer]]:
    """Start servers in a loop of their own, so that commands that run their own loop can be tested too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers: list[OpenAiServer] = []

    def start(faults: Faults | None = None) -> OpenAiServer:
        server = OpenAiServer(faults)
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(5)
        servers.append(server)
        return server

    yield start
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()
