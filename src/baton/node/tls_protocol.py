"""One HTTP connection under TLS: `BoundedHttpProtocol` behind a `TlsTransport`, with all its limits.

    raw transport ──encrypted──▶ TlsHttpProtocol ──▶ TlsTransport.decrypt ──▶ BoundedHttpProtocol

A connection has its place in the table, and its time, from its first moment: the handshake counts as waiting and may take
as long as a header. What never becomes TLS is one counted line in the log.
"""

from __future__ import annotations

import asyncio
import ssl

from baton.api.errors import ApiError
from baton.core.http.connection_clock import ConnectionPhase
from baton.node.http_protocol import BoundedHttpProtocol
from baton.node.tls_transport import TlsTransport

HANDSHAKE_FAILED = "tls_handshake"
BROKEN = "tls_broken"
PLAIN_HTTP = ApiError(400, "This port speaks TLS, not plain HTTP: use https://", code="plain_http_to_tls")


class TlsHttpProtocol(BoundedHttpProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        certificate = self._border.certificate
        if certificate is None:
            raise TypeError("the server of this protocol has a certificate")
        self._tls = TlsTransport(transport, certificate.context)
        self._has_begun = False
        """Whether anything of a handshake has come."""
        super().connection_made(self._tls)
        if self._clock.phase is not ConnectionPhase.CLOSING:
            self._clock.enter(ConnectionPhase.HANDSHAKE, self._border.clock_s())

    def _turn_away(self, refusal: ApiError) -> None:
        """No answer: it could be given only after a handshake, and whoever is turned away gets nothing computed."""
        self._border.refused(refusal.code or "", self.who, refusal.message)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._clock.phase is ConnectionPhase.CLOSING:
            super().data_received(data)  # which discards it
        elif not self._has_begun and data[:1].isalpha():
            self._answer_plain_http()
        else:
            self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        self._has_begun = True
        was_established = self._tls.is_established
        try:
            plain = self._tls.decrypt(data)
        except ssl.SSLError as error:
            self._give_up(error)
            return
        if self._tls.is_established and not was_established:
            self._clock.enter(ConnectionPhase.IDLE, self._border.clock_s())
        if plain:
            super().data_received(plain)
        if self._tls.is_ended:
            self.transport.close()  # as where a client of plain HTTP ends its side

    def _give_up(self, error: ssl.SSLError) -> None:
        if self._tls.is_established:
            self._border.refused(BROKEN, self.who, said(error))
            self.transport.abort()
        else:
            self._border.refused(HANDSHAKE_FAILED, self.who, said(error))
            self._close_softly()  # an alert that tells the client why is on its way

    def _answer_plain_http(self) -> None:
        """In the clear, as it was asked: nothing of TLS has come."""
        self._has_begun = True
        self.transport = self._tls.raw
        self._refuse(PLAIN_HTTP)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._clock.phase is ConnectionPhase.HANDSHAKE and self._has_begun and not self._tls.is_closed_here:
            self._border.refused(HANDSHAKE_FAILED, self.who, "the client left in the middle of the TLS handshake")
        super().connection_lost(exc)


def said(error: ssl.SSLError) -> str:
    """The reason in OpenSSL's words, in small letters: `no shared cipher`."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return f"{reason} (said by the client)" if " alert " in f" {reason} " else reason
