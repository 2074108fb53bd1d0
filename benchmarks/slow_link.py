"""A slow network between an instance and its store: a relay on the loopback with a limit of bytes a second each way.

Owns the relay's socket and threads. All connections share the link, as they would share a cable.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from baton.kv.rate_limit import ByteRateLimit

HOST = "127.0.0.1"
CHUNK = 64 << 10


class _LimitedDirection:
    """One direction of the link, shared by all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._pace = ByteRateLimit(bytes_per_s)
        self._turn = threading.Lock()

    def pass_on(self, data: bytes, to: socket.socket) -> None:
        view = memoryview(data)
        while view:
            with self._turn:
                time.sleep(self._pace.delay_s(time.monotonic()))
                part = view[: self._pace.at_once(len(view))]
                self._pace.spent(len(part), time.monotonic())
            to.sendall(part)
            view = view[len(part) :]


class _SlowRelay:
    def __init__(self, port: int, bytes_per_s: float) -> None:
        """Relay to this loopback port."""
        self._target = (HOST, port)
        self._there, self._back = _LimitedDirection(bytes_per_s), _LimitedDirection(bytes_per_s)
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="slow-link", daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # not connected
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._open += (client, server)
                for source, target, lane in ((client, server, self._there), (server, client, self._back)):
                    threading.Thread(target=_pump, args=(source, target, lane), name="slow-link", daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, lane: _LimitedDirection) -> None:
    with contextlib.suppress(OSError):  # either end is gone
        while data := source.recv(CHUNK):
            lane.pass_on(data, target)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def slow_link(port: int, bytes_per_s: float) -> Iterator[int]:
    """Relay to `port` at a limited rate; yields the relay's port."""
    relay = _SlowRelay(port, bytes_per_s)
    try:
        yield relay.port
    finally:
        relay.close()
