"""KV beyond the pool, by real servers: exactly the tokens of an undisturbed run come back, whatever becomes of the store."""

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

from benchmarks.store_servers import StoreServer, mooncake_server, mooncake_why_not, valkey_server, valkey_why_not
from tests.support.server import ServerProcess, baton_serve
from tests.support.stores import hanging
from tests.support.storing import (
    SMALL_HOST,
    TIGHT,
    ask_until,
    baton_store,
    bills,
    counts,
    mixture,
    preempted,
    restored,
    until_stored,
)

TWO = [mixture(0), mixture(10)]
"""Each crowds out what the other left."""


@dataclass(frozen=True)
class Filed:
    server: ServerProcess
    folder: Path

    @property
    def url(self) -> str:
        return self.server.url

    def objects(self) -> list[Path]:
        return sorted(self.folder.glob(f"{'?' * 16}/??/{'?' * 32}"))

    def assert_sound(self) -> None:
        verified = baton_store("verify", f"file:{self.folder}")
        assert verified.exit_code == 0, verified.output


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filed]:
    folder = tmp_path_factory.mktemp("filed") / "kv"
    with baton_serve(*TIGHT, *SMALL_HOST, "--kv-store", f"file:{folder}") as server:
        yield Filed(server, folder)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_yields_or_was_crowded_out_comes_back_from_host_memory_with_the_same_tokens() -> None:
    with baton_serve(*TIGHT, "--host-memory", "1M") as server:
        assert "8192 blocks in host memory" in server.output()
        first = bills(server.url, mixture())
        assert preempted(first) > 0
        assert restored(first) > 0  # of those that yielded: nothing was there before
        assert restored(bills(server.url, mixture())) > 0
        assert counts(server.url)["kv_loaded_blocks"] > 0
        assert counts(server.url)["store_stored_blocks"] == 0


def test_what_was_crowded_out_of_host_memory_too_comes_back_from_files_with_the_same_tokens(filed: Filed) -> None:
    assert_it_comes_back_from_the_store(filed.url)
    filed.assert_sound()


@pytest.mark.skipif(mooncake_why_not() is not None, reason=f"mooncake: {mooncake_why_not()}")
def test_what_was_crowded_out_comes_back_from_mooncake_with_the_same_tokens() -> None:
    with mooncake_server() as store, baton_serve(*TIGHT, *SMALL_HOST, "--kv-store", store.url, "--trust-network") as server:
        assert_it_comes_back_from_the_store(server.url)


def assert_it_comes_back_from_the_store(url: str) -> None:
    assert preempted(bills(url, mixture())) > 0
    until_stored(url)
    assert restored(bills(url, mixture())) > 0
    found = counts(url)
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


def test_no_damage_to_stored_files_under_a_running_server_changes_an_answer(filed: Filed) -> None:
    draw = random.Random(7)
    before = counts(filed.url)

    def is_found_and_not_for_nothing() -> bool:
        """All kinds of flaws were found, and what is sound beside them was used. Until then: more damage."""
        found = counts(filed.url)
        flaws = {flaw for flaw, count in found.items() if flaw.startswith("bad:") and count}
        if (
            flaws >= {"bad:checksum", "bad:torn", "bad:other key"}
            and found["store_fetched_blocks"] > before["store_fetched_blocks"]
        ):
            return True
        until_stored(filed.url)
        objects = filed.objects()
        for path in draw.sample(objects, len(objects) // 2):
            draw.choice(HARMS)(draw, path, objects)
        return False

    ask_until(filed.url, is_found_and_not_for_nothing, TWO)
    assert "stored blocks were bad, and are dropped" in filed.server.output()
    baton_store("verify", "--repair", f"file:{filed.folder}")
    filed.assert_sound()


def test_a_full_disk_is_counted_and_service_goes_on(filed: Filed) -> None:
    bills(filed.url, mixture(300))
    until_stored(filed.url)
    before = counts(filed.url)
    engine = filed.server.engine_pid()
    soft, hard = resource.prlimit(engine, resource.RLIMIT_FSIZE)
    resource.prlimit(engine, resource.RLIMIT_FSIZE, (100, hard))  # no file may be as long as an object

    def is_counted_and_read() -> bool:
        found = counts(filed.url)
        assert found["store_stored_blocks"] == before["store_stored_blocks"]
        return all(found[name] > before[name] for name in ("store_unstored_blocks", "store_fetched_blocks"))

    ask_until(filed.url, is_counted_and_read, [mixture(400), mixture(300)])
    assert counts(filed.url)["store_breaker_opened"] == before["store_breaker_opened"]  # no room is no failure
    resource.prlimit(engine, resource.RLIMIT_FSIZE, (soft, hard))
    ask_until(filed.url, lambda: counts(filed.url)["store_stored_blocks"] > before["store_stored_blocks"], [mixture(500)])


def test_a_folder_that_is_removed_while_it_is_used_is_an_empty_store(filed: Filed) -> None:
    bills(filed.url, mixture(600))
    until_stored(filed.url)
    shutil.rmtree(filed.folder)
    before = counts(filed.url)
    names = ("store_stored_blocks", "store_fetched_blocks")
    ask_until(filed.url, lambda: all(counts(filed.url)[name] > before[name] for name in names), [mixture(600), mixture(700)])
    assert counts(filed.url)["store_errors"] == before["store_errors"]
    filed.assert_sound()


# ── a server that hangs, dies and comes back ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(valkey_why_not() is not None, reason=f"valkey: {valkey_why_not()}")
def test_answers_go_on_while_valkey_hangs_and_while_it_is_gone_and_it_is_used_again_when_it_is_back() -> None:
    with contextlib.ExitStack() as running:
        store = running.enter_context(valkey_server())
        server = running.enter_context(baton_serve(*TIGHT, *SMALL_HOST, "--kv-store", store.url))
        assert_it_comes_back_from_the_store(server.url)
        with hanging(store):
            ask_until(server.url, lambda: counts(server.url)["store_breaker_open"] == 1, TWO)
            assert "the store fails, and KV is computed again meanwhile" in server.output()
        assert_it_is_used_again(server)
        opened = counts(server.url)["store_breaker_opened"]
        store.child.stop()
        ask_until(server.url, lambda: counts(server.url)["store_breaker_opened"] > opened, TWO)
        store = running.enter_context(empty_at_the_same_address(store))
        assert_it_is_used_again(server)
        assert server.output().count("the store works again") >= 2
        with hanging(store):
            before = counts(server.url)["store_stored_blocks"]
            bills(server.url, mixture(50))
            assert counts(server.url)["store_stored_blocks"] == before  # what will never be written
            assert server.stop() == 0


def empty_at_the_same_address(store: StoreServer) -> contextlib.AbstractContextManager[StoreServer]:
    return valkey_server(urlsplit(store.url).port)


def assert_it_is_used_again(server: ServerProcess) -> None:
    ask_until(server.url, lambda: counts(server.url)["store_breaker_open"] == 0, TWO)
    fetched = counts(server.url)["store_fetched_blocks"]
    ask_until(server.url, lambda: counts(server.url)["store_fetched_blocks"] > fetched, TWO)
