"""Clients without a key against a real `baton serve` and a real router: what they send and hold costs next to nothing.

Memory is read from the system, as the most that the process ever had.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from tests.support.raw_http import PeakMemory, connected, exchange, read_to_end, send_as_taken, status_of
from tests.support.server import ServerProcess, baton_process, baton_router, baton_serve
from tests.support.waiting import wait_until

SCRIPTED = ("--executor", "scripted")
GROWN_MB_MAX = 20.0
QUICK_S = 10.0
"""Three times what these take on a busy machine."""
SCALE = int(os.environ.get("BATON_TEST_BORDER_SCALE", "1"))
"""Divides what is sent; to see what a server without these limits does before the machine is out of memory."""
MB = 1 << 20


@pytest.fixture(scope="module", params=["serve", "router"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    start = baton_serve if request.param == "serve" else baton_router
    with start(*SCRIPTED) as running:
        yield running


@contextlib.contextmanager
def bounded(server: ServerProcess) -> Iterator[None]:
    """Inside, the server's memory grows little and little time passes; after it, the server is well."""
    peak, begun_s = PeakMemory(server.process.pid), time.monotonic()
    yield
    grown_mb, took_s = peak.grown_mb(), time.monotonic() - begun_s
    print(f"\n{grown_mb:.1f} MB more at most, {took_s:.1f} s")
    assert httpx.get(f"{server.url}/health", timeout=QUICK_S).status_code == 200
    assert grown_mb < GROWN_MB_MAX
    assert took_s < QUICK_S


def test_pipelined_requests_whose_answers_nobody_reads_cost_little(server: ServerProcess) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with bounded(server), connected(server.url) as client:
        taken = send_as_taken(client, request * 1000, 30 * MB // SCALE // (1000 * len(request)))
        assert taken < 30 * MB / SCALE / 2, "it reads on though nobody reads its answers"


def test_a_header_of_200_mb_is_refused_when_it_is_too_large(server: ServerProcess) -> None:
    with bounded(server), connected(server.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        send_as_taken(client, b"x" * MB, 200 // SCALE)
        assert status_of(read_to_end(client)) in (431, 0)  # 0: it was closed while we wrote
    assert status_of(exchange(server.url, b"GET / HTTP/1.1\r\nX-Long: " + b"x" * 40_000)) == 431


def test_many_headers_are_refused_when_they_are_too_many(server: ServerProcess) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with bounded(server), connected(server.url) as client:
        client.sendall(head)
        send_as_taken(client, b"x: y\r\n" * 1000, 100_000 // SCALE)
    assert status_of(exchange(server.url, head + b"x: y\r\n" * 100 + b"\r\n")) == 431
    assert status_of(exchange(server.url, head + b"x: y\r\n" * 98 + b"Connection: close\r\n\r\n")) == 200


def test_a_url_of_100_mb_is_refused_when_it_is_too_long(server: ServerProcess) -> None:
    with bounded(server), connected(server.url) as client:
        client.sendall(b"GET /")
        send_as_taken(client, b"x" * MB, 100 // SCALE)
    close = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert status_of(exchange(server.url, b"GET /" + b"x" * 8192 + close)) == 414
    assert status_of(exchange(server.url, b"GET /" + b"x" * 8000 + close)) == 404


@pytest.mark.parametrize("tail", [b"0\r\nX-Long: ", b"5;extension="], ids=["trailer", "chunk extension"])
def test_what_comes_around_chunks_is_bounded_too(server: ServerProcess, tail: bytes) -> None:
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with bounded(server), connected(server.url) as client:
        client.sendall(head + b"1\r\n{\r\n" + tail)
        taken = send_as_taken(client, b"x" * MB, 100 // SCALE)
        assert status_of(read_to_end(client)) in (431, 0)
        assert taken < 100 * MB / SCALE / 2


def test_the_log_has_a_counted_line_for_many_bad_requests(server: ServerProcess) -> None:
    before = len(server.output())
    for _ in range(200):
        assert status_of(exchange(server.url, b"nonsense\r\n\r\n")) == 400
    assert server.metric("baton_http_refusals_total", reason="bad_request") >= 200
    said = server.output()[before:]
    assert said.count("bad_request") <= 3, said
    assert "Traceback" not in said


@pytest.mark.parametrize("host", [b"localhost", b"127.0.0.1:1", b"[::1]:8000", b"127.8.9.10", b"LOCALHOST.:80"])
def test_without_keys_loopback_names_are_answered(server: ServerProcess, host: bytes) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    assert status_of(exchange(server.url, request)) == 200


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/dashboard", b"/nowhere"])
def test_without_keys_no_other_name_is_answered_on_any_path(server: ServerProcess, path: bytes) -> None:
    for host in (b"evil.example", b"localhost.evil.example:80", b"127.0.0.1.evil.example", b"10.0.0.1", b""):
        answer = exchange(server.url, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        assert status_of(answer) == 421
        assert b"--api-key" in answer
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert status_of(exchange(server.url, b"GET " + path + b" HTTP/1.1\r\nHost: evil.example\r\n" + upgrade)) == 421


def test_with_keys_or_where_it_is_allowed_other_names_are_answered() -> None:
    request = b"GET /health HTTP/1.1\r\nHost: models.example\r\nConnection: close\r\n\r\n"
    for options in (("--api-key", "k"), ("--allowed-hosts", "Models.example")):
        with baton_router(*SCRIPTED, *options) as router:
            assert status_of(exchange(router.url, request)) == 200


def test_a_stream_that_is_read_late_and_slowly_is_whole_and_what_was_asked_behind_it_is_answered() -> None:
    body = b'{"prompt": "x", "max_tokens": 4000, "stream": true, "ignore_eos": true, "return_token_ids": true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    behind = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with baton_serve(*SCRIPTED) as server, connected(server.url) as client:
        client.sendall(head % len(body) + body + behind)
        wait_until(lambda: server.metric("baton_engine_steps_total") >= 4000, "it is all made, and nothing is read")
        answer = read_to_end(client)
    stream, _, last = answer.partition(b"data: [DONE]")
    tokens = [token for part in re.findall(rb'"token_ids":\[([0-9,]*)\]', stream) for token in part.split(b",") if token]
    assert len(tokens) == 4000, "several that come at once are one event"
    assert b"HTTP/1.1 200 OK" in last
    assert last.endswith(b'{"status":"ok"}')


@pytest.mark.slow
def test_a_header_and_a_body_that_never_end_get_408() -> None:
    parts = (b"GET /health HTTP/1.1\r\nX-Slow: ", b"POST /tokenize HTTP/1.1\r\nContent-Length: 100\r\n"
             b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
    with baton_serve(*SCRIPTED) as server, contextlib.ExitStack() as held:
        clients = [held.enter_context(connected(server.url)) for _ in parts]
        for client, part in zip(clients, parts, strict=True):
            client.settimeout(3 * 30)
            client.sendall(part)
        assert [status_of(read_to_end(client)) for client in clients] == [408, 408]


# ── answers that nobody reads ────────────────────────────────────────────────────────────────────────────────────────────

UNREAD_ANSWERS = 40
UNREAD_MB_MAX = 250.0
"""64 MiB that may be unread, and what the allocator keeps of the answers' making; without a bound it was 345 MB.

More than answers that are read: to make one takes 150 MB for a moment.
"""


@pytest.mark.slow
def test_large_answers_that_nobody_reads_are_bounded_and_a_reader_is_served() -> None:
    body = b'{"prompt": "%b", "return_token_strs": true}' % (b"a" * MB)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    json = {"Content-Type": "application/json"}
    with baton_serve(*SCRIPTED) as server, contextlib.ExitStack() as held:
        peak = PeakMemory(server.process.pid)
        for _ in range(2):
            assert len(httpx.post(f"{server.url}/tokenize", content=body, headers=json, timeout=60).content) > 4 * MB
        read_mb = peak.grown_mb()
        for _ in range(UNREAD_ANSWERS // SCALE):
            client = held.enter_context(connected(server.url, 4096))
            client.settimeout(60)
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(1), "its answer has begun"
        assert len(httpx.post(f"{server.url}/tokenize", content=body, headers=json, timeout=60).content) > 4 * MB
        grown_mb = peak.grown_mb() - read_mb
        print(f"\n{grown_mb:.1f} MB more at most than the {read_mb:.1f} MB of answers that are read")
        assert grown_mb < UNREAD_MB_MAX
        assert server.metric("baton_http_refusals_total", reason="unread") > 0


# ── descriptors ──────────────────────────────────────────────────────────────────────────────────────────────────────────

FILES = 256


@contextlib.contextmanager
def few_files(*arguments: str) -> Iterator[ServerProcess]:
    """Its hard limit is low too, so that it cannot help itself."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = subprocess.Popen

    def limited(*given: object, **named: object) -> subprocess.Popen[bytes]:
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))  # noqa: E731
        return command(*given, preexec_fn=limit, **named)  # type: ignore[call-overload, no-any-return]

    assert own[0] > 2 * FILES, "this test opens more than its server may"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", limited)
        running = baton_process(*arguments, wait=False)
        server = running.__enter__()
    try:
        server.wait_until_served()
        yield server
    finally:
        running.__exit__(None, None, None)


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("router", "--port", "0", "--join-port", "0")])
def test_more_idle_connections_than_files_keep_nobody_out(command: tuple[str, ...]) -> None:
    with few_files(*command, *SCRIPTED) as server, contextlib.ExitStack() as idle:
        for _ in range(300):
            idle.enter_context(connected(server.url))
        begun_s = time.monotonic()
        for _ in range(20):
            assert httpx.get(f"{server.url}/health", timeout=QUICK_S).status_code == 200
        assert time.monotonic() - begun_s < QUICK_S
        assert server.metric("baton_http_refusals_total", reason="shed") >= 300 - FILES
        assert len(server.output()) < 4000
        assert "Traceback" not in server.output()


def test_one_address_gets_its_share_and_another_is_not_kept_out() -> None:
    options = ("--max-connections-per-address", "4", "--trusted-proxies", "127.0.0.2")
    with baton_router(*SCRIPTED, *options) as router, contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(connected(router.url))
        answer = exchange(router.url, b"GET /health HTTP/1.1\r\n\r\n")
        assert status_of(answer) in (503, 0)  # 0: it was closed while we wrote
        port = int(router.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0), timeout=10) as proxied:
            proxied.sendall(b"GET /health HTTP/1.1\r\nX-Forwarded-For: 10.0.0.1\r\nConnection: close\r\n\r\n")
            assert status_of(read_to_end(proxied)) == 200
        held.close()
        assert httpx.get(f"{router.url}/health").status_code == 200
        assert router.metric("baton_http_refusals_total", reason="too_many_from_address") == 1


@pytest.mark.parametrize("length", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_as_many_unfinished_bodies_as_connections_keep_nobody_out(length: bytes) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer greedy\r\nContent-Type: application/json\r\n"
    modest = {"Authorization": "Bearer modest"}
    options = ("--api-key", "greedy", "--api-key", "modest", "--max-connections", "20")
    with baton_router(*SCRIPTED, *options) as router, contextlib.ExitStack() as held:
        for _ in range(20 + 16):
            held.enter_context(connected(router.url)).sendall(head + length + b"\r\n\r\n")
        assert httpx.get(f"{router.url}/health", timeout=QUICK_S).status_code == 200
        answer = httpx.post(f"{router.url}/tokenize", json={"prompt": "x"}, headers=modest, timeout=QUICK_S)
        assert answer.status_code == 200


# ── bodies with a valid key ──────────────────────────────────────────────────────────────────────────────────────────────

HALF_BODIES = 60
HALF_BODIES_MB_MAX = 40.0
"""16 MiB of the key, and as much again for buffers of connections."""


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"", id="plain"),
        pytest.param(b"Idempotency-Key: once\r\n", id="idempotent", marks=pytest.mark.slow),
    ],
)
def test_unfinished_bodies_of_one_key_are_bounded_and_another_key_is_served(header: bytes) -> None:
    size = 4 * MB
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer greedy\r\nContent-Type: application/json\r\n"
    head += header + b"Content-Length: %d\r\n\r\n" % size
    keys = ("--api-key", "greedy", "--api-key", "modest")
    modest = {"Authorization": "Bearer modest", "Content-Type": "application/json"}
    with baton_router(*SCRIPTED, *keys) as router, contextlib.ExitStack() as held:
        peak = PeakMemory(router.process.pid)
        clients = [held.enter_context(connected(router.url)) for _ in range(HALF_BODIES // SCALE)]
        for client in clients:
            with contextlib.suppress(ConnectionError):  # it was refused while we wrote
                client.sendall(head + b" " * (size - 1))
        body = b'{"text": "%b"}' % (b"x" * MB)
        answer = httpx.post(f"{router.url}/tokenize", content=body, headers=modest, timeout=QUICK_S)
        grown_mb = peak.grown_mb()
        print(f"\n{grown_mb:.1f} MB more at most")
        assert answer.status_code == 400, "it was read whole and understood: there is no prompt in it"
        assert grown_mb < HALF_BODIES_MB_MAX
