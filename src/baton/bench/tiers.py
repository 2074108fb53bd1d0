"""`baton bench tiers`: too small a KV pool, and what host memory and a store behind it are worth.

Owns the loads and the report. All requests come at once and nothing is reserved for growth (`--reserve none`, as other
servers do it), so that many must yield. Who yields computes its KV again, unless host memory or a store has kept it; the
prefix cache is on everywhere, so what of it is still in the pool is never computed again. The sides of a load are instances
of their own, all up, that take turns; each is held against the first, which has nothing behind its pool, in the same pair.

One more side without anything behind its pool reserves for growth as Baton does unless told otherwise: fewer yield, and
fewer run at once. Whoever gains only against `--reserve none` would gain nothing.

The last load is one in which computing is the better choice: the store lies behind a link that is slower than the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.children import ChildFailed
from baton.bench.machine import describe_machine
from baton.bench.report import summarise
from baton.bench.stats import median
from baton.bench.tier_sides import Counts, StoreKind, TierSide, counts_of, gained, serve_side, store_args, tokens_of, why_not
from baton.bench.turns import (
    Look,
    MeasurementFailed,
    Turns,
    Voice,
    arrange,
    measure,
    notes_on_others,
    order,
    start_all,
    versions_of,
)
from baton.bench.verdict import Measured, RatioSpread, machine_title, pair_by_pair, print_remarks, shown_ratio, shown_values
from baton.bench.workload import Round

SCHEMA = 1
STORE_LIMIT = "4G"
NOTHING_RESERVED = ("--reserve", "none")
ALWAYS, CHEAPEST = ("--bring-back", "always"), ("--bring-back", "cheapest")
RECOMPUTE = TierSide("recompute", NOTHING_RESERVED)


class Load(StrEnum):
    SHORT = "short"
    LONG = "long"
    SLOW_STORE = "slow-store"


@dataclass(frozen=True, slots=True)
class LoadShape:
    title: str
    requests: int
    """All at once."""
    input_tokens: int
    output_tokens: int
    block_size: int
    sides: tuple[TierSide, ...]
    """The first has nothing behind its pool."""
    share: float = 0.5
    """Pool, of what the whole load fills."""

    @property
    def pool_blocks(self) -> int:
        each = -(-(self.input_tokens + self.output_tokens) // self.block_size)
        return max(each, round(self.share * each * self.requests))

    @property
    def flags(self) -> tuple[str, ...]:
        """For all sides."""
        longest = min(self.pool_blocks * self.block_size, max(256, self.input_tokens + self.output_tokens))
        return (
            "--max-model-len", str(longest),
            "--max-num-seqs", str(self.requests),
            "--block-size", str(self.block_size),
            "--kv-blocks", str(self.pool_blocks),
        )  # fmt: skip


def sides_of(host: str, staging: str) -> tuple[TierSide, ...]:
    """`host`: memory enough for everything; `staging`: where a store lies behind it."""
    return (
        RECOMPUTE,
        TierSide("recompute, reserving"),
        TierSide("host", (*NOTHING_RESERVED, *ALWAYS, "--host-memory", host)),
        TierSide("host + file", (*NOTHING_RESERVED, *ALWAYS, "--host-memory", staging), StoreKind.FILE),
        TierSide("host + file, cheapest", (*NOTHING_RESERVED, *CHEAPEST, "--host-memory", staging), StoreKind.FILE),
    )


def slow_sides(staging: str) -> tuple[TierSide, ...]:
    flags = (*NOTHING_RESERVED, "--host-memory", staging)
    return (
        RECOMPUTE,
        TierSide("slow store, always", (*flags, *ALWAYS), StoreKind.SLOW_VALKEY),
        TierSide("slow store, cheapest", (*flags, *CHEAPEST), StoreKind.SLOW_VALKEY),
    )


LOADS = {
    Load.SHORT: LoadShape("as in `bench pressure`", 64, 128, 192, 16, sides_of("2G", "128M")),
    Load.LONG: LoadShape("long prompts", 48, 512, 512, 32, sides_of("2G", "256M")),
    Load.SLOW_STORE: LoadShape("a store slower than the model", 64, 128, 192, 8, slow_sides("32M")),
}


@dataclass(frozen=True, slots=True)
class TierOptions:
    model: Path | None
    """None: no model."""
    loads: tuple[Load, ...] = tuple(Load)
    pairs: int = 3
    requests: int | None = None
    """Instead of each load's own."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    args: tuple[str, ...] = ()
    """More, for all sides."""
    folder: Path | None = None
    """Where file stores are made."""
    link_bytes_per_s: float = 12e6
    """Of the slow store's link, each way."""
    seed: int = 0
    look_s: float = 1.0

    def shape(self, load: Load) -> LoadShape:
        own = LOADS[load]
        return replace(
            own,
            requests=self.requests or own.requests,
            input_tokens=self.input_tokens or own.input_tokens,
            output_tokens=self.output_tokens or own.output_tokens,
        )


class TierRow(msgspec.Struct):
    side: str
    command: str
    speed: list[Measured] = []
    """Output tokens a second."""
    counts: list[Counts] = []
    """Run by run, as `speed`."""
    absent: str = ""
    ratio: RatioSpread | None = None
    """Speed ÷ the first side's, pair by pair."""

    def count(self, name: str) -> float:
        return median([each[name] for each in self.counts]) if self.counts else 0.0


class TierTable(msgspec.Struct):
    load: Load
    told: str
    block_size: int
    pool_blocks: int
    rows: list[TierRow]

    def fewer(self, row: TierRow) -> float | None:
        """How many times fewer tokens were computed again than on the first side."""
        return self.rows[0].count("recomputed tokens") / max(1.0, row.count("recomputed tokens")) if row.counts else None


class TierReport(msgspec.Struct):
    schema: int
    made: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    model: str
    tables: list[TierTable]
    notes: list[str]
    failures: list[str]


class TierBench:
    def __init__(self, options: TierOptions, voice: Voice) -> None:
        self._options = options
        self._voice = voice
        self._failures: list[str] = []
        self._tables: list[TierTable] = []

    @property
    def measurements(self) -> int:
        sides = sum(why_not(side) is None for load in self._options.loads for side in LOADS[load].sides)
        return self._options.pairs * sides

    def run(self) -> TierReport:
        """A failure ends its load; what was measured before it is still reported."""
        for load in self._options.loads:
            try:
                self._load(load)
            except (ChildFailed, MeasurementFailed) as error:
                self._failures.append(str(error))
                self._voice.say(f"failed: {error}")
        return self._conclude()

    def _load(self, load: Load) -> None:
        options, shape = self._options, self._options.shape(load)
        told = (
            f"{shape.title}: {shape.requests} × ({shape.input_tokens} in, {shape.output_tokens} out) at once, "
            f"pool of {shape.pool_blocks} blocks of {shape.block_size} ({shape.share:.0%} of what they fill)"
        )
        if load is Load.SLOW_STORE:
            told += f", link of {options.link_bytes_per_s / 1e6:g} MB/s"
        table = TierTable(load, told, shape.block_size, shape.pool_blocks, [])
        self._tables.append(table)
        with contextlib.ExitStack() as stack:
            sides = []
            for side in shape.sides:
                row = TierRow(side.name, "", absent=why_not(side) or "")
                table.rows.append(row)
                if row.absent:
                    continue
                store = stack.enter_context(store_args(side, options.folder, STORE_LIMIT, options.link_bytes_per_s))
                sides.append(serve_side(side.name, options.model, (*shape.flags, *side.args, *store, *options.args)))
                row.command = sides[-1].told()
            servers = start_all(stack, sides, self._voice)
            turns, _ = arrange(servers, self._voice, options.seed + 77, tokens_of(options.model))
            self._pairs(shape, [row for row in table.rows if not row.absent], turns)

    def _pairs(self, shape: LoadShape, rows: Sequence[TierRow], turns: Turns) -> None:
        for pair in range(self._options.pairs):
            for at in order(range(len(rows)), pair):
                self._measure(shape, rows[at], pair, turns, at)

    def _measure(self, shape: LoadShape, row: TierRow, pair: int, turns: Turns, at: int) -> None:
        serving, options = turns.servers[at], self._options

        def work() -> tuple[float, str]:
            before = counts_of(serving)
            # Another seed for each pair: equal work on all sides, and nothing of it in any tier.
            each = Round(shape.input_tokens, shape.output_tokens)
            result = turns.run(serving, each, shape.requests, concurrency=shape.requests, seed=options.seed + 1 + pair)
            counts = gained(before, counts_of(serving))
            row.counts.append(counts)
            return summarise(result).throughput.output_tokens_per_s, ", ".join(f"{n} {v}" for n, v in counts.items() if v)

        look = Look(shape.title, "output tokens/s", row.side, pair, options.pairs, options.look_s)
        row.speed.append(measure(self._voice, look, work))

    def _conclude(self) -> TierReport:
        for table in self._tables:
            for row in table.rows:
                row.ratio = pair_by_pair(row.speed, table.rows[0].speed)
        loads = [each.load for table in self._tables for row in table.rows for each in row.speed]
        model = self._options.model
        return TierReport(
            schema=SCHEMA,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            versions=versions_of(None, self._failures),
            model="no model" if model is None else model.name,
            tables=self._tables,
            notes=notes_on_others(loads),
            failures=self._failures,
        )


def show(console: Console, report: TierReport) -> None:
    for table in report.tables:
        console.print(_shown(report, table))
    print_remarks(console, report.notes, report.failures)


def _shown(report: TierReport, table: TierTable) -> Table:
    title = f"{machine_title(report.model, report.machine, report.versions)}\n{table.told}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("beyond the pool")
    heads = ("output tokens/s", "÷ recompute", "preempted", "recomputed tokens", "fewer by", "restored tokens")
    for name in (*heads, "from the store, blocks", "computing is quicker, blocks", "store given up"):
        shown.add_column(name, justify="right")
    for row in table.rows:
        fewer = table.fewer(row)
        shown.add_row(
            row.side,
            shown_values(row.speed, row.absent),
            shown_ratio(row.ratio),
            f"{row.count('preemptions'):,.0f}",
            f"{row.count('recomputed tokens'):,.0f}",
            "–" if fewer is None else f"{fewer:.1f}×",
            f"{row.count('loaded') * table.block_size:,.0f}",
            f"{row.count('fetched'):,.0f}",
            f"{row.count('recompute cheaper'):,.0f}",
            f"{row.count('store given up'):,.0f}",
        )
    return shown
