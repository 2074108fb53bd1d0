"""One HTTP connection, driven byte by byte with a clock of the test's own: as it is, and each test once more under TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from baton.core.http.connection_clock import TimeLimits
from baton.node.client_address import parse_networks
from baton.node.http_border import SHED_AT_ONCE_MAX, HttpBorder, HttpLimits
from baton.node.http_protocol import BoundedHttpProtocol
from baton.node.server_certificate import CertificateFiles, ServerCertificate
from baton.node.tls_protocol import TlsHttpProtocol
from tests.support.certificates import Authority, needs_openssl
from tests.support.tls_client import TlsClientSide

GET = b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\n\r\n\r\r\n2;ext=1\r\n\nx\r\n0\r\nX-Trailer: late\r\n\r\n"
)
SENT = {"/a": b"", "/b": b"hello", "/c": b"\r\n\r\nx"}


class FakeTransport(asyncio.Transport):
    def __init__(self, peer: str = "127.0.0.1") -> None:
        super().__init__({"peername": (peer, 5), "sockname": ("127.0.0.1", 80)})
        self.protocol: asyncio.BaseProtocol
        self.client: TlsClientSide | None = None
        self.written = b""
        """In plain."""
        self.unsent = 0
        self.reads = True
        self.flushes = True
        """Whether what is written reaches the client, so that closing comes to an end."""
        self.ended = self.closed = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data) if self.client is None else self.client.received(bytes(data))

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
        if self.flushes or self.aborted:
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def statuses(self) -> list[int]:
        return [int(part.split(b" ", 1)[0]) for part in self.written.split(b"HTTP/1.1 ")[1:]]

    @property
    def is_turned_away(self) -> bool:
        """With an answer, where that costs no handshake."""
        return self.statuses() == [503] if self.client is None else self.aborted and not self.written


class SecureProtocol(TlsHttpProtocol):
    """Fed with plain bytes, as the other is."""

    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self.client_side = TlsClientSide()
        self.is_encrypting = True

    def data_received(self, data: bytes) -> None:
        super().data_received(self.client_side.sent(data) if self.is_encrypting else data)

    def shake_hands(self) -> None:
        self.is_encrypting = False
        self.data_received(self.client_side.hello())
        self.data_received(self.client_side.pending())
        self.is_encrypting = True


class App:
    """Reads a body and answers; waits before that while `gate` is shut."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, list[tuple[bytes, bytes]]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.disconnects = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body, more = body + message["body"], message["more_body"]
        await self.gate.wait()
        self.seen.append((scope["path"], body, scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Server:
    """What connections share; `now_s` is set by the test."""

    certificate: ClassVar[ServerCertificate | None] = None
    """With it, connections are made under TLS."""

    def __init__(self, limits: HttpLimits | None = None, app: Any = None) -> None:
        self.app = App() if app is None else app
        self.config = uvicorn.Config(self.app, http=BoundedHttpProtocol, ws="none", lifespan="off", log_config=None)
        self.now_s = 0.0
        self.counts: dict[str, int] = {}
        self.border = HttpBorder(limits or HttpLimits(), self._count, lambda: self.now_s, self.certificate)

    def _count(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def connect(self, peer: str = "127.0.0.1") -> tuple[BoundedHttpProtocol, FakeTransport]:
        kind = BoundedHttpProtocol if self.certificate is None else SecureProtocol
        protocol, transport = kind(self.config, self.border, {}), FakeTransport(peer)
        transport.protocol = protocol
        if isinstance(protocol, SecureProtocol):
            transport.client = protocol.client_side
        protocol.connection_made(transport)
        if isinstance(protocol, SecureProtocol) and not transport.aborted:
            protocol.shake_hands()
        return protocol, transport

    def look(self, now_s: float) -> None:
        self.now_s = now_s
        self.border.look()


async def settle(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


@pytest.fixture(scope="module", params=["plain", pytest.param("tls", marks=needs_openssl)], autouse=True)
def spoken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What connections of `Server` speak."""
    if request.param == "tls":
        pair = Authority(tmp_path_factory.mktemp("certificates")).sign("localhost")
        Server.certificate = ServerCertificate(CertificateFiles(pair.certificate, pair.key))
    yield request.param
    Server.certificate = None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([GET, POST, CHUNKED]), min_size=1, max_size=6), st.data())
def test_however_bytes_are_cut_every_request_is_answered_once_and_in_order(
    requests: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) if a < b]

    async def run() -> App:
        server = Server()
        protocol, transport = server.connect()
        for piece in pieces:
            protocol.data_received(piece)
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
        await settle(lambda: len(transport.statuses()) == len(requests))
        assert transport.statuses() == [200] * len(requests)
        assert transport.reads
        return server.app

    app = asyncio.run(run())
    asked = [request.split(b" ", 2)[1].decode() for request in requests]
    assert [path for path, _, _ in app.seen] == asked
    assert [body for _, body, _ in app.seen] == [SENT[path] for path in asked]
    assert all(name != b"x-trailer" for _, _, headers in app.seen for name, _ in headers)


async def test_while_a_request_is_answered_the_next_ones_wait_unparsed_and_reading_stops() -> None:
    server = Server()
    server.app.gate.clear()
    protocol, transport = server.connect()
    protocol.data_received(GET)
    await asyncio.sleep(0)
    assert transport.reads, "the end of the connection is to be noticed"
    protocol.data_received(GET * 500)
    assert not protocol.pipeline
    assert not transport.reads
    server.app.gate.set()
    await settle(lambda: len(transport.statuses()) == 501)
    assert transport.reads


async def test_no_request_is_begun_while_answers_are_unread() -> None:
    server = Server()
    protocol, transport = server.connect()
    protocol.pause_writing()
    protocol.data_received(GET * 2)
    await asyncio.sleep(0)
    assert server.app.seen == []
    protocol.resume_writing()
    await settle(lambda: transport.statuses() == [200, 200])


async def test_a_client_that_leaves_is_noticed_by_the_request_that_runs_and_not_by_one_behind_it() -> None:
    server = Server()
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        seen.append(scope["path"])

    server = Server(app=app)
    protocol, _ = server.connect()
    protocol.data_received(CHUNKED + GET)  # the second is parsed along with the end of the first
    assert len(protocol.pipeline) == 1
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    await settle(lambda: seen == ["/c"])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 33_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 6000, 431),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n", 431),
        (b"GET /" + b"x" * 8200, 414),
        (b"\r\n" * 20_000, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 40_000, 431),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 8000, 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("piece_bytes", [7, 1000, 1 << 20])
async def test_too_much_is_refused_as_it_arrives_and_the_rest_is_discarded(
    sent: bytes, status: int, piece_bytes: int
) -> None:
    server = Server()
    protocol, transport = server.connect()
    for start in range(0, len(sent), piece_bytes):
        protocol.data_received(sent[start : start + piece_bytes])
    await settle(lambda: transport.statuses() == [status])
    assert transport.ended
    assert not transport.closed, "its client is to read the answer"
    assert sum(server.counts.values()) == 1
    server.look(3.0)
    assert transport.aborted


async def test_a_bad_request_behind_a_good_one_leaves_its_answer_whole() -> None:
    server = Server()
    server.app.gate.clear()
    protocol, transport = server.connect()
    protocol.data_received(CHUNKED + b"nonsense\r\n\r\n")
    await asyncio.sleep(0)
    assert transport.written == b""
    server.app.gate.set()
    await settle(lambda: transport.statuses() == [200, 400])


async def test_a_header_that_trickles_gets_408_and_an_idle_connection_is_closed() -> None:
    server = Server(HttpLimits(times=TimeLimits(idle_s=70, header_s=20)))
    slow, slow_transport = server.connect()
    _, idle_transport = server.connect()
    for now_s in range(20):
        server.look(now_s)
        slow.data_received(GET[now_s : now_s + 1])
    assert slow_transport.written == b""
    server.look(21)
    assert slow_transport.statuses() == [408]
    assert slow_transport.ended
    server.look(69)
    assert not idle_transport.closed
    server.look(70)
    assert idle_transport.closed
    assert not idle_transport.written


async def test_a_body_that_stops_gets_408_and_the_application_hears_of_it() -> None:
    server = Server()
    protocol, transport = server.connect()
    protocol.data_received(POST[:-2])
    await asyncio.sleep(0)
    server.look(29)
    assert transport.written == b""
    server.look(31)
    assert transport.statuses() == [408]
    await settle(lambda: server.app.disconnects == 1)


async def test_an_answer_takes_any_time_and_a_reader_that_takes_nothing_for_long_is_given_up() -> None:
    server = Server()
    server.app.gate.clear()
    protocol, transport = server.connect()
    protocol.data_received(GET)
    await asyncio.sleep(0)
    server.look(100_000)
    assert not transport.closed
    protocol.pause_writing()
    transport.unsent = 70_000
    server.look(100_001)
    server.look(100_599)
    transport.unsent = 69_999  # it reads, if slowly
    server.look(100_600)
    server.look(101_199)
    assert not transport.closed
    server.look(101_200)
    assert transport.aborted
    assert server.counts == {"unread": 1}


async def test_where_too_much_is_unread_in_all_the_connection_with_most_of_it_is_closed_at_once() -> None:
    server = Server(HttpLimits(unsent_bytes_max=250_000))
    clients = [server.connect() for _ in range(3)]
    for (protocol, transport), unsent in zip(clients, (70_000, 90_000, 80_000), strict=True):
        transport.unsent = unsent
        protocol.pause_writing()
    await asyncio.sleep(0)
    assert not any(transport.aborted for _, transport in clients)
    protocol, transport = server.connect()
    transport.unsent = 75_000
    protocol.pause_writing()
    await asyncio.sleep(0)
    assert [transport.aborted for _, transport in clients] == [False, True, False]
    assert server.counts == {"unread": 1}


async def test_an_answer_that_the_application_holds_counts_as_unread_and_what_is_read_does_not() -> None:
    paused = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"200000")]})
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await paused.wait()
        await send({"type": "http.response.body", "body": b"x" * 100_000})

    server = Server(app=app)
    protocol, transport = server.connect()
    protocol.data_received(GET)
    await settle(lambda: bool(transport.written))
    transport.unsent = 70_000
    protocol.pause_writing()
    paused.set()
    await asyncio.sleep(0)
    assert server.border.unsent.bytes == 70_000 + 100_000
    transport.unsent = 0
    protocol.resume_writing()
    await settle(lambda: transport.written.endswith(b"x" * 200_000))
    server.look(1.0)
    assert server.border.unsent.bytes == 0


async def test_a_connection_that_is_closed_with_its_answer_gives_way_while_nobody_reads_that() -> None:
    server = Server(HttpLimits(connections=1, probe_connections=0))
    protocol, transport = server.connect()
    transport.flushes = False
    protocol.data_received(GET[:-2] + b"Connection: close\r\n\r\n")
    await settle(lambda: transport.closed)
    server.connect()
    assert transport.aborted


async def test_where_all_connections_are_taken_one_that_waits_gives_way_and_none_that_works() -> None:
    server = Server(HttpLimits(connections=2, probe_connections=0))
    server.app.gate.clear()
    busy, busy_transport = server.connect()
    busy.data_received(GET)
    _, idle_transport = server.connect()
    third, third_transport = server.connect()
    assert idle_transport.aborted
    third.data_received(GET)
    _, fourth_transport = server.connect()
    assert fourth_transport.is_turned_away
    assert fourth_transport.closed
    assert server.counts == {"shed": 1, "too_many_connections": 1}
    server.app.gate.set()
    await settle(lambda: busy_transport.statuses() == third_transport.statuses() == [200])


@pytest.mark.parametrize("half", [POST[:-2], POST[:-5], CHUNKED[:-2]], ids=["part of a body", "a header", "chunked"])
async def test_unfinished_bodies_give_way_the_longest_first(half: bytes) -> None:
    server = Server(HttpLimits(connections=2, probe_connections=0))
    halves = [server.connect() for _ in range(2)]
    for protocol, _ in halves:
        protocol.data_received(half)
        await asyncio.sleep(0)
    protocol, transport = server.connect()
    assert [transport.aborted for _, transport in halves] == [True, False]
    protocol.data_received(GET)
    await settle(lambda: transport.statuses() == [200])
    await settle(lambda: server.app.disconnects == 1)


async def test_a_body_that_came_whole_after_its_answer_leaves_the_connection_waiting() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    server = Server(HttpLimits(connections=1, probe_connections=0), app)
    protocol, transport = server.connect()
    protocol.data_received(POST[:-2])
    await settle(lambda: transport.statuses() == [200])
    protocol.data_received(POST[-2:])
    server.connect()
    assert transport.aborted


async def test_a_request_that_is_parsed_in_part_behind_another_gives_way_when_that_is_answered() -> None:
    server = Server(HttpLimits(connections=1, probe_connections=0))
    protocol, transport = server.connect()
    protocol.data_received(CHUNKED + POST[:-2])
    assert len(protocol.pipeline) == 1
    assert server.connect()[1].is_turned_away
    await settle(lambda: transport.statuses() == [200])
    server.connect()
    assert transport.aborted


async def test_while_all_connections_are_at_work_further_ones_get_an_answer_to_how_the_server_is() -> None:
    server = Server(HttpLimits(connections=1, probe_connections=1))
    server.app.gate.clear()
    busy, busy_transport = server.connect()
    busy.data_received(GET)
    _, silent = server.connect()
    asking, asking_transport = server.connect()
    assert silent.aborted, "who says nothing keeps no place for probes"
    asking.data_received(GET)
    assert asking_transport.statuses() == [503]
    probe, probe_transport = server.connect()
    probe.data_received(b"GET /health?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    _, late = server.connect()
    assert late.is_turned_away
    server.app.gate.set()
    await settle(lambda: probe_transport.statuses() == busy_transport.statuses() == [200])
    assert probe_transport.closed, "such a place is for one answer"
    assert not busy_transport.closed


async def test_who_came_while_all_were_at_work_and_asks_when_one_is_done_is_served() -> None:
    server = Server(HttpLimits(connections=1, probe_connections=1))
    server.app.gate.clear()
    busy, busy_transport = server.connect()
    busy.data_received(GET)
    later, later_transport = server.connect()
    server.app.gate.set()
    await settle(lambda: busy_transport.statuses() == [200])
    later.data_received(GET)
    assert busy_transport.aborted
    await settle(lambda: later_transport.statuses() == [200])
    assert not later_transport.closed


async def test_requests_through_a_proxy_are_counted_for_their_clients_while_they_run() -> None:
    proxies = parse_networks(["10.0.0.5"])
    server = Server(HttpLimits(connections_per_address=1, trusted_proxies=proxies))
    server.app.gate.clear()

    def asking(client: bytes) -> FakeTransport:
        protocol, transport = server.connect("10.0.0.5")
        protocol.data_received(b"GET / HTTP/1.1\r\nX-Forwarded-For: 9.9.9.9, " + client + b"\r\n\r\n")
        return transport

    first, second, other = asking(b"1.1.1.1"), asking(b"1.1.1.1"), asking(b"2.2.2.2")
    assert second.statuses() == [429]
    server.app.gate.set()
    await settle(lambda: first.statuses() == other.statuses() == [200])
    again = asking(b"1.1.1.1")
    await settle(lambda: again.statuses() == [200])
    _, direct = server.connect("3.3.3.3")
    assert not direct.closed
    _, twice = server.connect("3.3.3.3")
    assert twice.is_turned_away


async def test_a_thousand_refusals_are_one_line_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(HttpLimits(hosts=frozenset()))
    with caplog.at_level(logging.WARNING, "baton.http"):
        for _ in range(1000):
            protocol, transport = server.connect()
            protocol.data_received(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert transport.statuses() == [421]
            protocol.connection_lost(None)
        server.look(10.0)
    assert [line.getMessage().endswith("(and 998 more like it)") for line in caplog.records] == [False, True]
    assert server.counts == {"host_not_allowed": 1000}


async def test_what_a_client_wrote_is_escaped_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(HttpLimits(hosts=frozenset()))
    protocol, _ = server.connect()
    with caplog.at_level(logging.WARNING, "baton.http"):
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: a\x9b2J\x85b\xe9\r\n\r\n")
    (line,) = caplog.records
    assert line.getMessage().isprintable()
    assert "'a\\x9b2j\\x85b\xe9'" in line.getMessage()


async def test_where_descriptors_have_run_out_connections_that_wait_are_closed_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    server.app.gate.clear()
    busy, busy_transport = server.connect()
    busy.data_received(GET)
    idle = [server.connect()[1] for _ in range(SHED_AT_ONCE_MAX + 5)]
    with caplog.at_level(logging.WARNING, "baton.http"):
        server.border.relieve()
        server.border.relieve()
    assert all(transport.aborted for transport in idle)
    assert not busy_transport.closed
    assert sum("no_descriptors" in line.getMessage() for line in caplog.records) == 1
    server.app.gate.set()
    await settle(lambda: busy_transport.statuses() == [200])
