"""`valkeys://`: who is trusted, what travels before that is known, and that a call keeps its time under TLS too."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from baton.kv.store import BadStore, Store, StoreFailed, open_store, parse_url
from benchmarks.store_servers import StoreServer, valkey_server, valkey_why_not
from tests.support.certificates import Authority, Pair, encrypted, needs_openssl
from tests.support.stores import got, put, sample
from tests.support.tls_relay import TlsRelay, tls_relay

pytestmark = [pytest.mark.skipif(valkey_why_not() is not None, reason=valkey_why_not() or ""), needs_openssl]

PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign("server")


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with valkey_server(options=("--requirepass", PASSWORD)) as made:
        yield made


@pytest.fixture
def relay(server: StoreServer, pair: Pair) -> Iterator[TlsRelay]:
    with tls_relay(port_of(server), pair) as made:
        yield made


def port_of(server: StoreServer) -> int:
    return parse_url(server.url).port or 0


def url_to(port: int, options: str, host: str = "localhost") -> str:
    return f"valkeys://:{PASSWORD}@{host}:{port}/0{options}"


@contextlib.contextmanager
def opened(url: str, timeout_s: float = 10.0) -> Iterator[Store]:
    store = open_store(url, timeout_s=timeout_s)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_server_whose_authority_is_named_is_used_on_one_connection(
    host: str, relay: TlsRelay, authority: Authority
) -> None:
    made = sample(random.Random(host), 300_000)
    with opened(url_to(relay.port, f"?ca={authority.certificate}", host)) as store:
        for _ in range(3):
            assert put(store, made) == [True]
            assert got(store, made) == made.data
    assert relay.connections == 1, "session tickets are no reason to connect anew"


def test_the_authority_may_be_named_by_the_environment(
    relay: TlsRelay, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with opened(url_to(relay.port, "")) as store:
        assert store.look(["a"]) == [False]


def test_an_untrusted_server_gets_no_password(relay: TlsRelay, tmp_path: Path) -> None:
    another = Authority(tmp_path, "another")
    for options in ("", f"?ca={another.certificate}"):
        with opened(url_to(relay.port, options)) as store, pytest.raises(StoreFailed) as refused:
            store.look(["a"])
        assert "its certificate is not trusted" in str(refused.value)
        assert "?ca=FILE" in str(refused.value)
        assert PASSWORD not in f"{refused.value!r} {refused.value.__cause__!r} {store!r}"
    assert relay.received == b""


def test_a_certificate_for_another_name_is_refused(server: StoreServer, authority: Authority) -> None:
    other = authority.sign("other", "DNS:store.example")
    with (
        tls_relay(port_of(server), other) as relay,
        opened(url_to(relay.port, f"?ca={authority.certificate}")) as store,
        pytest.raises(StoreFailed, match="not valid for 'localhost'"),
    ):
        store.look(["a"])
    assert relay.received == b""


def test_without_verification_every_server_is_used_with_a_warning(relay: TlsRelay, caplog: pytest.LogCaptureFixture) -> None:
    with opened(url_to(relay.port, "?verify=none")) as store:
        assert store.look(["a"]) == [False]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not verified (verify=none)" in record.message
    assert PASSWORD not in record.message


def test_a_client_certificate_is_presented_where_the_server_wants_one(
    server: StoreServer, pair: Pair, authority: Authority
) -> None:
    mine, ca = authority.sign("client", "DNS:client"), f"?ca={authority.certificate}"
    with tls_relay(port_of(server), pair, authority.certificate) as relay:
        with opened(url_to(relay.port, f"{ca}&cert={mine.certificate}&key={mine.key}")) as store:
            assert store.look(["a"]) == [False]
        with opened(url_to(relay.port, ca)) as store, pytest.raises(StoreFailed):
            store.look(["a"])


def test_a_server_that_speaks_no_tls_is_a_failure_and_so_is_plain_valkey_to_one_that_does(
    server: StoreServer, relay: TlsRelay
) -> None:
    with (
        opened(url_to(port_of(server), ""), 0.5) as store,
        pytest.raises(StoreFailed, match=r"^valkeys://localhost:\d+/0"),
    ):
        store.look(["a"])
    with opened(f"valkey://:{PASSWORD}@localhost:{relay.port}", 0.5) as store, pytest.raises(StoreFailed):
        store.look(["a"])


def test_a_handshake_that_never_ends_does_not_hold_a_call_beyond_its_time() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        opened(url_to(silent.getsockname()[1], "", "127.0.0.1"), 0.3) as store,
        pytest.raises(StoreFailed, match=r"does not answer within 0\.3 s"),
    ):
        store.look(["a"])


def test_a_server_that_reads_a_little_now_and_then_does_not_hold_a_call_beyond_its_time(
    pair: Pair, authority: Authority
) -> None:
    """Each record is sent in time, all of them together are not."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    given_up = threading.Event()

    def serve(listener: socket.socket) -> None:
        line, _ = listener.accept()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        with contextlib.suppress(OSError), context.wrap_socket(line, server_side=True) as secure:
            while secure.recv(1 << 14):
                secure.sendall(b"+OK\r\n" if not given_up.is_set() else b"")
                given_up.wait(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"valkeys://localhost:{listener.getsockname()[1]}/0?ca={authority.certificate}"
        large = memoryview(bytearray(64 << 20))
        with opened(url, 0.5) as store, pytest.raises(StoreFailed, match=r"does not answer within 0\.5 s"):
            store.put(["large"], [large])
        given_up.set()
        thread.join()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("?ca=/nowhere.pem", r"cannot use ca=/nowhere\.pem: No such file"),
        ("?ca={nonsense}", "it holds no certificate in PEM form"),
        ("?verify=maybe", "verify=maybe is not known"),
        ("?verify=none&ca={ca}", "is not used with verify=none"),
        ("?key={key}", "is only for cert=FILE"),
        ("?cert={cert}&key={other}", "key values mismatch"),
        ("?cert={cert}&key=/nowhere.key", "no such file"),
        ("?cert={cert}&key={encrypted}", "is encrypted, which is not supported"),
        ("?ssl=yes", "no option 'ssl', only limit, ca, cert, key, verify"),
    ],
)
def test_options_that_cannot_be_are_said_at_once(
    options: str, said: str, pair: Pair, authority: Authority, tmp_path: Path
) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    named = {
        "nonsense": nonsense, "ca": authority.certificate, "cert": pair.certificate, "key": pair.key,
        "other": authority.sign("unrelated").key, "encrypted": encrypted(pair.key),
    }  # fmt: skip
    with pytest.raises(BadStore, match=said) as refused:
        open_store(url_to(1, options.format(**{name: quote(str(path)) for name, path in named.items()})))
    assert PASSWORD not in str(refused.value)


def test_options_of_tls_are_not_those_of_a_plain_address() -> None:
    with pytest.raises(BadStore, match="ca is only for valkeys://, which is TLS"):
        open_store("valkey://localhost/0?ca=/etc/ca.pem")


@pytest.mark.parametrize("scheme", ["valkeys", "rediss", "VALKEYS"])
def test_the_address_is_shown_without_password_and_options(scheme: str) -> None:
    url = parse_url(f"{scheme}://me:{PASSWORD}@store.example:6380/2?verify=none")
    assert (url.kind, url.is_tls, str(url)) == ("valkey", True, "valkeys://store.example:6380/2")
    assert PASSWORD not in repr(url)
