"""How fast blocks of KV go to a store and come back, beside a plain file and memcpy.

Every store is used as an instance uses it: rows of host memory are sealed into an arena and put from there, sixteen at a
time; what is fetched is opened, checked and copied into rows. All of it is measured in turns within a round:

    memcpy       one thread, the same rows into the arena and back
    plain file   the same bytes written into one file and read back, not checked; the page cache is part of both sides
    file …       names that the store does not have yet; after the round they are dropped

A ratio is taken within each round, so that a machine that is busy slows both sides of it; the median over rounds counts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from baton.bench.machine import OtherLoad, describe_machine, other_load
from baton.bench.stats import median
from baton.bench.store_servers import mooncake_server, mooncake_why_not, valkey_server, valkey_why_not
from baton.bench.turns import Voice, order
from baton.kv.store import Store, open_store, parse_url
from baton.wire.envelope import HEADER_BYTES, Flaw, object_name, seal, unseal

MEMCPY, PLAIN_FILE = "memcpy", "plain file"
BLOCK_BYTES = (64 << 10, 384 << 10)
BATCH = 16
TIMEOUT_S = 10.0
LAYOUT = bytes(16)
SEGMENT = "1G"
"""Memory that the Mooncake Store gets."""

Rows = npt.NDArray[np.uint8]


class StoreMisbehaved(Exception):
    """A store that was measured did not take, or did not give back, what it was given."""


class Pass(msgspec.Struct, frozen=True):
    """One time there and back."""

    put_s: float
    get_s: float


class Rates(msgspec.Struct, frozen=True):
    """One side: a value for each round; ratios are medians over rounds."""

    side: str
    put_mb_per_s: list[float]
    get_mb_per_s: list[float]
    put_of_file: float
    get_of_file: float
    put_of_memcpy: float
    get_of_memcpy: float


class SizeRates(msgspec.Struct, frozen=True):
    block_bytes: int
    total_bytes: int
    sides: list[Rates]


class StoresReport(msgspec.Struct, frozen=True):
    machine: dict[str, str | int | float]
    rounds: int
    load: list[OtherLoad]
    sizes: list[SizeRates]
    absent: dict[str, str]


class Bench:
    """Rows to store, rows to fetch into, and the arena between them and a store. Sealed blocks have their room in it."""

    def __init__(self, block_bytes: int, total_bytes: int) -> None:
        batches = max(1, total_bytes // (block_bytes * BATCH))
        self.block_bytes = block_bytes
        self.source: Rows = np.random.default_rng(1).integers(0, 256, (batches * BATCH, block_bytes), np.uint8)
        self.target: Rows = np.ones_like(self.source)
        self._room = block_bytes + HEADER_BYTES
        self.arena = memoryview(mmap.mmap(-1, BATCH * self._room))
        self.arena[:] = bytes(len(self.arena))

    @property
    def total_bytes(self) -> int:
        return self.source.nbytes

    def batches(self) -> Iterator[range]:
        for begin in range(0, len(self.source), BATCH):
            yield range(begin, begin + BATCH)

    def rooms(self) -> list[memoryview]:
        return [self.arena[at * self._room : (at + 1) * self._room] for at in range(BATCH)]

    def check(self, side: str) -> None:
        """What came back is what was given; and next time it must come again."""
        if not np.array_equal(self.source, self.target):
            raise StoreMisbehaved(f"{side}: what came back is not what was stored")
        self.target[:] = 1


class Side(Protocol):
    name: str

    def put_all(self, bench: Bench) -> None: ...
    def get_all(self, bench: Bench) -> None: ...
    def forget(self) -> None:
        """Not measured."""


class Memcpy:
    name = MEMCPY

    def put_all(self, bench: Bench) -> None:
        rooms = [np.frombuffer(room, np.uint8)[HEADER_BYTES:] for room in bench.rooms()]
        for batch in bench.batches():
            for room, row in zip(rooms, batch, strict=True):
                room[:] = bench.source[row]

    def get_all(self, bench: Bench) -> None:
        bench.target[:] = bench.source

    def forget(self) -> None: ...


class PlainFile:
    name = PLAIN_FILE

    def __init__(self, folder: Path) -> None:
        self._path = folder / "plain"

    def put_all(self, bench: Bench) -> None:
        with self._path.open("wb", buffering=0) as file:
            for batch in bench.batches():
                file.write(bench.source[batch.start : batch.stop].data.cast("B"))

    def get_all(self, bench: Bench) -> None:
        with self._path.open("rb", buffering=0) as file:
            for batch in bench.batches():
                file.readinto(bench.target[batch.start : batch.stop].data.cast("B"))

    def forget(self) -> None:
        self._path.unlink()


class StoreSide:
    """A store, through the envelope."""

    def __init__(self, name: str, store: Store, bench: Bench) -> None:
        self.name = name
        self._store = store
        self._keys: list[bytes] = []
        store.attach(bench.arena)

    def put_all(self, bench: Bench) -> None:
        self._keys = [os.urandom(16) for _ in bench.source]
        rooms = bench.rooms()
        for batch in bench.batches():
            for room, row in zip(rooms, batch, strict=True):
                seal(self._keys[row], LAYOUT, bench.source[row].data, room)
            if not all(self._store.put(self._names(batch), rooms)):
                raise StoreMisbehaved(f"{self.name} has no room for {bench.total_bytes / 1e6:.0f} MB")

    def get_all(self, bench: Bench) -> None:
        rooms = bench.rooms()
        for batch in bench.batches():
            sizes = self._store.get(self._names(batch), rooms)
            for row, room, size in zip(batch, rooms, sizes, strict=True):
                payload = unseal(self._keys[row], LAYOUT, room[: max(size, 0)])
                if isinstance(payload, Flaw):
                    raise StoreMisbehaved(f"{self.name} does not give back what it took: {payload}")
                bench.target[row].data[:] = payload

    def forget(self) -> None:
        for begin in range(0, len(self._keys), BATCH):
            self._store.drop(self._names(range(begin, begin + BATCH)))

    def _names(self, batch: range) -> list[str]:
        return [object_name(LAYOUT, self._keys[row]) for row in batch]


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def served_stores(folder: Path, url: str | None) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Name → address of what can be measured, served for as long as this lasts; and name → why not of what cannot."""
    if url is not None:
        yield {str(parse_url(url)): url}, {}
        return
    urls, absent = {"file": f"file:{folder / 'store'}"}, {}
    with contextlib.ExitStack() as servers:
        if (reason := valkey_why_not()) is None:
            urls["valkey"] = servers.enter_context(valkey_server()).url
        else:
            absent["valkey"] = reason
        if (reason := mooncake_why_not()) is None:
            urls["mooncake"] = servers.enter_context(mooncake_server(segment=SEGMENT)).url
        else:
            absent["mooncake"] = reason
        yield urls, absent


def run(
    total_bytes: int, rounds: int, voice: Voice, folder: Path | None = None, url: str | None = None,
    sizes: Sequence[int] = BLOCK_BYTES,
) -> StoresReport:  # fmt: skip
    """Everything, in turns. Files lie in a folder of their own under `folder`."""
    loads: list[OtherLoad] = []
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", dir=folder) as made,
        served_stores(Path(made), url) as (urls, absent),
    ):
        measured = [_measure_size(Bench(size, total_bytes), urls, Path(made), rounds, voice, loads) for size in sizes]
    return StoresReport(describe_machine(), rounds, loads, measured, absent)


def _measure_size(
    bench: Bench, urls: Mapping[str, str], folder: Path, rounds: int, voice: Voice, loads: list[OtherLoad]
) -> SizeRates:
    with contextlib.ExitStack() as opened:
        sides: list[Side] = [Memcpy(), PlainFile(folder)]
        for name, url in urls.items():
            store = open_store(url, timeout_s=TIMEOUT_S)
            opened.callback(store.close)
            sides.append(StoreSide(name, store, bench))
        passes: dict[str, list[Pass]] = {side.name: [] for side in sides}
        for side in sides:
            voice.doing(f"{bench.block_bytes >> 10} KiB: warming up {side.name}")
            _there_and_back(side, bench)
        for number in range(rounds):
            loads.append(other_load())
            for side in order(sides, number):
                voice.doing(f"{bench.block_bytes >> 10} KiB: round {number + 1} of {rounds}, {side.name}")
                passes[side.name].append(_there_and_back(side, bench))
                voice.done()
    return rates_of(bench.block_bytes, bench.total_bytes, passes)


def _there_and_back(side: Side, bench: Bench) -> Pass:
    began_s = time.perf_counter()
    side.put_all(bench)
    between_s = time.perf_counter()
    side.get_all(bench)
    ended_s = time.perf_counter()
    bench.check(side.name)
    side.forget()
    return Pass(between_s - began_s, ended_s - between_s)


def rates_of(block_bytes: int, total_bytes: int, passes: Mapping[str, Sequence[Pass]]) -> SizeRates:
    def put_share(side: str, of: str) -> float:
        return median([theirs.put_s / ours.put_s for ours, theirs in zip(passes[side], passes[of], strict=True)])

    def get_share(side: str, of: str) -> float:
        return median([theirs.get_s / ours.get_s for ours, theirs in zip(passes[side], passes[of], strict=True)])

    sides = [
        Rates(
            side, [total_bytes / each.put_s / 1e6 for each in taken], [total_bytes / each.get_s / 1e6 for each in taken],
            put_share(side, PLAIN_FILE), get_share(side, PLAIN_FILE), put_share(side, MEMCPY), get_share(side, MEMCPY),
        )
        for side, taken in passes.items()
    ]  # fmt: skip
    return SizeRates(block_bytes, total_bytes, sides)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def show(console: Console, report: StoresReport) -> None:
    for size in report.sizes:
        console.print(_table(size, report.rounds))
    busy = [load.busy_cores for load in report.load]
    console.print(
        f"others kept {median(busy):.2f} cores busy (at most {max(busy):.2f}) of {report.machine['cores']}", style="dim"
    )
    for name, reason in report.absent.items():
        console.print(f"{name} is absent: {reason}", style="yellow", markup=False)


def _table(size: SizeRates, rounds: int) -> Table:
    title = f"blocks of {size.block_bytes >> 10} KiB, {BATCH} at a time, {size.total_bytes / 1e6:,.0f} MB, {rounds} rounds"
    table = Table(title=title, title_justify="left")
    columns = (
        "put MB/s",
        "lowest – highest",
        "of plain file",
        "of memcpy",
        "get MB/s",
        "lowest – highest",
        "of plain file",
        "of memcpy",
    )
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for each in size.sides:
        put = _cells(each.put_mb_per_s, each.put_of_file, each.put_of_memcpy)
        table.add_row(each.side, *put, *_cells(each.get_mb_per_s, each.get_of_file, each.get_of_memcpy))
    return table


def _cells(values: Sequence[float], of_file: float, of_memcpy: float) -> tuple[str, str, str, str]:
    return f"{median(values):,.0f}", f"{min(values):,.0f} – {max(values):,.0f}", f"{of_file:.2f}", f"{of_memcpy:.2f}"
