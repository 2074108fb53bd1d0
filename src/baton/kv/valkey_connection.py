"""One connection to a Valkey or Redis server.

The client library connects, authenticates and chooses the database. What it lacks is ours: fetched objects go from the
socket straight into the buffers that wait for them (its own way copies twice more, at a quarter of the speed), and a call
has one deadline, however many pieces the answer comes in.

    _held   bytes received and not yet taken, between _begin and _end; lines are read here, objects only as far as they
            came along with a line
"""

from __future__ import annotations

import select
import socket
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
"""An error is a reply like another: it belongs to one command, and those after it have replies of their own."""

_HELD_BYTES = 1 << 12
_WHOLE_MAX = 1 << 20
"""Longest reply that is not an object."""
_ITEMS_MAX = 1 << 16
_DEPTH_MAX = 4


class ReplyParser(BaseParser):
    """Replies, as the library's connection reads them, and as we do."""

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
        """Something came that nobody asked for, or the server hung up: the connection is of no use."""
        if self._begin < self._end:
            return True
        waiting = select.poll()
        waiting.register(self._open(), select.POLLIN)
        return bool(waiting.poll(timeout * 1000))

    def read_response(self, disable_decoding: bool = False) -> Reply:  # noqa: ARG002 - theirs; nothing is decoded
        reply = self._reply(_DEPTH_MAX)
        if isinstance(reply, Disconnected):
            raise reply
        return reply

    # ── what we call ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        """All of them in one go, and a reply each."""
        self._send(commands)
        return [self._reply(_DEPTH_MAX) for _ in commands]

    def fetch(self, command: Command, into: Sequence[memoryview]) -> list[int]:
        """A command that is answered with a list of objects: bytes put into each buffer, MISSING or OVERSIZED."""
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
                    self._ready().sendall(waiting)
                    self._ready().sendall(part)
                    waiting = b"\r\n"
                else:
                    waiting += part + b"\r\n"
        self._ready().sendall(waiting)

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
        """Up to the end of the line, without it."""
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
        """With what is left of the time."""
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
    """A connection of the library's, with our way of reading replies."""

    def __init__(self, host: str, port: int, db: int, username: str | None, password: str | None, timeout_s: float) -> None:
        self.reply_parser = ReplyParser()
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
