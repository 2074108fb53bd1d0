"""Put and get rates of KV stores, compared with a plain file and memcpy.

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
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console

from baton.bench.machine import OtherLoad, describe_machine
from baton.bench.stats import median
from baton.kv.store import Store, open_store, parse_url
from baton.wire.envelope import HEADER_BYTES, EnvelopeFlaw, object_name, seal, unseal
from benchmarks.options import JsonFile
from benchmarks.runner import (
    Columns,
    Experiment,
    MeasurementFailed,
    Progress,
    Rounds,
    median_ratio,
    print_other_load,
    run_benchmark,
    table_of,
)
from benchmarks.store_servers import mooncake_server, mooncake_why_not, valkey_server, valkey_why_not

MEMCPY, PLAIN_FILE = "memcpy", "plain file"
BLOCK_BYTES = (64 << 10, 384 << 10)
BATCH = 16
TIMEOUT_S = 10.0
LAYOUT = bytes(16)
SEGMENT = "1G"
"""Memory of the Mooncake store."""

Rows = npt.NDArray[np.uint8]


class StoreMisbehaved(MeasurementFailed):
    """A store did not store or return its data."""


class StorePassTimes(msgspec.Struct, frozen=True):
    """Seconds of one put and one get of all blocks."""

    put_s: float
    get_s: float


class StoreRates(msgspec.Struct, frozen=True):
    """Rates of one side, by round; ratios are medians over rounds."""

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
    sides: list[StoreRates]


class StoresReport(msgspec.Struct, frozen=True):
    machine: dict[str, str | int | float]
    rounds: int
    load: list[OtherLoad]
    sizes: list[SizeRates]
    absent: dict[str, str]


class BlockSet:
    """Source rows, target rows, and the arena between them and a store, sized for sealed blocks."""

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
        """Fail unless the target equals the source; then overwrite the target."""
        if not np.array_equal(self.source, self.target):
            raise StoreMisbehaved(f"{side}: what came back is not what was stored")
        self.target[:] = 1


class StoreUnderTest(Protocol):
    name: str

    def put_all(self, bench: BlockSet) -> None: ...
    def get_all(self, bench: BlockSet) -> None: ...
    def forget(self) -> None:
        """Drop what was stored; not timed."""


class Memcpy:
    name = MEMCPY

    def put_all(self, bench: BlockSet) -> None:
        rooms = [np.frombuffer(room, np.uint8)[HEADER_BYTES:] for room in bench.rooms()]
        for batch in bench.batches():
            for room, row in zip(rooms, batch, strict=True):
                room[:] = bench.source[row]

    def get_all(self, bench: BlockSet) -> None:
        bench.target[:] = bench.source

    def forget(self) -> None: ...


class PlainFile:
    name = PLAIN_FILE

    def __init__(self, folder: Path) -> None:
        self._path = folder / "plain"

    def put_all(self, bench: BlockSet) -> None:
        with self._path.open("wb", buffering=0) as file:
            for batch in bench.batches():
                file.write(bench.source[batch.start : batch.stop].data.cast("B"))

    def get_all(self, bench: BlockSet) -> None:
        with self._path.open("rb", buffering=0) as file:
            for batch in bench.batches():
                file.readinto(bench.target[batch.start : batch.stop].data.cast("B"))

    def forget(self) -> None:
        self._path.unlink()


class StoreSide:
    """A store with sealed blocks."""

    def __init__(self, name: str, store: Store, bench: BlockSet) -> None:
        self.name = name
        self._store = store
        self._keys: list[bytes] = []
        store.attach(bench.arena)

    def put_all(self, bench: BlockSet) -> None:
        self._keys = [os.urandom(16) for _ in bench.source]
        rooms = bench.rooms()
        for batch in bench.batches():
            for room, row in zip(rooms, batch, strict=True):
                seal(self._keys[row], LAYOUT, bench.source[row].data, room)
            if not all(self._store.put(self._names(batch), rooms)):
                raise StoreMisbehaved(f"{self.name} has no room for {bench.total_bytes / 1e6:.0f} MB")

    def get_all(self, bench: BlockSet) -> None:
        rooms = bench.rooms()
        for batch in bench.batches():
            sizes = self._store.get(self._names(batch), rooms)
            for row, room, size in zip(batch, rooms, sizes, strict=True):
                payload = unseal(self._keys[row], LAYOUT, room[: max(size, 0)])
                if isinstance(payload, EnvelopeFlaw):
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
    """(name → URL of each store, name → reason of each that is unavailable); servers run during the block."""
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
    total_bytes: int, rounds: int, progress: Progress, folder: Path | None = None, url: str | None = None,
    sizes: Sequence[int] = BLOCK_BYTES,
) -> StoresReport:  # fmt: skip
    """Measure all sizes and stores, in turns. Files are written to a new folder under `folder`."""
    taking = Rounds(progress, rounds)
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", dir=folder) as made,
        served_stores(Path(made), url) as (urls, absent),
    ):
        measured = [_measure_size(BlockSet(size, total_bytes), urls, Path(made), taking) for size in sizes]
    return StoresReport(describe_machine(), rounds, taking.loads, measured, absent)


def _measure_size(bench: BlockSet, urls: Mapping[str, str], folder: Path, rounds: Rounds) -> SizeRates:
    with contextlib.ExitStack() as opened:
        sides: list[StoreUnderTest] = [Memcpy(), PlainFile(folder)]
        for name, url in urls.items():
            store = open_store(url, timeout_s=TIMEOUT_S)
            opened.callback(store.close)
            sides.append(StoreSide(name, store, bench))
        taking = {side.name: partial(_write_and_read, side, bench) for side in sides}
        passes = rounds.repeat(f"{bench.block_bytes >> 10} KiB", taking)
    return rates_of(bench.block_bytes, bench.total_bytes, passes)


def _write_and_read(side: StoreUnderTest, bench: BlockSet) -> StorePassTimes:
    began_s = time.perf_counter()
    side.put_all(bench)
    between_s = time.perf_counter()
    side.get_all(bench)
    ended_s = time.perf_counter()
    bench.check(side.name)
    side.forget()
    return StorePassTimes(between_s - began_s, ended_s - between_s)


def rates_of(block_bytes: int, total_bytes: int, passes: Mapping[str, Sequence[StorePassTimes]]) -> SizeRates:
    put_s = {side: [each.put_s for each in taken] for side, taken in passes.items()}
    get_s = {side: [each.get_s for each in taken] for side, taken in passes.items()}
    sides = [
        StoreRates(
            side=side,
            put_mb_per_s=[total_bytes / took_s / 1e6 for took_s in put_s[side]],
            get_mb_per_s=[total_bytes / took_s / 1e6 for took_s in get_s[side]],
            put_of_file=median_ratio(put_s[PLAIN_FILE], put_s[side]),
            get_of_file=median_ratio(get_s[PLAIN_FILE], get_s[side]),
            put_of_memcpy=median_ratio(put_s[MEMCPY], put_s[side]),
            get_of_memcpy=median_ratio(get_s[MEMCPY], get_s[side]),
        )
        for side in passes
    ]
    return SizeRates(block_bytes, total_bytes, sides)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


StoreAddress = Annotated[
    str | None,
    typer.Option("--url", help="Only this store, such as valkey://HOST:PORT/0 [default: all that can be started]."),
]
Megabytes = Annotated[int, typer.Option(min=8, max=4096, help="KV to store each time, in MB.")]
RoundCount = Annotated[int, typer.Option(min=3, max=100, help="Times that each store is measured.")]
Folder = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Where files are written [the temporary folder].")
]


def store(
    url: StoreAddress = None,
    megabytes: Megabytes = 64,
    rounds: RoundCount = 5,
    folder: Folder = None,
    json_file: JsonFile = Path("bench-results/store.json"),
) -> None:
    """Measure put and get of each store in MB/s, beside a plain file and memcpy.

    file in a folder of its own, and valkey and mooncake with servers that it starts where their packages are installed.
    Blocks are sealed, checked and copied as when they are served. Of a store that is named by --url only what was put
    is dropped again. Exits with 1 when a store failed.
    """

    def prepare(progress: Progress) -> Experiment[StoresReport]:
        return Experiment(None, lambda: run(megabytes * 1_000_000, rounds, progress, folder, url))

    run_benchmark(prepare, show, json_file)


COLUMNS: Columns[StoreRates] = (
    ("", lambda each: each.side),
    ("put MB/s", lambda each: f"{median(each.put_mb_per_s):,.0f}"),
    ("lowest – highest", lambda each: f"{min(each.put_mb_per_s):,.0f} – {max(each.put_mb_per_s):,.0f}"),
    ("of plain file", lambda each: f"{each.put_of_file:.2f}"),
    ("of memcpy", lambda each: f"{each.put_of_memcpy:.2f}"),
    ("get MB/s", lambda each: f"{median(each.get_mb_per_s):,.0f}"),
    ("lowest – highest", lambda each: f"{min(each.get_mb_per_s):,.0f} – {max(each.get_mb_per_s):,.0f}"),
    ("of plain file", lambda each: f"{each.get_of_file:.2f}"),
    ("of memcpy", lambda each: f"{each.get_of_memcpy:.2f}"),
)


def show(console: Console, report: StoresReport) -> None:
    for size in report.sizes:
        about = f"{BATCH} at a time, {size.total_bytes / 1e6:,.0f} MB, {report.rounds} rounds"
        console.print(table_of(f"blocks of {size.block_bytes >> 10} KiB, {about}", COLUMNS, size.sides))
    print_other_load(console, report.load, report.absent)
