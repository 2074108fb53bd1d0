"""Value of host memory and a store when the KV pool is too small.

Owns the loads and the report. All requests arrive at once and nothing is reserved for growth (`--reserve none`, as in other
servers), so that many are preempted. A preempted request computes its KV again, unless host memory or a store has it; the
prefix cache is on everywhere, so blocks still in the pool are not computed again. Each side of a load is an instance; all
run and are loaded in turns. Each is compared with the first, which has no tier, in the same pair.

One more side without a tier uses Baton's default reservation: fewer requests are preempted, and fewer run at once. A tier
that beats only `--reserve none` is useless.

In the last load computing is faster: the store is behind a link that is slower than the model.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.report import summarise
from benchmarks.options import JsonFile, ModelOrScripted, OurArgs, Pairs, Seed, StoreFolder
from benchmarks.runner import (
    ABSENT,
    Columns,
    Experiment,
    Measured,
    MeasuredSide,
    Progress,
    Rounds,
    Spread,
    failures_noted,
    model_folder,
    notes_on_other_load,
    print_remarks,
    ratio_of,
    run_benchmark,
    shown_ratio,
    shown_values,
    table_of,
)
from benchmarks.servers import RunningServer, ServerReport, ServersInTurn, ServingLoad, versions_of
from benchmarks.tier_sides import SCRIPTED, Hosting, SideRow, StoreKind, TierSide, counts_of, gained, why_not

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
    load: ServingLoad
    block_size: int
    sides: tuple[TierSide, ...]
    """Sides of the load; the first has no tier behind its pool."""
    share: float = 0.5
    """Pool ÷ blocks that the load fills."""

    @property
    def pool_blocks(self) -> int:
        each = -(-(self.load.input_tokens + self.load.output_tokens) // self.block_size)
        return max(each, round(self.share * each * self.load.requests))

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of all sides."""
        longest = min(self.pool_blocks * self.block_size, max(256, self.load.input_tokens + self.load.output_tokens))
        return (
            "--max-model-len", str(longest),
            "--max-num-seqs", str(self.load.requests),
            "--block-size", str(self.block_size),
            "--kv-blocks", str(self.pool_blocks),
        )  # fmt: skip


def sides_of(host: str, staging: str) -> tuple[TierSide, ...]:
    """Sides. `host`: host memory for everything; `staging`: host memory in front of a store."""
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
    Load.SHORT: LoadShape("as in `pressure`", ServingLoad(64, 128, 192), 16, sides_of("2G", "128M")),
    Load.LONG: LoadShape("long prompts", ServingLoad(48, 512, 512), 32, sides_of("2G", "256M")),
    Load.SLOW_STORE: LoadShape("a store slower than the model", ServingLoad(64, 128, 192), 8, slow_sides("32M")),
}


@dataclass(frozen=True, slots=True)
class TierOptions:
    model: Path | None
    """None: the scripted executor."""
    loads: tuple[Load, ...] = tuple(Load)
    pairs: int = 3
    requests: int | None = None
    """Overrides each load's own number."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    args: tuple[str, ...] = ()
    """Further arguments for all sides."""
    folder: Path | None = None
    """Folder of file stores."""
    link_bytes_per_s: float = 12e6
    """Rate of the slow store's link, each way."""
    seed: int = 0
    look_s: float = 1.0

    def shape(self, load: Load) -> LoadShape:
        shape = LOADS[load]
        own = shape.load
        asked = ServingLoad(
            self.requests or own.requests, self.input_tokens or own.input_tokens, self.output_tokens or own.output_tokens
        )
        return replace(shape, load=asked)


class TierRow(SideRow):
    speed: list[Measured] = msgspec.field(default_factory=list)
    """Output tokens per second."""
    ratio: Spread | None = None
    """Speed ÷ the first side's, pair by pair."""


class TierTable(msgspec.Struct):
    load: Load
    told: str
    block_size: int
    pool_blocks: int
    rows: list[TierRow]

    def fewer(self, row: TierRow) -> float | None:
        """Recomputed tokens of the first side ÷ those of this one."""
        return self.rows[0].count("recomputed tokens") / max(1.0, row.count("recomputed tokens")) if row.counts else None


class TierReport(ServerReport, kw_only=True):
    tables: list[TierTable]


class TierBench:
    def __init__(self, options: TierOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._rounds = Rounds(progress, options.pairs, options.look_s)
        self._failures: list[str] = []
        self._tables: list[TierTable] = []

    @property
    def measurements(self) -> int:
        sides = sum(why_not(side) is None for load in self._options.loads for side in LOADS[load].sides)
        return self._options.pairs * sides

    def run(self) -> TierReport:
        """Measure and report. A failure ends its load; earlier measurements are still reported."""
        for load in self._options.loads:
            with failures_noted(self._failures, self._progress):
                self._load(load)
        return self._conclude()

    def _load(self, load: Load) -> None:
        options, shape = self._options, self._options.shape(load)
        title = (
            f"{shape.title}: {shape.load.name}, "
            f"pool of {shape.pool_blocks} blocks of {shape.block_size} ({shape.share:.0%} of what they fill)"
        )
        if load is Load.SLOW_STORE:
            title += f", link of {options.link_bytes_per_s / 1e6:g} MB/s"
        rows = [TierRow(side.name, absent=why_not(side) or "") for side in shape.sides]
        self._tables.append(TierTable(load, title, shape.block_size, shape.pool_blocks, rows))
        with contextlib.ExitStack() as stack:
            hosting = Hosting(
                options.model, shape.flags, options.args, options.folder, options.seed, options.link_bytes_per_s
            )
            turns = hosting.start(stack, shape.sides, rows, self._progress)
            present = zip((row for row in rows if not row.absent), turns.servers, strict=True)
            sides = [
                MeasuredSide(row.side, partial(self._taken, turns, serving, row, shape.load), row.speed)
                for row, serving in present
            ]
            self._rounds.compare(shape.title, "output tokens/s", sides)

    def _taken(
        self, turns: ServersInTurn, serving: RunningServer, row: TierRow, load: ServingLoad, pair: int
    ) -> tuple[float, str]:
        before = counts_of(serving)
        # Another seed for each pair: equal work on all sides, and nothing in any tier.
        result = turns.run(serving, load, self._options.seed + 1 + pair)
        counts = gained(before, counts_of(serving))
        row.counts.append(counts)
        return summarise(result).throughput.output_tokens_per_s, ", ".join(f"{n} {v}" for n, v in counts.items() if v)

    def _conclude(self) -> TierReport:
        for table in self._tables:
            for row in table.rows:
                row.ratio = ratio_of(row.speed, table.rows[0].speed)
        model = self._options.model
        return TierReport(
            versions=versions_of(None, self._failures),
            model="no model" if model is None else model.name,
            tables=self._tables,
            notes=notes_on_other_load(self._rounds.loads),
            failures=self._failures,
        )


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Loads = Annotated[list[Load] | None, typer.Option("--load", help="Only this one; repeat for several.")]
Link = Annotated[float, typer.Option("--link-mbytes", min=0.1, max=10_000, help="MB/s of the slow store's link, each way.")]
# Hidden: another load is another benchmark. They are there to try the command out quickly.
Requests = Annotated[int | None, typer.Option(min=1, max=1024, hidden=True)]
Tokens = Annotated[int | None, typer.Option(min=1, max=2048, hidden=True)]


def tiers(
    model: ModelOrScripted = "smollm2",
    load: Loads = None,
    pairs: Pairs = 3,
    our_args: OurArgs = "",
    folder: StoreFolder = None,
    link_mbytes: Link = 12.0,
    seed: Seed = 0,
    requests: Requests = None,
    input_tokens: Tokens = None,
    output_tokens: Tokens = None,
    json_file: JsonFile = Path("bench-results/tiers.json"),
) -> None:
    """Measure what host memory and a store are worth when the KV pool is too small, beside computing again.

    Three loads, in each of which all requests come at once and the pool holds half of what they fill. The last has a store
    that is slower than the model. Takes about half an hour on two cores.
    """

    def prepare(progress: Progress) -> Experiment[TierReport]:
        options = TierOptions(
            model=None if model == SCRIPTED else model_folder(model, progress),
            loads=tuple(load or Load),
            pairs=pairs,
            requests=requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            args=tuple(shlex.split(our_args)),
            folder=folder,
            link_bytes_per_s=link_mbytes * 1e6,
            seed=seed,
        )
        work = TierBench(options, progress)
        return Experiment(work.measurements, work.run)

    run_benchmark(prepare, show, json_file)


def show(console: Console, report: TierReport) -> None:
    for table in report.tables:
        console.print(table_of(f"{report.title}\n{table.told}", _columns(table), table.rows))
    print_remarks(console, report)


def _columns(table: TierTable) -> Columns[TierRow]:
    def fewer(row: TierRow) -> str:
        times = table.fewer(row)
        return ABSENT if times is None else f"{times:.1f}×"

    return (
        ("beyond the pool", lambda row: row.side),
        ("output tokens/s", lambda row: shown_values(row.speed, row.absent)),
        ("÷ recompute", lambda row: shown_ratio(row.ratio)),
        ("preempted", lambda row: f"{row.count('preemptions'):,.0f}"),
        ("recomputed tokens", lambda row: f"{row.count('recomputed tokens'):,.0f}"),
        ("fewer by", fewer),
        ("restored tokens", lambda row: f"{row.count('loaded') * table.block_size:,.0f}"),
        ("from the store, blocks", lambda row: f"{row.count('fetched'):,.0f}"),
        ("computing is quicker, blocks", lambda row: f"{row.count('recompute cheaper'):,.0f}"),
        ("store given up", lambda row: f"{row.count('store given up'):,.0f}"),
    )
