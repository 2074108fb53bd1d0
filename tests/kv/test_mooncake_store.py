"""What is particular to a Mooncake Store: a master that hangs, dies and comes back, memory that is full or goes with its
owner, and calls that cannot be stopped."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baton.bench.child_processes import free_port
from baton.kv import mooncake_client as mooncake_link
from baton.kv.mooncake_client import address_of, client_class
from baton.kv.store import MISSING, BadStore, Store, StoreFailed, open_store
from benchmarks.store_servers import StoreServer, mooncake_server, mooncake_why_not
from tests.support.stores import Arena, got, hanging, put, sample, samples
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(mooncake_why_not() is not None, reason=mooncake_why_not() or "")


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with mooncake_server() as made:
        yield made


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Other objects for each test: they share a server."""
    return random.Random(request.node.name)


@contextlib.contextmanager
def opened(url: str, arena: Arena | None = None, timeout_s: float = 10.0) -> Iterator[Store]:
    store = open_store(url, timeout_s=timeout_s)
    if arena is not None:
        store.attach(arena.whole)
    try:
        yield store
    finally:
        store.close()


def test_a_master_that_hangs_fails_each_call_and_is_well_again_afterwards(server: StoreServer, draw: random.Random) -> None:
    made = sample(draw, 50_000)
    with opened(server.url, timeout_s=0.5) as store:
        # On a busy machine connecting alone may take longer than it may here.
        wait_until(lambda: answered(lambda: put(store, made)) == [True], "the store is connected")
        with hanging(server):
            for call in (lambda: store.look([made.name]), lambda: got(store, made), lambda: put(store, sample(draw))):
                with pytest.raises(StoreFailed, match=r"does not answer within 0\.5 s"):
                    call()
            for tried in (store.stat, store.clear, lambda: store.drop([made.name])):
                with pytest.raises(StoreFailed):
                    tried()
        with contextlib.suppress(StoreFailed):
            store.look([made.name])  # what it was asked before comes first
        with opened(server.url) as patient:
            assert got(patient, made) in (made.data, MISSING)  # it was asked to drop it, and may have heard so


def test_one_who_comes_while_the_master_hangs_is_told_and_holds_up_nobody(server: StoreServer, draw: random.Random) -> None:
    """Their way to connect would keep the interpreter's lock until the master answers."""
    turns, ended = [0], threading.Event()

    def turn() -> None:
        while not ended.wait(0.001):
            turns[0] += 1

    beside = threading.Thread(target=turn)
    with hanging(server), opened(server.url, timeout_s=0.5) as store:
        beside.start()
        with pytest.raises(StoreFailed):
            store.look(["a"])
        ended.set()
        beside.join()
    assert turns[0] > 10


def test_a_master_that_died_and_came_back_is_found_and_is_empty(draw: random.Random) -> None:
    port, admin, made = free_port(), free_port(), sample(draw)
    with opened(f"mooncake://127.0.0.1:{port}?segment=16M&admin=127.0.0.1:{admin}") as store:
        with pytest.raises(StoreFailed, match="not reached"):
            store.look([made.name])
        with mooncake_server(port, admin):
            assert put(store, made) == [True]
        with pytest.raises(StoreFailed):
            got(store, made)
        with mooncake_server(port, admin):
            wait_until(lambda: answered(lambda: got(store, made)) == MISSING, "the new master is found")
            wait_until(lambda: answered(lambda: put(store, made)) == [True], "the new master has our memory")
            assert got(store, made) == made.data
            store.close()  # while there is a master: nothing stays behind for the tests after this one


def answered(call: Callable[[], object]) -> object:
    try:
        return call()
    except StoreFailed:
        return None


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_that_is_full_has_no_room_and_still_gives_what_it_has(server: StoreServer, draw: random.Random) -> None:
    with opened(server.url.replace("256M", "16M")) as store:
        store.clear()
        made = samples(draw, 24, 1_000_000)
        stored = put(store, *made)
        assert stored[0] is True
        assert False in stored
        for each, there in zip(made, stored, strict=True):
            assert got(store, each) in ((each.data, MISSING) if there else (MISSING,))


def test_one_who_only_looks_gives_no_memory_and_where_nobody_gives_any_there_is_no_room(
    server: StoreServer, draw: random.Random
) -> None:
    with opened(server.url) as store:
        assert store.look(["a"]) == [False]
        assert store.stat().limit_bytes is None
    with opened(server.url.replace("256M", "0")) as store:
        assert put(store, sample(draw)) == [False]


OWNER = """
import sys, threading
from baton.kv.store import open_store
store = open_store(sys.argv[1], timeout_s=10.0)
print(store.put(sys.argv[2:], [memoryview(name.encode() * 1000) for name in sys.argv[2:]]), flush=True)
threading.Event().wait()
"""


def test_what_lay_with_somebody_who_died_is_missing() -> None:
    """A master of its own: for ten seconds it sends some of what is put to the dead one, too."""
    with contextlib.ExitStack() as lasting:
        server = lasting.enter_context(mooncake_server())
        command = [sys.executable, "-c", OWNER, server.url, "first", "second"]
        owner = lasting.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        lasting.callback(owner.kill)
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"[True, True]\n"
        store = lasting.enter_context(opened(server.url.replace("256M", "0")))
        into = memoryview(bytearray(5000))
        assert store.get(["first"], [into]) == [5000]
        assert into == b"first" * 1000
        owner.kill()
        owner.wait()
        assert store.get(["first", "second"], [into, memoryview(bytearray(6000))]) == [MISSING, MISSING]
        assert store.put(["third"], [into]) == [False]


def test_what_others_keep_there_is_neither_listed_nor_cleared(server: StoreServer, draw: random.Random) -> None:
    made, theirs = sample(draw), client_class()()
    master = server.url.removeprefix("mooncake://").partition("?")[0]
    assert theirs.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", master) == 0
    memory = np.arange(1000).astype(np.uint8)
    assert theirs.register_buffer(memory.ctypes.data, memory.size) == 0
    assert theirs.batch_put_from(["theirs"], [memory.ctypes.data], [memory.size]) == [0]
    with opened(server.url) as store:
        store.clear()
        put(store, made)
        assert list(store.names()) == [(made.name, len(made.data))]
        assert store.clear() == 1
    assert theirs.batch_is_exist(["theirs", "baton:" + made.name]) == [1, 0]
    theirs.close()


# ── calls that cannot be stopped ─────────────────────────────────────────────────────────────────────────────────────────


class Stubborn:
    """A client whose calls take as long as the test says, and whose gets write at the very end."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ended = threading.Event()
        self.addresses: list[list[int]] = []
        self.closed = 0
        self.closed_within_a_call = False
        self.setups = 0
        self._within = 0

    def setup(self, *where: object) -> int:
        self.setups += 1
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def allocate_and_mount_segment(self, size: int, protocol: str) -> dict[str, int]:
        return {"ret": 0}

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [1 for _ in keys]

    def batch_put_from(self, keys: list[str], of: list[int], sizes: list[int]) -> list[int]:
        self.addresses.append(of)
        return [0 for _ in keys]

    def batch_get_into(self, keys: list[str], to: list[int], sizes: list[int]) -> list[int]:
        self.addresses.append(to)
        self._within += 1
        if keys[0] == "baton:slow":
            self.go_on.wait()
        for address, size in zip(to, sizes, strict=True):
            ctypes.memset(address, ord("x"), size)
        self._within -= 1
        self.ended.set()
        return sizes

    def close(self) -> int:
        self.closed += 1
        self.closed_within_a_call |= self._within > 0
        return 0


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> Stubborn:
    client = Stubborn()
    monkeypatch.setattr(mooncake_link, "client_class", lambda: lambda: client)
    return client


def test_a_get_that_was_given_up_writes_nowhere_that_anybody_looks(server: StoreServer, stubborn: Stubborn) -> None:
    arena = Arena(1 << 16)
    with opened(server.url, arena, timeout_s=0.3) as store:
        slow, quick = arena.room(500), arena.room(500)
        with pytest.raises(StoreFailed):
            store.get(["slow"], [slow])
        assert store.get(["quick"], [quick]) == [500]
        assert quick == b"x" * 500
        assert stubborn.addresses[0] != stubborn.addresses[1]  # the first is still at it
        stubborn.ended.clear()
        stubborn.go_on.set()
        assert stubborn.ended.wait(10)
        assert slow == bytes(500)
        wait_until(
            lambda: store.get(["quick"], [quick]) == [500] and stubborn.addresses[0] in stubborn.addresses[1:],
            "it is used again",
        )


def test_a_client_is_closed_once_and_only_when_its_last_call_has_ended(server: StoreServer, stubborn: Stubborn) -> None:
    with opened(server.url, timeout_s=0.3) as store, pytest.raises(StoreFailed):
        store.get(["slow"], [memoryview(bytearray(10))])
    assert stubborn.closed == 0
    for call in (lambda: store.look(["a"]), lambda: store.drop(["a"]), store.stat):
        with pytest.raises(StoreFailed, match="closed"):
            call()
    stubborn.go_on.set()
    wait_until(lambda: stubborn.closed > 0, "it is closed")
    assert (stubborn.closed, stubborn.closed_within_a_call) == (1, False)


@pytest.mark.parametrize("host", ["", "&host=127.0.0.1"], ids=["found", "given"])
def test_nobody_is_set_up_with_a_master_that_answers_on_one_port_and_not_on_the_other(
    server: StoreServer, stubborn: Stubborn, host: str
) -> None:
    """That would keep the interpreter's lock for as long as the call may take, at each try."""
    options = server.url.partition("?")[2] + host
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with opened(f"mooncake://127.0.0.1:{port}?{options}", timeout_s=0.3) as store, pytest.raises(StoreFailed):
            store.look(["a"])
        assert stubborn.setups == 0
        with silent.accept()[0] as line:
            assert line.recv(1), "it was asked"
    with opened(server.url + host) as store:
        assert store.look(["a"]) == [True]
    assert stubborn.setups == 1


def test_what_their_client_raises_is_a_failure_of_the_store(
    server: StoreServer, stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: object) -> list[int]:
        raise RuntimeError("Caught an unknown exception!")

    monkeypatch.setattr(stubborn, "batch_is_exist", odd)
    with opened(server.url, Arena(1 << 16)) as store, pytest.raises(StoreFailed, match="RuntimeError: Caught"):
        store.look(["a"])


HANGING = """
import sys, threading
from baton.kv import mooncake_client as mooncake_link
from baton.kv.store import StoreFailed, open_store

class Hanging:
    def setup(self, *where):
        return 0
    def batch_is_exist(self, keys):
        threading.Event().wait()

mooncake_link.client_class = lambda: Hanging
store = open_store(sys.argv[1], timeout_s=0.3)
try:
    store.look(["a"])
except StoreFailed as failure:
    print(failure)
"""


def test_a_call_that_hangs_does_not_keep_the_process_from_ending(server: StoreServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, server.url], timeout=60, check=False, capture_output=True, text=True
    )
    unexpected = [line for line in done.stderr.splitlines() if "listens at" not in line]  # ports are told at WARNING
    assert (done.returncode, unexpected) == (0, [])
    assert "does not answer within 0.3 s" in done.stdout


def test_a_client_whose_master_is_gone_is_left_behind(stubborn: Stubborn) -> None:
    """To close it would hold up every thread of the process for ten seconds."""
    with mooncake_server() as brief:
        store = open_store(brief.url, timeout_s=5.0)
        assert store.look(["a"]) == [True]
    store.close()
    assert stubborn.closed == 0


def test_so_many_calls_that_hang_are_told_at_last(server: StoreServer, stubborn: Stubborn) -> None:
    with opened(server.url, timeout_s=0.05) as store:
        for _ in range(40):
            with pytest.raises(StoreFailed):
                store.get(["slow"], [memoryview(bytearray(10))])
        assert len(stubborn.addresses) <= 16
        stubborn.go_on.set()
        wait_until(lambda: answered(lambda: store.look(["a"])) == [True], "it is well again")


def test_objects_in_the_arena_are_put_from_where_they_lie_and_others_from_memory_that_the_client_knows(
    server: StoreServer, stubborn: Stubborn
) -> None:
    arena, outside = Arena(1 << 16), memoryview(bytearray(300))
    inside = [arena.room(300), arena.room(700)]
    with opened(server.url, arena) as store:
        store.put(["a", "b"], inside)
        store.put(["c"], [outside])
    assert stubborn.addresses[0] == [address_of(each) for each in inside]
    assert stubborn.addresses[1] != [address_of(outside)]


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_name_that_no_host_can_have_is_a_failure_of_the_store(server: StoreServer) -> None:
    for url in ("mooncake://a..b:1", f"mooncake://a..b:1?{server.url.partition('?')[2]}"):
        with opened(url) as store, pytest.raises(StoreFailed, match=r"not reached: .*label"):
            store.look(["a"])


@pytest.mark.parametrize("rest", ["/0", "?segment=much", "?colour=red", "?admin=9003", "?admin=host:port"])
def test_addresses_that_no_store_has_are_said_at_once(rest: str) -> None:
    with pytest.raises(BadStore):
        open_store(f"mooncake://127.0.0.1:50051{rest}")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(BadStore, match=r"baton-serve\[mooncake\]"):
        open_store("mooncake://127.0.0.1")
