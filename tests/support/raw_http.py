"""A client that writes bytes to a server, for what no library would send."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

STALL_S = 1.0
"""A server that takes nothing for this long takes nothing more."""
ANSWER_S_MAX = 30.0


BUFFER_BYTES = 64 * 1024
"""What the system holds for this client is little, so that what a server takes is what it holds itself."""


@contextlib.contextmanager
def connected(url: str, receive_bytes: int = BUFFER_BYTES) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        client.settimeout(ANSWER_S_MAX)
        client.connect((parts.hostname, parts.port))
        yield client


def send_as_taken(client: socket.socket, data: bytes, times: int) -> int:
    """Send so often, until the server takes nothing more or closes; returns how many bytes it took."""
    client.setblocking(False)
    taken, rest = 0, memoryview(data)
    try:
        while taken < times * len(data):
            if not select.select([], [client], [], STALL_S)[1]:
                break
            sent = client.send(rest)
            taken += sent
            rest = rest[sent:] or memoryview(data)
    except OSError:  # it has closed the connection
        pass
    client.settimeout(ANSWER_S_MAX)
    return taken


def read_to_end(client: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    """0: there was none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def exchange(url: str, request: bytes) -> bytes:
    """The answer to one request, after which the server closes."""
    with connected(url) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(request)
        return read_to_end(client)


class PeakMemory:
    """The most resident memory of a process since this object was made, less what it had then."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before_kb = self._kb("VmRSS")

    def grown_mb(self) -> float:
        return (self._kb("VmHWM") - self._before_kb) / 1024

    def _kb(self, name: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
        raise KeyError(name)
