from __future__ import annotations

import socket
import threading

import pytest

from benchmarks import slow_link as slow_link_module
from benchmarks.slow_link import HOST, slow_link


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


class VirtualTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_bytes_come_through_in_order_and_no_faster_than_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, clock = bytes(range(256)) * 400, VirtualTime()
    monkeypatch.setattr(slow_link_module, "time", clock)
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        with slow_link(listener.getsockname()[1], bytes_per_s=1e3) as port, socket.create_connection((HOST, port)) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            came = b"".join(iter(lambda: client.recv(65536), b""))
    assert came == sent
    assert clock.now_s - 100.0 >= 102  # seconds for 102,400 bytes; those there and back share the clock


def test_who_was_connected_is_cut_off_when_the_link_ends() -> None:
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        with slow_link(listener.getsockname()[1], bytes_per_s=1e6) as port:
            client = socket.create_connection((HOST, port))
            client.sendall(b"x")
            assert client.recv(1) == b"x"
        client.settimeout(10)
        assert client.recv(1) == b""
        client.close()
