"""What is particular to a Valkey server: it hangs, dies, comes back empty, is full, has a password and is shared."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from baton.bench.child_processes import free_port
from baton.kv.store import MISSING, OVERSIZED, BadStore, Store, StoreFailed, open_store
from benchmarks.store_servers import StoreServer, valkey_server, valkey_why_not
from tests.support.stores import Arena, got, hanging, put, sample, samples

pytestmark = pytest.mark.skipif(valkey_why_not() is not None, reason=valkey_why_not() or "")

PASSWORD = "open-sesame/&?"
WRITTEN_PASSWORD = "open-sesame%2F%26%3F"


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with valkey_server() as made:
        yield made


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Other objects for each test: they share a server."""
    return random.Random(request.node.name)


@contextlib.contextmanager
def opened(url: str, timeout_s: float = 10.0) -> Iterator[Store]:
    store = open_store(url, timeout_s=timeout_s)
    try:
        yield store
    finally:
        store.close()


def port_of(server: StoreServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def raw(server: StoreServer, command: bytes) -> bytes:
    """Straight past the store."""
    with socket.create_connection(("127.0.0.1", port_of(server))) as line:
        line.sendall(command + b"\r\n")
        return line.recv(4096)


# ── servers in trouble ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_hangs_fails_each_call_and_is_well_again_afterwards(server: StoreServer, draw: random.Random) -> None:
    first, second = sample(draw, 200_000), sample(draw, 200_000)
    with opened(server.url, timeout_s=0.3) as store:
        with opened(server.url) as patient:
            put(patient, first, second)
        assert store.look([first.name]) == [True]
        with hanging(server):
            for call in (lambda: store.look([first.name]), lambda: got(store, first), lambda: put(store, sample(draw))):
                with pytest.raises(StoreFailed, match=r"does not answer within 0\.3 s"):
                    call()
            with pytest.raises(StoreFailed):
                store.stat()
            with pytest.raises(StoreFailed):
                store.drop([first.name])
        with opened(server.url) as patient:
            assert [got(patient, first), got(patient, second)] == [first.data, second.data]


def test_what_a_server_answers_too_late_is_not_taken_for_the_next_answer(server: StoreServer, draw: random.Random) -> None:
    first, second = sample(draw, 3000), sample(draw, 3000)
    with opened(server.url, timeout_s=2.0) as store:
        put(store, first, second)
        with hanging(server), pytest.raises(StoreFailed):
            got(store, first)
        assert got(store, second) == second.data


def test_a_server_that_died_and_came_back_is_found_and_is_empty(draw: random.Random) -> None:
    port, made = free_port(), sample(draw)
    with opened(f"valkey://127.0.0.1:{port}") as store:
        with pytest.raises(StoreFailed, match="refused"):
            store.look([made.name])
        with valkey_server(port):
            assert put(store, made) == [True]
        with pytest.raises(StoreFailed):
            got(store, made)
        with valkey_server(port):
            assert got(store, made) == MISSING
            assert put(store, made) == [True]
            assert got(store, made) == made.data


def test_a_name_that_no_host_can_have_is_a_failure_of_the_store() -> None:
    with opened("valkey://a..b:6379") as store, pytest.raises(StoreFailed, match=r"valkey://a\.\.b:6379: .*label"):
        store.look(["a"])


def test_a_full_server_has_no_room_and_still_gives_what_it_has(draw: random.Random) -> None:
    small = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with valkey_server(options=small) as full, opened(full.url) as store:
        made = samples(draw, 16, 500_000)
        stored = put(store, *made)
        assert stored[0] is True
        assert stored[-1] is False
        assert [got(store, each) for each in made] == [
            each.data if there else MISSING for each, there in zip(made, stored, strict=True)
        ]
        assert store.stat().limit_bytes == 4 << 20
        store.clear()
        assert put(store, made[-1]) == [True]


# ── who shares it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_others_keep_in_the_server_is_neither_listed_nor_cleared(server: StoreServer, draw: random.Random) -> None:
    assert raw(server, b"SET theirs 1") == b"+OK\r\n"
    assert raw(server, b"LPUSH baton:list 1") == b":1\r\n"
    made = samples(draw, 1200, 10)
    with opened(server.url) as store:
        put(store, *made)
        assert {name for name, _ in store.names()} >= {each.name for each in made}
        assert "list" not in {name for name, _ in store.names()}
        store.clear()
        assert list(store.names()) == []
    assert raw(server, b"GET theirs") == b"$1\r\n1\r\n"


def test_databases_of_one_server_are_apart(server: StoreServer, draw: random.Random) -> None:
    made = sample(draw)
    with opened(server.url) as zero, opened(server.url.removesuffix("0") + "3") as three:
        put(zero, made)
        assert three.look([made.name]) == [False]
        three.clear()
        assert zero.look([made.name]) == [True]


def test_the_password_is_given_to_the_server_and_to_nobody_else(draw: random.Random) -> None:
    made = sample(draw)
    with valkey_server(options=("--requirepass", PASSWORD)) as locked:
        address = locked.url.removeprefix("valkey://")
        with opened(f"valkey://:{WRITTEN_PASSWORD}@{address}") as store:
            assert put(store, made) == [True]
            assert got(store, made) == made.data
        for url in (
            locked.url,
            f"redis://:wrong-{WRITTEN_PASSWORD}@{address}",
            f"valkey://nobody:{WRITTEN_PASSWORD}@{address}",
        ):
            with opened(url) as store, pytest.raises(StoreFailed) as refused:
                store.look([made.name])
            assert "sesame" not in f"{refused.value!r} {refused.value.__cause__!r}"
            assert "sesame" not in repr(store)


# ── servers that are none ────────────────────────────────────────────────────────────────────────────────────────────────


class Pretender:
    """Answers the greeting as a server does, and everything after it with `answer`."""

    def __init__(self, answer: Iterator[bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"valkey://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        line, _ = self._listener.accept()
        with line, contextlib.suppress(OSError):
            line.recv(4096)  # CLIENT SETNAME
            line.sendall(b"+OK\r\n")
            line.recv(65536)
            for piece in self._answer:
                line.sendall(piece)

    def close(self) -> None:
        self._listener.close()
        self._thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"*1\r\n", b"*2\r\n", b"*1\r\n$4\r\nab", b"*1\r\n$4\r\nabcdef\r\n", b"*1\r\n$x\r\n", b"*1\r\n:4\r\n",
        b"*x\r\n", b"HTTP/1.1\r\n", b"-ERR no\r\n", b"-LOADING it\r\n", b"$4\r\nabcd\r\n", b"a" * 9000, b"*1\r\n$9999\r\nab",
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_a_failure(answer: bytes) -> None:
    pretender = Pretender(iter([answer]))
    with opened(pretender.url, timeout_s=5.0) as store, pytest.raises(StoreFailed):
        store.get(["a"], [memoryview(bytearray(100))])
    pretender.close()


@pytest.mark.parametrize(
    "answer", [b":x\r\n", b"!\r\n", b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n", b"$9999999\r\n", b"*99999999\r\n"]
)
def test_a_reply_that_none_of_our_commands_has_is_a_failure(answer: bytes) -> None:
    pretender = Pretender(iter([answer]))
    with opened(pretender.url, timeout_s=5.0) as store, pytest.raises(StoreFailed):
        store.look(["a"])
    pretender.close()


def test_one_that_sends_a_byte_now_and_then_does_not_hold_a_call_beyond_its_time() -> None:
    """Each byte comes in time, all of them together do not; one who waits for each anew would get the object."""
    given_up = threading.Event()

    def trickle() -> Iterator[bytes]:
        yield b"*1\r\n$100\r\n"
        for _ in range(100):
            given_up.wait(0.02)
            yield b"a"
        yield b"\r\n"

    pretender = Pretender(trickle())
    with opened(pretender.url, timeout_s=0.3) as store, pytest.raises(StoreFailed, match="does not answer"):
        store.get(["a"], [memoryview(bytearray(100))])
    given_up.set()
    pretender.close()


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_object_too_large_for_its_buffer_leaves_the_connection_in_order(server: StoreServer, draw: random.Random) -> None:
    large, small = sample(draw, 3_000_000), sample(draw, 100)
    with opened(server.url) as store:
        put(store, large, small)
        into = memoryview(bytearray(len(small.data)))
        assert store.get([large.name, small.name], [memoryview(bytearray(10)), into]) == [OVERSIZED, len(small.data)]
        assert into == small.data
        assert got(store, large) == large.data


def test_what_is_there_stays_as_it_is(server: StoreServer, draw: random.Random) -> None:
    before = sample(draw)
    after = sample(draw, key=before.key)
    with opened(server.url) as store:
        assert put(store, before) == put(store, after) == [True]
        assert got(store, before) == before.data


def test_a_slice_of_an_arena_is_stored_and_nothing_beside_it(server: StoreServer) -> None:
    arena = Arena(1 << 16)
    arena.whole[:] = b"\xee" * (1 << 16)
    with opened(server.url) as store:
        assert store.put(["slice"], [arena.whole[100:20_100]]) == [True]
        assert raw(server, b"STRLEN baton:slice") == b":20000\r\n"


def test_a_closed_store_fails(server: StoreServer) -> None:
    with opened(server.url) as store:
        store.look(["a"])
    with pytest.raises(StoreFailed, match="closed"):
        store.look(["a"])


@pytest.mark.parametrize("url", ["valkey://127.0.0.1/first", "valkey://127.0.0.1/0?ssl=yes", "valkey://127.0.0.1:port/0"])
def test_addresses_that_no_server_has_are_said_at_once(url: str) -> None:
    with pytest.raises(BadStore):
        open_store(url)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("baton.kv.valkey_store", "baton.kv.valkey_connection"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(BadStore, match=r"baton-serve\[valkey\]"):
        open_store("valkey://127.0.0.1")
