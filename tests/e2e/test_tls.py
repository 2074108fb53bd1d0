"""A real `baton serve` that speaks TLS: the official client, our own commands, limits, and a certificate that is renewed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.core.errors import EXIT_SETUP
from tests.support.certificates import Authority, Pair, needs_openssl
from tests.support.raw_http import PeakMemory, connected, exchange, read_to_end, send_as_taken, status_of
from tests.support.server import ServerProcess, baton_router, baton_serve, refused_by_serve
from tests.support.waiting import wait_until

pytestmark = needs_openssl

SCRIPTED = ("--executor", "scripted")
CLOSE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign("localhost")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Has signed nothing here."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(autouse=True)
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all clients here, those of other processes too."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))


@pytest.fixture(scope="module")
def server(pair: Pair) -> Iterator[ServerProcess]:
    with baton_serve(*SCRIPTED, "--step-ms", "2", *pair.options) as running:
        yield running


@contextlib.contextmanager
def secured(server: ServerProcess, authority: Authority) -> Iterator[ssl.SSLSocket]:
    with (
        connected(server.url) as raw,
        authority.trusted().wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False) as line,
    ):
        yield line


def test_a_client_that_verifies_is_answered_by_the_newest_tls(server: ServerProcess, authority: Authority) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with secured(server, authority) as line:
        assert line.version() == "TLSv1.3"
        line.sendall(CLOSE)
        answer = read_to_end(line)  # raises unless TLS tells the end
    assert status_of(answer) == 200
    assert answer.endswith(b'{"status":"ok"}')


def test_the_official_client_streams(server: ServerProcess, authority: Authority) -> None:
    verifying = httpx.Client(verify=authority.trusted())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=verifying) as client:
        stream = client.completions.create(
            model="scripted", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        assert sum(1 for chunk in stream if chunk.choices) > 10


def test_a_client_that_does_not_trust_the_authority_sends_nothing(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")


def test_plain_http_is_told_so_and_counted_and_nothing_is_a_traceback(server: ServerProcess) -> None:
    for _ in range(20):
        answer = exchange(server.url, CLOSE)
        assert status_of(answer) == 400
        assert b"use https://" in answer
    assert server.metric("baton_http_refusals_total", reason="plain_http_to_tls") >= 20
    assert exchange(server.url, b"\x16\x03\x01\x00\x05hello")[:1] in (b"", b"\x15"), "an alert of TLS"
    assert server.metric("baton_http_refusals_total", reason="tls_handshake") >= 1
    assert server.output().count("plain_http_to_tls") <= 3
    assert "Traceback" not in server.output()


def test_tls_to_a_plain_port_is_closed_and_counted() -> None:
    with baton_serve(*SCRIPTED) as plain:
        with pytest.raises(httpx.ConnectError, match="SSL"):
            httpx.get(plain.url.replace("http://", "https://"))
        assert plain.metric("baton_http_refusals_total", reason="tls_to_plain_http") == 1
        assert "Traceback" not in plain.output()


def test_what_a_client_may_hold_is_bounded_as_without_tls(server: ServerProcess, authority: Authority) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    peak = PeakMemory(server.process.pid)
    with secured(server, authority) as line:
        line.setblocking(False)
        taken, quiet_since_s = 0, time.monotonic()
        while taken < 30_000_000 and time.monotonic() - quiet_since_s < 1.0:
            with contextlib.suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
                taken += line.send(request * 300)
                quiet_since_s = time.monotonic()
        assert taken < 15_000_000, "it reads on though nobody reads its answers"
        with secured(server, authority) as other:
            other.sendall(CLOSE)
            assert status_of(read_to_end(other)) == 200
    with connected(server.url) as raw:  # never becomes TLS
        raw.sendall(b"\x16\x03\x01")
        send_as_taken(raw, b"\xff" * (1 << 20), 50)
    assert peak.grown_mb() < 20


def test_a_header_that_is_too_large_is_answered_through_tls(server: ServerProcess, authority: Authority) -> None:
    with secured(server, authority) as line:
        line.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 40_000)
        assert status_of(read_to_end(line)) == 431


@pytest.mark.parametrize("kind", ["full", "half"])
def test_a_client_that_leaves_ends_its_request(kind: str, server: ServerProcess, authority: Authority) -> None:
    body = b'{"prompt": "x", "max_tokens": 4000, "stream": true, "ignore_eos": true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    with secured(server, authority) as line:
        line.sendall(head % len(body) + body)
        wait_until(lambda: server.metric("baton_num_requests_running") == 1, "it runs")
        if kind == "full":
            line.close()
        else:
            socket.socket.shutdown(line, socket.SHUT_WR)
        wait_until(lambda: server.metric("baton_num_requests_running") == 0, "it is cancelled", 5.0)


def test_a_renewed_certificate_is_shown_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    own, new = Pair(tmp_path / "cert.pem", tmp_path / "key.pem"), authority.sign("renewed")
    old = authority.sign("old")
    _copy(old, own)
    with baton_router(*SCRIPTED, *own.options) as router:
        port = urlsplit(router.url).port or 0

        def shown() -> bytes:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port)))

        assert shown() == _der(old)
        with secured(router, authority) as open_before:
            own.key.write_text("nonsense")
            wait_until(lambda: "the one before stays" in router.output(), "a line about the bad key")
            assert shown() == _der(old)
            _copy(new, own)
            wait_until(lambda: shown() == _der(new), "the new certificate")
            open_before.sendall(CLOSE)
            assert status_of(read_to_end(open_before)) == 200
        assert router.output().count("WARNING") == 1


def _copy(source: Pair, target: Pair) -> None:
    shutil.copyfile(source.certificate, target.certificate)
    shutil.copyfile(source.key, target.key)
    target.key.chmod(0o600)


def _der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


@pytest.mark.slow
def test_a_handshake_that_never_ends_is_cut_after_20_s(server: ServerProcess) -> None:
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(server.url)) for _ in range(3)]
        lines[1].sendall(b"\x16\x03\x01")
        assert [read_to_end(line) for line in lines] == [b""] * 3
    assert server.metric("baton_http_refusals_total", reason="tls_handshake_timeout") == 3


# ── our own commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


def baton(*arguments: str, stdin: str = "") -> tuple[int, str]:
    """Exit status and output, without its line breaks, of a command that is run in this process."""
    result = CliRunner().invoke(app, arguments, input=stdin)
    return result.exit_code, " ".join(result.output.split())


def test_chat_verifies_and_says_what_to_do(server: ServerProcess, authority: Authority, stranger: Authority) -> None:
    asking = ("chat", "--url", server.url, "--max-tokens", "5", "--cacert")
    code, said = baton(*asking, str(authority.certificate), stdin="hi")
    assert code == 0, said
    code, said = baton(*asking, str(stranger.certificate), stdin="hi")
    assert code == 1
    assert "is not trusted" in said
    assert "--cacert FILE or SSL_CERT_FILE" in said
    code, said = baton(*asking, "/nowhere.pem", stdin="hi")
    assert code == 2
    assert "/nowhere.pem: No such file" in said
    code, said = baton("chat", "--url", server.url.replace("https", "http"), stdin="hi")
    assert code == 1
    assert "use https://" in said


def test_chat_trusts_what_the_environment_names(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "baton", "chat", "--url", server.url, "--max-tokens", "5"]
    asked = subprocess.run(command, check=False, input="hi", capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0, asked.stderr


def test_bench_serve_and_drain_speak_https(server: ServerProcess, authority: Authority, stranger: Authority) -> None:
    load = ("bench", "serve", "--url", server.url, "--requests", "4", "--concurrency", "2", "--output-tokens", "4")
    lengths = ("--id-range", "10:200", "--input-tokens", "8")
    code, said = baton(*load, *lengths, "--cacert", str(authority.certificate))
    assert code == 0, said
    draining = ("drain", "nobody", "--url", server.url, "--cacert")
    code, said = baton(*draining, str(authority.certificate))
    assert code == 1
    assert said == "baton drain: Not Found", "an answer of the server, which is no router"
    code, said = baton(*draining, str(stranger.certificate))
    assert code == 1
    assert "is not trusted" in said
    assert "--cacert" in said


def test_files_that_cannot_be_used_end_the_start_with_one_line(pair: Pair, tmp_path: Path) -> None:
    for options, said in (
        (("--ssl-certfile", "/nowhere.pem"), "cannot read --ssl-certfile /nowhere.pem: No such file"),
        (("--ssl-certfile", str(pair.certificate)), "holds no private key: give it with --ssl-keyfile"),
        (("--ssl-keyfile", str(pair.key)), "--ssl-keyfile is only for --ssl-certfile"),
    ):
        code, output = refused_by_serve(*SCRIPTED, *options)
        assert code == EXIT_SETUP
        assert said in output
        assert len(output.strip().splitlines()) == 1
