"""TLS between a connection's transport and its protocol: what a client sends is decrypted, what is written is encrypted.

    client ──▶ raw transport ──▶ decrypt() ──▶ protocol ──▶ write() ──▶ raw transport ──▶ client

Holds no bytes of its own beyond one incomplete record: all that is written waits in the raw transport, encrypted, so that
its buffer size and its signals to pause and to resume writing are those of the whole connection. The event loop's own TLS
keeps further buffers, which limits on unread answers would not see, and tells its protocol nothing before a handshake has
ended, so that connections which never end it would not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

PIECE_BYTES = 16 * 1024
"""As much as a TLS record has at most. More at once would grow the buffers of OpenSSL, which keep their size for as long as
the connection lasts."""


class TlsTransport(asyncio.Transport):
    def __init__(self, raw: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self.raw = raw
        self.is_established = False
        """Whether the handshake is complete; nothing may be written before."""
        self.is_ended = False
        """The client has said that it sends no more."""
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_closed_here = False
        """Whether this side has ended the connection."""

    def decrypt(self, data: bytes) -> bytes:
        """What the client has written, as far as it is whole. Raises ssl.SSLError where this is no sound TLS."""
        parts: list[bytes] = []
        whole = memoryview(data)
        try:
            for at in range(0, len(whole), PIECE_BYTES):
                self._incoming.write(whole[at : at + PIECE_BYTES])
                self._read_into(parts)
        finally:
            self._send()  # of the handshake, and alerts
        return b"".join(parts)

    def _read_into(self, parts: list[bytes]) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            if not self.is_established:
                self._tls.do_handshake()
                self.is_established = True
            while part := self._tls.read(PIECE_BYTES):
                parts.append(part)
            self.is_ended = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closed_here or not data:
            return
        rest = memoryview(data)
        encrypted = []
        while rest:
            rest = rest[self._tls.write(rest[:PIECE_BYTES]) :]
            encrypted.append(self._outgoing.read())
        self.raw.write(b"".join(encrypted))

    def _send(self) -> None:
        if self._outgoing.pending and not self.raw.is_closing():
            self.raw.write(self._outgoing.read())

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._end()
        self.raw.write_eof()

    def close(self) -> None:
        self._end()
        self.raw.close()

    def abort(self) -> None:
        self.is_closed_here = True
        self.raw.abort()

    def _end(self) -> None:
        """Say that nothing more is sent."""
        if self.is_closed_here:
            return
        self.is_closed_here = True
        if self.is_established:
            with contextlib.suppress(ssl.SSLError):  # the client's own end has not come, or the connection is broken
                self._tls.unwrap()
            self._send()

    # ── as the raw transport has it ──────────────────────────────────────────────────────────────────────────────────────

    def is_closing(self) -> bool:
        return self.raw.is_closing()

    def get_write_buffer_size(self) -> int:
        return self.raw.get_write_buffer_size()

    def is_reading(self) -> bool:
        return self.raw.is_reading()

    def pause_reading(self) -> None:
        self.raw.pause_reading()

    def resume_reading(self) -> None:
        self.raw.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._context
        return self._tls if name == "ssl_object" else self.raw.get_extra_info(name, default)
