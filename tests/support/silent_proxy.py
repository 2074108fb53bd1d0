"""A TCP proxy that can go silent in one direction: it reads and acknowledges every byte of it, and passes none on.

No packet is lost on it, so neither kernel sees anything wrong: what a load balancer, a tunnel or a container network does
when it has forgotten half of a connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

PIECE_BYTES = 1 << 16


class SilentProxy:
    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallows_answers = threading.Event()
        """Set: what the target says does not reach who connected."""
        self.swallowed_bytes = 0
        self._sockets: list[socket.socket] = []
        self._is_over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_over = True
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._target)
                self._sockets += [here, there]
                for source, sink, answers in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pass_on, args=(source, sink, answers), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):  # either end is gone
            while data := source.recv(PIECE_BYTES):
                if answers and self.swallows_answers.is_set():
                    self.swallowed_bytes += len(data)
                else:
                    sink.sendall(data)
        if not (answers and self.swallows_answers.is_set()):
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def silent_proxy(target: str) -> Iterator[SilentProxy]:
    proxy = SilentProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
