"""`tcp`: the bytes travel on the line, straight from P's blocks into D's.

P gathers pieces from its pool into the socket, D scatters them into the blocks that it leased; nothing is copied in between
by us. Addresses look like `tcp:127.0.0.1:4711` and are numeric: resolving a name could block.
"""

from __future__ import annotations

import ipaddress
import socket

from baton.core.engine.plan import Int32s
from baton.kv.io_thread import Post
from baton.kv.receiver import ConnectionReceiver
from baton.kv.receiver_kind import KvSource
from baton.kv.sender import ConnectionSender
from baton.kv.transfer_contract import KvMemory, Receiver, ReceiverOptions, Report, Sender, SenderOptions

BACKLOG = 128


def tcp_receiver(memory: KvMemory, report: Report, options: ReceiverOptions) -> Receiver:
    return ConnectionReceiver(memory, report, _TcpReceiverKind(options.get("host", "127.0.0.1")), options)


def tcp_sender(memory: KvMemory, report: Report, options: SenderOptions) -> Sender:
    return ConnectionSender(memory, report, TcpSenderKind(), options)


def listen(host: str) -> socket.socket:
    """On a free port; does not block."""
    listener = socket.socket(_family(host))
    try:
        listener.bind((host, 0))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def written_address(kind: str, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{kind}:[{host}]:{port}" if ":" in host else f"{kind}:{host}:{port}"


def begin_connecting(kind: str, address: str) -> socket.socket:
    """A socket on its way to a numeric address of this kind. Raises OSError or ValueError."""
    found, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if found != kind or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"no address of {kind}")
    sock = socket.socket(_family(host))
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect((host, int(port)))
    except BlockingIOError:
        pass  # it is on its way
    except OSError:
        sock.close()
        raise
    return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET


class TcpSenderKind:
    kind = "tcp"
    carries_bytes = True
    shares_device = False
    keeps_last = False

    def connect(self, address: str) -> socket.socket:
        return begin_connecting(self.kind, address)

    def introduce(self, _blocks: Int32s) -> tuple[bytes, list[int]]:
        return b"", []

    def close(self) -> None:
        """Nothing is held."""


class _TcpReceiverKind:
    kind = "tcp"

    def __init__(self, host: str) -> None:
        self.listener = listen(host)
        self.address = written_address(self.kind, self.listener)

    def begin(self, _post: Post) -> None:
        """Nothing happens elsewhere."""

    def admit(self, _sock: socket.socket) -> str | None:
        return None

    def introduction_bytes(self, _blocks: int) -> int:
        return 0

    def open_source(self, _introduction: bytes, _fds: list[int], _blocks: int) -> KvSource | str | None:
        return None

    def close(self) -> None:
        self.listener.close()
