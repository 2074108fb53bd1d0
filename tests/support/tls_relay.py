"""Terminates TLS before a plain server, over real sockets: for servers whose build here has no TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support.certificates import Pair

PIECE_BYTES = 1 << 16


class TlsRelay:
    """Runs in a thread of its own."""

    def __init__(self, port: int, pair: Pair, client_authority: Path | None) -> None:
        self._target = port
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(pair.certificate, pair.key)
        if client_authority is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_authority)
        self._loop = asyncio.new_event_loop()
        self._writers: list[asyncio.StreamWriter] = []
        """Of clients."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.received = b""
        """The beginning of what clients sent, in plain."""
        self.connections = 0
        """Handshakes that were completed."""
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", self._target)
        here = asyncio.create_task(self._pass_on(reader, plain_writer, is_client=True))
        there = asyncio.create_task(self._pass_on(plain_reader, writer, is_client=False))
        try:
            await asyncio.wait((here, there), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (here, there):
                task.cancel()
            await asyncio.gather(here, there, return_exceptions=True)
            for end in (writer, plain_writer):
                end.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE_BYTES):
                if is_client and len(self.received) < PIECE_BYTES:
                    self.received += data
                sink.write(data)
                await sink.drain()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        # None is cancelled: one that is just connecting would leave a connection that nobody closes.
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.contextmanager
def tls_relay(port: int, pair: Pair, client_authority: Path | None = None) -> Iterator[TlsRelay]:
    """Before the plain server at `port` of this machine."""
    relay = TlsRelay(port, pair, client_authority)
    try:
        yield relay
    finally:
        relay.close()
