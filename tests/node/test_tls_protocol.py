"""What is particular to a connection under TLS: the handshake, who does not speak it, and its end.

That the limits of plain connections hold here too is tested by `test_http_protocol`, which runs under TLS as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import uvicorn

from baton.node.http_border import HttpBorder, HttpLimits
from baton.node.http_protocol import BoundedHttpProtocol
from baton.node.server_certificate import CertificateFiles, ServerCertificate
from baton.node.tls_protocol import TlsHttpProtocol
from tests.node.test_http_protocol import GET, App, FakeTransport, settle
from tests.support.certificates import Authority, needs_openssl
from tests.support.tls_client import TlsClientSide

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    pair = Authority(tmp_path_factory.mktemp("certificates")).sign("localhost")
    return CertificateFiles(pair.certificate, pair.key)


class Line:
    """A connection to a TLS server; what is written on it stays encrypted."""

    def __init__(self, server: TlsServer) -> None:
        self.protocol = TlsHttpProtocol(server.config, server.border, {})
        self.transport = FakeTransport()
        self.transport.protocol = self.protocol
        self.client = TlsClientSide()
        self.protocol.connection_made(self.transport)

    def establish(self) -> None:
        self.protocol.data_received(self.client.hello())
        self.hear()
        self.protocol.data_received(self.client.pending())
        self.hear()

    def hear(self) -> bytes:
        """What the server has written since, in plain."""
        written, self.transport.written = self.transport.written, b""
        return self.client.received(written)


class TlsServer:
    def __init__(self, files: CertificateFiles, limits: HttpLimits | None = None) -> None:
        self.app = App()
        self.config = uvicorn.Config(self.app, http=TlsHttpProtocol, ws="none", lifespan="off", log_config=None)
        self.now_s = 0.0
        self.counts: dict[str, int] = {}
        self.border = HttpBorder(limits or HttpLimits(), self._count, lambda: self.now_s, ServerCertificate(files))

    def _count(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def look(self, now_s: float) -> None:
        self.now_s = now_s
        self.border.look()


async def test_a_request_that_comes_byte_by_byte_is_answered_as_https(files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    for byte in line.client.hello():
        line.protocol.data_received(bytes([byte]))
    line.hear()
    for byte in line.client.pending() + line.client.sent(GET):
        line.protocol.data_received(bytes([byte]))
    await settle(lambda: len(server.app.seen) == 1)
    assert line.hear().startswith(b"HTTP/1.1 200 OK\r\n")
    assert line.protocol.scope["scheme"] == "https"
    assert line.client.tls.version() == "TLSv1.3"


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02"], ids=["silent", "begun"])
async def test_a_handshake_that_never_ends_has_the_time_of_a_header(begun: bytes, files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    line.protocol.data_received(begun) if begun else None
    server.look(19.9)
    assert not line.transport.closed
    server.look(20.0)
    assert line.transport.aborted
    await asyncio.sleep(0)
    assert server.counts == {"tls_handshake_timeout": 1}
    assert len(server.border.table) == 0


async def test_one_that_trickles_in_is_no_exception(files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    for now_s, byte in enumerate(line.client.hello()[:21]):
        server.look(float(now_s))
        line.protocol.data_received(bytes([byte]))
    assert line.transport.aborted


async def test_connections_without_a_handshake_have_places_in_the_table_and_give_way(files: CertificateFiles) -> None:
    server = TlsServer(files, HttpLimits(connections=2, probe_connections=0))
    first, second = Line(server), Line(server)
    third = Line(server)
    assert [line.transport.aborted for line in (first, second, third)] == [True, False, False]
    assert server.counts == {"shed": 1}
    third.establish()
    third.protocol.data_received(third.client.sent(GET))
    await settle(lambda: len(server.app.seen) == 1)


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n", b"P", b"OPTIONS *"])
async def test_plain_http_is_told_so_in_plain_and_closed_with_one_counted_line(
    request_line: bytes, files: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = TlsServer(files)
    for _ in range(5):
        line = Line(server)
        line.protocol.data_received(request_line)
        assert line.transport.statuses() == [400]
        assert b"use https://" in line.transport.written
        assert line.transport.ended
        line.protocol.data_received(b"Host: localhost\r\n\r\n" * 100)
        assert line.transport.statuses() == [400]
        line.protocol.connection_lost(None)
    assert server.counts == {"plain_http_to_tls": 5}
    assert [(record.levelno, "plain_http_to_tls" in record.message) for record in caplog.records] == [
        (logging.WARNING, True)
    ]
    assert server.app.seen == []


@pytest.mark.parametrize("sent", [b"\x00" * 100, b"\x80\x2e\x01\x03\x01", b"\x16\x03\x01\x00\x05hello"])
async def test_what_is_neither_is_closed_with_one_counted_line(sent: bytes, files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    line.protocol.data_received(sent)
    line.protocol.data_received(b"\x00" * 100)
    server.look(3.0)
    assert line.transport.aborted
    assert server.counts == {"tls_handshake": 1}


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
async def test_a_client_that_speaks_only_old_tls_is_told_by_an_alert(files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    line.protocol.data_received(outgoing.read())
    incoming.write(line.transport.written)
    with pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
        client.do_handshake()
    assert line.transport.ended
    assert server.counts == {"tls_handshake": 1}


async def test_a_client_that_does_not_trust_the_certificate_is_one_line_with_its_reason(
    files: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = TlsServer(files)
    line = Line(server)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    line.protocol.data_received(outgoing.read())
    incoming.write(line.transport.written)
    with pytest.raises(ssl.SSLCertVerificationError):
        client.do_handshake()
    line.protocol.data_received(outgoing.read())
    (record,) = caplog.records
    assert "tls_handshake: tlsv1 alert unknown ca (said by the client)" in record.message


@pytest.mark.parametrize(("sent", "counted"), [(b"", {}), (b"\x16\x03\x01", {"tls_handshake": 1})])
async def test_a_port_scan_is_no_line_and_a_broken_off_handshake_is_one(
    sent: bytes, counted: dict[str, int], files: CertificateFiles
) -> None:
    server = TlsServer(files)
    line = Line(server)
    line.protocol.data_received(sent) if sent else None
    line.protocol.connection_lost(None)
    assert server.counts == counted


async def test_a_forged_record_ends_the_connection_and_its_request(files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    line.establish()
    sent = line.client.sent(b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
    line.protocol.data_received(sent)
    await asyncio.sleep(0)
    forged = bytearray(line.client.sent(b"hello"))
    forged[-1] ^= 1
    line.protocol.data_received(bytes(forged))
    assert line.transport.aborted
    assert server.counts == {"tls_broken": 1}
    await settle(lambda: server.app.disconnects == 1)
    assert server.app.seen == []


async def test_a_client_that_ends_its_side_is_closed_and_its_request_hears_of_it(files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    line.establish()
    line.protocol.data_received(line.client.sent(b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhe"))
    await asyncio.sleep(0)
    line.protocol.data_received(line.client.ended())
    assert line.transport.closed
    await settle(lambda: server.app.disconnects == 1)
    assert server.counts == {}


async def test_a_close_tells_the_client_that_the_answer_was_whole(files: CertificateFiles) -> None:
    server = TlsServer(files)
    line = Line(server)
    line.establish()
    line.protocol.data_received(line.client.sent(GET[:-2] + b"Connection: close\r\n\r\n"))
    await settle(lambda: line.transport.closed)
    assert line.hear().startswith(b"HTTP/1.1 200 OK\r\n")
    assert line.client.tls.read() == b"", "TLS has told the end; without that it raises"


async def test_a_connection_keeps_no_buffer_of_the_size_of_its_last_answer_or_body(files: CertificateFiles) -> None:
    server, large = TlsServer(files), b"x" * (4 << 20)
    lines = [Line(server) for _ in range(16)]
    before = _resident_bytes()
    for line in lines:
        line.establish()
        line.protocol.transport.write(large)
        assert len(line.transport.written) > len(large)
        line.transport.written = b""
        head = b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(large)
        line.protocol.data_received(line.client.sent(head))
        await asyncio.sleep(0)
        line.protocol.data_received(line.client.sent(large))
        line.client = TlsClientSide()
        await settle(lambda: len(server.app.seen) == 1)
        server.app.seen.clear()
    assert _resident_bytes() - before < 48 << 20, "16 connections that keep 8 MiB each would be 128"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_renewed_certificate_is_for_new_connections_and_open_ones_go_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    old, new = authority.sign("old"), authority.sign("new")
    server = TlsServer(CertificateFiles(old.certificate, old.key))
    before = Line(server)
    before.establish()
    old.certificate.write_bytes(new.certificate.read_bytes())
    old.key.write_bytes(new.key.read_bytes())
    certificate = server.border.certificate
    assert certificate is not None
    certificate.look()
    certificate.look()
    after = Line(server)
    after.establish()
    shown = [line.client.tls.getpeercert(binary_form=True) for line in (before, after)]
    assert shown[0] != shown[1] == ssl.PEM_cert_to_DER_cert(new.certificate.read_text())
    before.protocol.data_received(before.client.sent(GET))
    await settle(lambda: len(server.app.seen) == 1)


async def test_tls_to_a_plain_port_is_closed_with_one_counted_line(
    files: CertificateFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = TlsServer(files)
    hello = TlsClientSide().hello()
    cuts: list[Callable[[bytes], list[bytes]]] = [lambda data: [data], lambda data: [data[:3], data[3:]]]
    for cut in cuts:
        protocol, transport = BoundedHttpProtocol(server.config, server.border, {}), FakeTransport()
        transport.protocol = protocol
        protocol.connection_made(transport)
        for piece in cut(hello):
            protocol.data_received(piece)
        assert transport.statuses() == [400]
        assert b"speaks plain HTTP, not TLS" in transport.written
        assert transport.ended
    assert server.counts == {"tls_to_plain_http": 2}
    assert len(caplog.records) == 1
