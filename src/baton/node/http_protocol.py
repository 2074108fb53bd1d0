"""One HTTP connection: uvicorn's httptools protocol, with limits on what a client may send, hold and leave unread.

    bytes ──▶ unparsed ──pieces──▶ httptools ──▶ uvicorn: one request, one answer ──▶ next piece

Promises that memory does not grow with what a client sends: the parser gets a header in pieces that end with it, so a limit
is noticed before what is beyond it is kept; and it gets no byte of a next request before the last answer is complete and
the client reads. Meanwhile the connection is read only so far that its end is noticed.

Uvicorn parses, runs the application and writes. Of its class these are used: `cycle` (the request that came last),
`pipeline` (requests parsed before their turn), `flow`, `headers`, `url` and the callbacks of the parser; of a cycle also
`expected_content_length`, the bytes of an answer that the application has yet to send.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.api.errors import ApiError
from baton.core.http.connection_clock import ConnectionClock, ConnectionPhase, Overdue
from baton.node.http_border import HttpBorder

END_OF_HEADER = b"\r\n\r\n"
CHUNKED_PIECE_BYTES = 2048
"""Where a body's end is not known beforehand, as much may be parsed beyond it: a few dozen requests at most."""
BAD_REQUEST = ApiError(400, "This is no HTTP request", code="bad_request")
TLS_HANDSHAKE = b"\x16\x03"
"""The first bytes of every TLS connection: a record of type handshake, version 3.x."""
TLS_TO_HTTP = ApiError(400, "This port speaks plain HTTP, not TLS: use http://", code="tls_to_plain_http")
UPGRADE = "upgrade"


class HeldFlow(FlowControl):
    """Uvicorn's switch of reading, which stays off while this connection has enough to do."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        if not isinstance(server_state, HttpBorder):
            raise TypeError("the server of this protocol has an HttpBorder")
        self.who = "?"
        self._border = server_state
        self._limits = server_state.limits
        self._clock = ConnectionClock(self._limits.times, server_state.clock_s())
        self._held_flow: HeldFlow
        self._answering: RequestResponseCycle | None = None
        """The request whose answer is under way; `cycle` may be one parsed after it."""
        self._unparsed = b""
        self._parsed_to = 0
        """Index into `_unparsed`."""
        self._quiet_bytes = 0
        """Bytes parsed since the last message ended or the last byte of a body came: a header, trailers, framing."""
        self._in_body = False
        self._body_left: int | None = None
        """None: unknown, the body is chunked."""
        self._refusal: ApiError | None = None
        self._discarded_bytes = 0
        self._charged: str | None = None
        """The address that the current request is counted for, where a proxy named it."""

    # ── a connection ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._held_flow = HeldFlow(transport)
        host = self.client[0] if self.client else ""
        self.who = host or "?"
        refusal = self._border.admit(self, host)
        if refusal is not None:
            self._clock.enter(ConnectionPhase.CLOSING, self._border.clock_s())
            self._turn_away(refusal)

    def _turn_away(self, refusal: ApiError) -> None:
        """Close a connection that is not admitted."""
        self._write(refusal)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._border.table.close(self)
        self._border.unsent.forget(self)
        self._discharge()
        self._unparsed = b""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def shed(self) -> None:
        self.transport.abort()

    def look(self, now_s: float) -> None:
        overdue = self._clock.overdue(now_s, self.transport.get_write_buffer_size(), self.flow.write_paused)
        self._note_unsent()
        match overdue:
            case None:
                pass
            case Overdue.HEADER | Overdue.BODY:
                what = "header" if overdue is Overdue.HEADER else "body"
                self._refuse(ApiError(408, f"The {what} of the request took too long", code=overdue.value))
            case Overdue.HANDSHAKE:
                self._border.refused(overdue.value, self.who, "the TLS handshake took too long")
                self.transport.abort()
            case Overdue.UNREAD:
                self._border.refused(overdue.value, self.who, "the client has stopped reading its answer")
                self.transport.abort()
            case Overdue.IDLE | Overdue.REST:
                self.transport.close()
            case Overdue.CLOSING:
                self.transport.abort()

    # ── what comes in ────────────────────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if self._clock.phase is ConnectionPhase.CLOSING:
            self._discard(data)
            return
        self._unset_keepalive_if_required()
        self._unparsed = self._unparsed[self._parsed_to :] + data if self._unparsed else data
        self._parsed_to = 0
        self._parse()

    def _discard(self, data: bytes) -> None:
        self._discarded_bytes += len(data)
        if self._discarded_bytes > self._limits.discarded_bytes_max:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_unsent()
        if self._border.unsent.is_over:
            self.loop.call_soon(self._border.drop_unread)  # not in the middle of a write

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_unsent()
        self._parse()

    def _parse(self) -> None:
        """Give the parser what may be parsed now, and read on unless enough is left over."""
        while self._parsed_to < len(self._unparsed) and self._may_parse():
            self._parse_piece()
        left = len(self._unparsed) - self._parsed_to
        if not left:
            self._unparsed, self._parsed_to = b"", 0
        if left > self._limits.unparsed_bytes_max:
            self._held_flow.hold()
        else:
            self._held_flow.release()
        self._note_phase()

    def _may_parse(self) -> bool:
        """A started body is parsed to its end; a next request only when the last one is answered and its answer is read."""
        if self._refusal is not None or self.pipeline or self.transport.is_closing():
            return False
        answered = self.cycle is None or self.cycle.response_complete
        return self._in_body or (answered and not self.flow.write_paused)

    def _parse_piece(self) -> None:
        begun = self._parsed_to
        self._parsed_to = begun + self._piece_bytes()
        self._quiet_bytes += min(self._parsed_to, len(self._unparsed)) - begun
        try:
            self.parser.feed_data(self._unparsed[begun : self._parsed_to])
        except httptools.HttpParserUpgrade:
            # The request is answered as if it had not asked.
            self._border.refused(UPGRADE, self.who, "asked for another protocol, which this server does not speak")
        except httptools.HttpParserError:
            is_tls = self._unparsed.startswith(TLS_HANDSHAKE, begun)
            self._refuse(self._refusal or (TLS_TO_HTTP if is_tls else BAD_REQUEST))
            return
        if self._quiet_bytes >= self._limits.header_bytes_max:
            self._refuse(self._too_large(f"larger than {self._limits.header_bytes_max} bytes"))

    def _piece_bytes(self) -> int:
        if self._in_body:
            return CHUNKED_PIECE_BYTES if self._body_left is None else max(1, self._body_left)
        most = self._parsed_to + self._limits.header_bytes_max - self._quiet_bytes
        end = self._unparsed.find(END_OF_HEADER, self._parsed_to, most)
        return (most if end < 0 else end + len(END_OF_HEADER)) - self._parsed_to

    def _note_unsent(self) -> None:
        """Count what waits in the transport, and what the application holds because this client does not read."""
        unsent, answering = self.transport.get_write_buffer_size(), self._answering
        if answering is not None and answering.chunked_encoding is False:
            unsent += answering.expected_content_length
        self._border.unsent.note(self, unsent, self._clock.read_s)

    # ── what the parser finds ────────────────────────────────────────────────────────────────────────────────────────────

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.url_bytes_max:
            self._refusal = ApiError(414, f"The URL is longer than {self._limits.url_bytes_max} bytes", code="url_too_long")
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._refusal = self._why_not()
        if self._refusal is not None:
            raise self._refusal
        self._in_body, self._quiet_bytes = True, 0
        super().on_headers_complete()
        if self.cycle is not None and self._border.table.is_spare(self):
            self.cycle.keep_alive = False  # a place for probes is for one answer, which needs no reader to be complete
        if not self.pipeline:
            self._answering = self.cycle
        self.headers = []  # trailers come as headers too, and the application has been given the others

    def _why_not(self) -> ApiError | None:
        """Judge a whole header, and find out how long its body is."""
        if len(self.headers) > self._limits.headers_max:
            return self._too_large(f"of more than {self._limits.headers_max} fields")
        self._body_left = None
        for name, value in self.headers:
            if name == b"content-length":
                self._body_left = int(value)
            elif name == b"host" and (refusal := self._border.why_not_host(value)) is not None:
                return refusal
        refusal = self._border.why_not_asked(self, self.parser.get_method(), self.url)
        return self._why_not_address() if refusal is None else refusal

    def _why_not_address(self) -> ApiError | None:
        address = self._border.forwarded_address(self.who, self.headers)
        if address is None or self._charged is not None:
            return None
        if not self._border.table.charge(address):
            message = f"Too many requests from {address} are under way"
            return ApiError(429, message, "rate_limit_error", code="too_many_from_address", headers={"Retry-After": "1"})
        self._charged = address
        return None

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        self._clock.count_body(len(body))
        if self._body_left is not None:
            self._body_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._quiet_bytes = False, 0
        super().on_message_complete()
        if self._answering is not None and not self._answering.more_body:
            self._border.table.begin(self)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._discharge()
        if self._answering is None or self._answering.more_body:
            self._border.table.wait(self)
        if self.transport.is_closing():
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
        else:
            self._parse()

    def _note_phase(self) -> None:
        if self._clock.phase is ConnectionPhase.CLOSING:
            return
        if self._answering is not None and self._answering.more_body:
            phase = ConnectionPhase.BODY
        elif self._answering is not None:
            phase = ConnectionPhase.ANSWER
        elif self._in_body:
            phase = ConnectionPhase.REST
        else:
            phase = ConnectionPhase.HEADER if self._quiet_bytes else ConnectionPhase.IDLE
        self._clock.enter(phase, self._border.clock_s())

    def _discharge(self) -> None:
        if self._charged is not None:
            self._border.table.discharge(self._charged)
            self._charged = None

    # ── refusing ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _too_large(self, how: str) -> ApiError:
        return ApiError(431, f"The header is {how}", code="header_too_large")

    def _refuse(self, refusal: ApiError) -> None:
        """Answer with an error and close; behind an answer that is under way, when that is complete."""
        self._refusal = refusal
        answering = self._answering
        if answering is not None:
            if not answering.more_body:
                return  # it came whole and is answered first; `on_response_complete` comes back here
            if answering.response_started:
                answering.keep_alive = False
                return
            answering.disconnected = True
            answering.message_event.set()
            self._answering = None
        self._border.table.wait(self)
        self._write(refusal)
        self._close_softly()

    def _write(self, refusal: ApiError) -> None:
        self._border.refused(refusal.code or "", self.who, refusal.message)
        body = refusal.body()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **refusal.headers,
        }
        lines = [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        lines += [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        self.transport.write(b"".join((STATUS_LINE[refusal.status], *lines, b"\r\n", body)))

    def _close_softly(self) -> None:
        """End our side and discard what still comes: closed with bytes unread, the system would take the answer back."""
        self._clock.enter(ConnectionPhase.CLOSING, self._border.clock_s())
        self._unparsed, self._parsed_to = b"", 0
        self._held_flow.release()
        self.flow.resume_reading()
        self.transport.write_eof()
