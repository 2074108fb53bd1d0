"""Instances with different KV tiers: how each is started, and its counters.

Owns the names of what lies behind a pool, the stores that are made for a measurement and removed after it, and the counters
that are read before and after a run. An instance without a model (`scripted`) is for trying a benchmark out.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from baton.bench.stats import median
from baton.bench.workload import TokenRange
from baton.node.baton_command import baton_command
from benchmarks.runner import Progress
from benchmarks.servers import (
    WARM_UP_SEED,
    RunningServer,
    ServerCommand,
    ServersInTurn,
    counter_total,
    scrape,
    servers_in_turn,
    start_servers,
)
from benchmarks.slow_link import HOST, slow_link
from benchmarks.store_servers import valkey_server, valkey_why_not

SCRIPTED = "scripted"
STORE_LIMIT = "4G"
BYTES = TokenRange(1, 250)

COUNTERS = {
    "preemptions": "baton_num_preemptions_total",
    "recomputed tokens": "baton_recomputed_tokens_total",
    "saved": "baton_kv_saved_blocks_total",
    "unsaved": "baton_kv_unsaved_blocks_total",
    "loaded": "baton_kv_loaded_blocks_total",
    "stored": "baton_store_stored_blocks_total",
    "fetched": "baton_store_fetched_blocks_total",
    "recompute cheaper": "baton_kv_recompute_cheaper_blocks_total",
    "late": "baton_kv_transfers_late_total",
    "failed": "baton_kv_transfers_failed_total",
    "store given up": "baton_store_breaker_opened_total",
}

Counts = dict[str, int]


class StoreKind(StrEnum):
    FILE = "file"
    VALKEY = "valkey"
    SLOW_VALKEY = "valkey over a slow link"


@dataclass(frozen=True, slots=True)
class TierSide:
    name: str
    args: tuple[str, ...] = ()
    store: StoreKind | None = None


def why_not(side: TierSide) -> str | None:
    """Why this side cannot be measured here; None if it can."""
    return valkey_why_not() if side.store in (StoreKind.VALKEY, StoreKind.SLOW_VALKEY) else None


class SideRow(msgspec.Struct):
    """Common fields of table rows."""

    side: str
    command: str = ""
    absent: str = ""
    """Why it was not measured."""
    counts: list[Counts] = []
    """Increase of each counter, by run."""

    def count(self, name: str) -> float:
        return median([each[name] for each in self.counts]) if self.counts else 0.0


@dataclass(frozen=True, slots=True)
class Hosting:
    """Settings that all instances of a benchmark share."""

    model: Path | None
    """None: the scripted executor."""
    flags: tuple[str, ...]
    args: tuple[str, ...]
    """Further arguments, given last, so that they override the side's."""
    folder: Path | None
    """Folder of file stores; None: the temporary folder."""
    seed: int
    link_bytes_per_s: float = 0.0
    """Rate of a slow store's link, each way."""

    def start(
        self, stack: contextlib.ExitStack, sides: Sequence[TierSide], rows: Sequence[SideRow], progress: Progress
    ) -> ServersInTurn:
        """Start and warm up the sides that can be measured; each row gets the command of its side."""
        started = []
        for side, row in zip(sides, rows, strict=True):
            if row.absent:
                continue
            store = stack.enter_context(store_args(side, self.folder, STORE_LIMIT, self.link_bytes_per_s))
            started.append(serve_side(side.name, self.model, (*self.flags, *side.args, *store, *self.args)))
            row.command = started[-1].shell_line()
        tokens = BYTES if self.model is None else TokenRange()
        turns, _ = servers_in_turn(start_servers(stack, started, progress), progress, self.seed + WARM_UP_SEED, tokens)
        return turns


@contextlib.contextmanager
def store_args(side: TierSide, folder: Path | None, limit: str, link_bytes_per_s: float = 0.0) -> Iterator[tuple[str, ...]]:
    """Arguments of `baton serve` for an empty store, which is removed afterwards."""
    match side.store:
        case None:
            yield ()
        case StoreKind.FILE:
            with tempfile.TemporaryDirectory(prefix="baton-bench-store-", dir=folder) as where:
                yield ("--kv-store", f"file:{where}", "--kv-store-limit", limit)
        case _:
            room = ("--maxmemory", f"{limit}b", "--maxmemory-policy", "allkeys-lru")
            with valkey_server(options=room) as server, contextlib.ExitStack() as stack:
                url = server.url
                if side.store is StoreKind.SLOW_VALKEY:
                    port = urlsplit(url).port or 0
                    url = f"valkey://{HOST}:{stack.enter_context(slow_link(port, link_bytes_per_s))}/0"
                yield ("--kv-store", url)


def serve_side(name: str, model: Path | None, args: Sequence[str]) -> ServerCommand:
    """The server command; without a model, the scripted executor."""
    served = ("--executor", SCRIPTED) if model is None else (str(model), "--dtype", "bfloat16")
    return ServerCommand(name, baton_command("serve", *served, *args), {"BATON_LOG_LEVEL": "warning"})


def counts_of(serving: RunningServer) -> Counts:
    page = scrape(serving.url)
    return {name: counter_total(page, counter) or 0 for name, counter in COUNTERS.items()}


def gained(before: Mapping[str, int], after: Mapping[str, int]) -> Counts:
    return {name: after[name] - before[name] for name in COUNTERS}
