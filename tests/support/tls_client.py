"""The client's side of a TLS connection without a socket: plain bytes to encrypted ones, and back."""

from __future__ import annotations

import contextlib
import ssl


class TlsClientSide:
    """Trusts every certificate."""

    def __init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)
        self.is_established = False

    def hello(self) -> bytes:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self._outgoing.read()

    def received(self, data: bytes) -> bytes:
        """The plain bytes of what the server wrote; during the handshake none."""
        self._incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            if not self.is_established:
                self.tls.do_handshake()
                self.is_established = True
        return self._read() if self.is_established else b""

    def pending(self) -> bytes:
        """What is to be sent for the handshake's sake."""
        return self._outgoing.read()

    def sent(self, data: bytes) -> bytes:
        """What to send so that the server reads `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.tls.write(rest) :]
        return self._outgoing.read()

    def ended(self) -> bytes:
        """What to send to say that nothing more comes."""
        with contextlib.suppress(ssl.SSLError):
            self.tls.unwrap()
        return self._outgoing.read()

    def _read(self) -> bytes:
        parts = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self.tls.read(1 << 16):
                parts.append(part)
        return b"".join(parts)
