"""The benchmark of stores measures what it says, leaves nothing behind, and its ratios are taken within rounds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.console import Console

from baton.kv.store import MISSING, open_store
from benchmarks.runner import Progress
from benchmarks.store import MEMCPY, PLAIN_FILE, BlockSet, StoreMisbehaved, StorePassTimes, StoreSide, rates_of, run, show
from benchmarks.store_servers import mooncake_why_not, valkey_why_not
from tests.support.stores import sample

QUIET = Progress(say=lambda _: None, doing=lambda _: None, done=lambda: None)


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    passes = {
        MEMCPY: [StorePassTimes(1.0, 1.0), StorePassTimes(2.0, 1.0), StorePassTimes(3.0, 1.0)],
        PLAIN_FILE: [StorePassTimes(2.0, 4.0), StorePassTimes(8.0, 4.0), StorePassTimes(3.0, 4.0)],
        "file": [StorePassTimes(4.0, 8.0), StorePassTimes(8.0, 16.0), StorePassTimes(30.0, 2.0)],
    }
    found = rates_of(1000, 8_000_000, passes).sides[2]
    assert found.put_mb_per_s == [2.0, 1.0, 8 / 30]
    assert found.get_mb_per_s == [1.0, 0.5, 4.0]
    assert (found.put_of_file, found.get_of_file) == (0.5, 0.5)
    assert (found.put_of_memcpy, found.get_of_memcpy) == (0.25, 0.125)


def test_a_short_run_measures_every_store_that_can_be_served_here_and_leaves_nothing(tmp_path: Path) -> None:
    report = run(2_000_000, 1, QUIET, tmp_path, sizes=(16 << 10,))
    absent = {kind for kind, reason in (("valkey", valkey_why_not()), ("mooncake", mooncake_why_not())) if reason}
    (size,) = report.sizes
    assert {side.side for side in size.sides} == {MEMCPY, PLAIN_FILE, "file", "valkey", "mooncake"} - absent
    assert all(rate > 0.0 for side in size.sides for rate in side.put_mb_per_s + side.get_mb_per_s)
    assert set(report.absent) == absent
    assert list(tmp_path.iterdir()) == []
    console = Console(record=True, width=150)
    with console.capture() as shown:
        show(console, report)
    assert "of plain file" in shown.get()


def test_of_a_store_that_is_named_only_what_was_put_is_dropped(tmp_path: Path) -> None:
    url, kept = f"file:{tmp_path / 'store'}", sample(random.Random(1))
    store = open_store(url)
    store.put([kept.name], [memoryview(kept.data)])
    report = run(1_000_000, 1, QUIET, url=url, sizes=(16 << 10,))
    assert [side.side for side in report.sizes[0].sides][2:] == [url]
    assert [name for name, _ in store.names()] == [kept.name]
    store.close()


class Forgetful:
    """Takes everything and has nothing."""

    def attach(self, arena: memoryview) -> None: ...

    def put(self, names: list[str], objects: list[memoryview]) -> list[bool]:
        return [True for _ in names]

    def get(self, names: list[str], into: list[memoryview]) -> list[int]:
        return [MISSING for _ in names]


def test_a_store_that_gives_nothing_back_has_no_speed() -> None:
    bench = BlockSet(4096, 100_000)
    side = StoreSide("forgetful", Forgetful(), bench)  # type: ignore[arg-type]
    side.put_all(bench)
    with pytest.raises(StoreMisbehaved, match="does not give back"):
        side.get_all(bench)
