"""One connection to a Valkey or Redis server.

The client library connects, authenticates and chooses the database. Replies are read here: fetched objects go from the
socket straight into their buffers (the library copies twice more, at a quarter of the speed), and a call has one deadline,
however many pieces the reply comes in.

    _held   bytes received and not consumed, between _begin and _end; lines are read here, and the part of an object that
            was received together with a line
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence

import valkey
from valkey._parsers import BaseParser
from valkey.exceptions import ConnectionError as Disconnected
from valkey.exceptions import InvalidResponse, ValkeyError

from baton.kv.store import MISSING, OVERSIZED

Part = bytes | memoryview
Command = tuple[Part, ...]
Reply = bytes | int | None | ValkeyError | list["Reply"]
"""An error is an ordinary reply: it belongs to one command, and later commands have replies of their own."""

_HELD_BYTES = 1 << 12
_WHOLE_MAX = 1 << 20
"""Longest reply other than an object, in bytes."""
_ITEMS_MAX = 1 << 16
_DEPTH_MAX = 4
MOMENT_S = 0.001
"""The least time-out: zero would mean none."""


class ReplyParser(BaseParser):
    """Parses replies, both for the library's connection and for `ask` and `fetch`."""

    def __init__(self) -> None:
        self.deadline_s = 0.0
        self._socket: socket.socket | None = None
        self._bytes = bytearray(_HELD_BYTES)
        self._held = memoryview(self._bytes)
        self._begin = self._end = 0

    # ── what the library's connection calls ──────────────────────────────────────────────────────────────────────────────

    def on_connect(self, connection: ValkeyConnection) -> None:
        self._socket = connection._sock
        self._begin = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float) -> bool:
        """Whether unrequested bytes or the end of the connection are waiting: it cannot be used then."""
        if self._begin < self._end:
            return True
        line = self._open()
        waiting = select.poll()
        waiting.register(line, select.POLLIN)
        is_readable = bool(waiting.poll(timeout * 1000))
        return self._decrypts(line) if isinstance(line, ssl.SSLSocket) else is_readable

    def _decrypts(self, line: ssl.SSLSocket) -> bool:
        """Whether what waits is more than TLS's own messages: session tickets make the socket readable too."""
        line.settimeout(0)
        try:
            self._begin, self._end = 0, line.recv_into(self._held)
        except ssl.SSLWantReadError:
            return False
        return True

    def read_response(self, disable_decoding: bool = False) -> Reply:  # noqa: ARG002 - theirs; nothing is decoded
        reply = self._reply(_DEPTH_MAX)
        if isinstance(reply, Disconnected):
            raise reply
        return reply

    # ── what we call ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """Send all commands at once; returns one reply each."""
        self._send(commands)
        return [self._reply(_DEPTH_MAX) for _ in commands]

    def fetch(self, command: Command, into: Sequence[memoryview]) -> list[int]:
        """Send a command whose reply is a list of objects; returns the bytes of each, MISSING or OVERSIZED."""
        self._send([command])
        line = self._line()
        if line[:1] == b"-":
            raise _error(line)
        if line != b"*%d" % len(into):
            raise InvalidResponse("a list of another length than was asked for")
        return [self._object(view) for view in into]

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, commands: Sequence[Command]) -> None:
        waiting = b""
        for command in commands:
            waiting += b"*%d\r\n" % len(command)
            for part in command:
                waiting += b"$%d\r\n" % len(part)
                if isinstance(part, memoryview):
                    self._send_whole(waiting)
                    self._send_whole(part)
                    waiting = b"\r\n"
                else:
                    waiting += part + b"\r\n"
        self._send_whole(waiting)

    def _send_whole(self, part: Part) -> None:
        """Before the deadline: `sendall` of TLS has the time-out for each record, and not for all."""
        line = self._ready()
        if not isinstance(line, ssl.SSLSocket):
            line.sendall(part)
            return
        left = memoryview(part)
        while left:
            left = left[self._ready().send(left) :]

    def _object(self, view: memoryview) -> int:
        size = _size(self._line(), b"$")
        if size < 0:
            return MISSING
        if size > len(view):
            self._skip(size)
            return OVERSIZED
        self._read(view[:size])
        self._end_of_object()
        return size

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        match line[:1]:
            case b"+":
                return line[1:]
            case b":":
                return _number(line)
            case b"-":
                return _error(line)
            case b"$":
                return self._whole(_size(line, b"$"))
            case b"*" if depth and (items := _size(line, b"*")) <= _ITEMS_MAX:
                return [self._reply(depth - 1) for _ in range(items)]
            case _:
                raise InvalidResponse("a reply that none of our commands has")

    def _whole(self, size: int) -> bytes | None:
        if size < 0:
            return None
        if size > _WHOLE_MAX:
            raise InvalidResponse(f"a reply of {size} bytes")
        content = bytearray(size)
        self._read(memoryview(content))
        self._end_of_object()
        return bytes(content)

    def _line(self) -> bytes:
        """The next line, without its end."""
        while (at := self._bytes.find(b"\r\n", self._begin, self._end)) < 0:
            held = self._end - self._begin
            if held == _HELD_BYTES:
                raise InvalidResponse("a line without end")
            self._bytes[:held] = self._bytes[self._begin : self._end]
            self._begin, self._end = 0, held
            self._end += self._receive(self._held[held:])
        line = bytes(self._held[self._begin : at])
        self._begin = at + 2
        return line

    def _read(self, view: memoryview) -> None:
        at = min(len(view), self._end - self._begin)
        view[:at] = self._held[self._begin : self._begin + at]
        self._begin += at
        while at < len(view):
            at += self._receive(view[at:])

    def _skip(self, size: int) -> None:
        while size > 0:
            self._read(memoryview(bytearray(min(size, _WHOLE_MAX))))
            size -= _WHOLE_MAX
        self._end_of_object()

    def _end_of_object(self) -> None:
        if self._line():
            raise InvalidResponse("an object of another length than was said")

    def _receive(self, view: memoryview) -> int:
        size = self._ready().recv_into(view)
        if not size:
            raise Disconnected("the server hung up")
        return size

    def _ready(self) -> socket.socket:
        """The socket, with the time left until the deadline as its time-out."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._open().settimeout(left_s)
        return self._open()

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise Disconnected("not connected")
        return self._socket


class ValkeyConnection(valkey.Connection):
    """A connection of the library that reads replies with `ReplyParser`."""

    def __init__(
        self,
        host: str,
        port: int,
        db: int,
        username: str | None,
        password: str | None,
        timeout_s: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.reply_parser = ReplyParser()
        self._tls = tls
        self._timeout_s = timeout_s
        super().__init__(  # type: ignore[no-untyped-call]
            host=host, port=port, db=db, username=username, password=password,
            socket_timeout=timeout_s, socket_connect_timeout=timeout_s, socket_keepalive=True,
            parser_class=self._parser_of, client_name="baton", lib_name=None, lib_version=None,
        )  # fmt: skip

    def _parser_of(self, socket_read_size: int) -> ReplyParser:  # noqa: ARG002 - theirs; we read as much as we need
        return self.reply_parser

    def connect(self) -> None:
        self.reply_parser.deadline_s = time.monotonic() + self._timeout_s
        super().connect()  # type: ignore[no-untyped-call]

    def _connect(self) -> socket.socket:
        raw: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        if self._tls is None:
            return raw
        try:
            raw.settimeout(max(self.reply_parser.deadline_s - time.monotonic(), MOMENT_S))
            return self._tls.wrap_socket(raw, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise Disconnected(f"its certificate is not trusted: {error.verify_message}; ?ca=FILE names its CA") from error
        except ssl.SSLError as error:
            raise Disconnected(f"TLS fails: {(error.reason or str(error)).lower().replace('_', ' ')}") from error
        finally:
            raw.close()  # where it was wrapped, another object has its descriptor


def _size(line: bytes, kind: bytes) -> int:
    if line[:1] != kind:
        raise InvalidResponse("a reply of another kind than was asked for")
    return _number(line)


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise InvalidResponse("a number that is none") from None


def _error(line: bytes) -> ValkeyError:
    error: ValkeyError = BaseParser.parse_error(line[1:].decode("utf-8", "replace"))  # type: ignore[no-untyped-call]
    return error
