"""KV beyond the pool, by real servers: what comes back gives exactly the tokens of an undisturbed run, whatever becomes of the
store meanwhile."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.bench.store_servers import StoreServer, valkey_server, valkey_why_not
from tests.support.cluster import wait_until
from tests.support.server import ServerProcess, baton_serve
from tests.support.storing import (
    SMALL_HOST,
    TIGHT,
    baton_store,
    bills,
    counts,
    mixture,
    preempted,
    restored,
    until_stored,
)
from tests.support.stores import SERVED, hanging, store_kinds


@dataclass(frozen=True)
class Stored:
    server: ServerProcess
    folder: Path

    @property
    def url(self) -> str:
        return f"file:{self.folder}"

    def objects(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("?" * 32) if path.parent.parent.parent == self.folder)


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp("filed") / "kv"
    with baton_serve(*TIGHT, *SMALL_HOST, "--kv-store", f"file:{folder}") as server:
        yield Stored(server, folder)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_yields_or_was_crowded_out_comes_back_from_host_memory_with_the_same_tokens() -> None:
    with baton_serve(*TIGHT, "--host-memory", "1M") as server:
        first = bills(server.url, mixture())
        assert preempted(first) > 0
        assert restored(first) > 0  # of those that yielded: nothing was there before
        assert restored(bills(server.url, mixture())) > 0
        assert counts(server.url)["kv_loaded_blocks"] > 0
        assert counts(server.url)["store_fetched_blocks"] == 0


@pytest.mark.parametrize("kind", store_kinds())
def test_what_was_crowded_out_of_host_memory_too_comes_back_from_the_store_with_the_same_tokens(
    kind: str, tmp_path: Path
) -> None:
    with (
        SERVED[kind].served(tmp_path) as url,
        baton_serve(*TIGHT, *SMALL_HOST, "--kv-store", url) as server,
    ):
        assert preempted(bills(server.url, mixture())) > 0
        until_stored(server.url)
        assert restored(bills(server.url, mixture())) > 0
        found = counts(server.url)
        assert found["store_fetched_blocks"] > 0
        assert found["store_errors"] == found["store_bad_blocks"] == found["store_missing_blocks"] == 0


# ── faults of files ──────────────────────────────────────────────────────────────────────────────────────────────────────


def flip(draw: random.Random, path: Path, _others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(draw: random.Random, path: Path, _others: list[Path]) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def lengthen(draw: random.Random, path: Path, _others: list[Path]) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 500)))


def remove(_draw: random.Random, path: Path, _others: list[Path]) -> None:
    path.unlink()


def swap(draw: random.Random, path: Path, others: list[Path]) -> None:
    path.write_bytes(draw.choice([other for other in others if other != path and other.exists()]).read_bytes())


Harm = Callable[[random.Random, Path, list[Path]], None]
HARMS: list[Harm] = [flip, cut, lengthen, remove, swap]


def test_no_damage_to_stored_files_under_a_running_server_changes_an_answer(filed: Stored) -> None:
    draw = random.Random(7)
    bills(filed.server.url, mixture(100))
    until_stored(filed.server.url)
    for number in range(6):
        objects = filed.objects()
        for path in draw.sample(objects, len(objects) // 2):
            draw.choice(HARMS)(draw, path, objects)
        bills(filed.server.url, mixture(100 if number % 2 else 200))
    found = counts(filed.server.url)
    assert found["store_fetched_blocks"] > 0  # what is sound beside it is used
    assert {flaw for flaw, count in found.items() if flaw.startswith("bad:") and count} >= {"bad:checksum", "bad:torn"}
    assert "stored blocks were bad, and are dropped" in filed.server.output()
    assert baton_store("verify", "--repair", filed.url).exit_code in (0, 1)
    assert baton_store("verify", filed.url).exit_code == 0


def test_a_full_disk_is_counted_and_service_goes_on(filed: Stored) -> None:
    bills(filed.server.url, mixture(300))
    until_stored(filed.server.url)
    before = counts(filed.server.url)
    engine = filed.server.engine_pid()
    soft, hard = resource.prlimit(engine, resource.RLIMIT_FSIZE)
    resource.prlimit(engine, resource.RLIMIT_FSIZE, (100, hard))
    bills(filed.server.url, mixture(400))
    wait_until(lambda: counts(filed.server.url)["store_unstored_blocks"] > before["store_unstored_blocks"], "it is counted")
    bills(filed.server.url, mixture(300))
    full = counts(filed.server.url)
    assert full["store_fetched_blocks"] > before["store_fetched_blocks"]  # what was stored before is still read
    assert full["store_stored_blocks"] == before["store_stored_blocks"]
    assert full["store_breaker_opened"] == before["store_breaker_opened"]  # no room is no failure
    resource.prlimit(engine, resource.RLIMIT_FSIZE, (soft, hard))
    bills(filed.server.url, mixture(500))
    wait_until(lambda: counts(filed.server.url)["store_stored_blocks"] > full["store_stored_blocks"], "it stores again")


def test_a_folder_that_is_removed_while_it_is_used_is_an_empty_store(filed: Stored) -> None:
    bills(filed.server.url, mixture(600))
    until_stored(filed.server.url)
    shutil.rmtree(filed.folder)
    before = counts(filed.server.url)
    bills(filed.server.url, mixture(600))
    bills(filed.server.url, mixture(700))
    wait_until(lambda: counts(filed.server.url)["store_stored_blocks"] > before["store_stored_blocks"], "it stores again")
    bills(filed.server.url, mixture(700))
    after = counts(filed.server.url)
    assert after["store_fetched_blocks"] > before["store_fetched_blocks"]
    assert after["store_errors"] == before["store_errors"]
    assert baton_store("verify", filed.url).exit_code == 0


# ── a server that hangs, dies and comes back ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(valkey_why_not() is not None, reason=f"valkey: {valkey_why_not()}")
def test_answers_go_on_while_a_store_hangs_and_while_it_is_gone_and_it_is_used_again_when_it_is_back() -> None:
    with contextlib.ExitStack() as running:
        store = running.enter_context(valkey_server())
        server = running.enter_context(baton_serve(*TIGHT, *SMALL_HOST, "--kv-store", store.url))
        bills(server.url, mixture())
        until_stored(server.url)
        with hanging(store):
            ask_until(server, lambda: counts(server.url)["store_breaker_open"] == 1)
            assert "the store fails, and KV is computed again meanwhile" in server.output()
        assert_it_is_used_again(server)
        store.child.stop()
        ask_until(server, lambda: counts(server.url)["store_breaker_opened"] == 2)
        running.enter_context(served_again(store))
        assert_it_is_used_again(server)
        assert server.output().count("the store works again") == 2


def served_again(store: StoreServer) -> contextlib.AbstractContextManager[StoreServer]:
    """Empty, at the same address."""
    return valkey_server(urlsplit(store.url).port)


def ask_until(server: ServerProcess, holds: Callable[[], bool]) -> None:
    """Every answer on the way there is right."""
    for _ in range(100):
        for first in (0, 10):
            bills(server.url, mixture(first))
        if holds():
            return
    raise AssertionError(f"it did not happen: {counts(server.url)}\n{server.output()}")


def assert_it_is_used_again(server: ServerProcess) -> None:
    ask_until(server, lambda: counts(server.url)["store_breaker_open"] == 0)
    fetched = counts(server.url)["store_fetched_blocks"]
    ask_until(server, lambda: counts(server.url)["store_fetched_blocks"] > fetched)
