"""`baton bench chat-tiers`: conversations of several rounds on one instance whose pool holds few of them.

Owns the measurement. Many conversations are open at once, with a pause before each next round, and a prompt carries all that
was said before. What the instance still has of it need not be computed: in the pool itself, in host memory, or in a store.
The instances (nothing, host memory, a file store, Valkey) are all up and take turns; the lengths are those of a trace, cut
to what a CPU can do, and each pair has words of its own. The host memory in front of a store is too small for all, too.

The figures are the share of prompt tokens that need not be computed, as usage tells it, and the time to the first token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.children import ChildFailed
from baton.bench.load import RunResult
from baton.bench.machine import describe_machine
from baton.bench.routing import Talks
from baton.bench.stats import describe, median
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
from baton.bench.workload import Session

SCHEMA = 1
STORE_LIMIT = "4G"
TALKS = Talks(count=78, concurrency=39, input_scale=0.25, output_tokens_max=16, context_tokens=1024)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    model: Path | None
    """None: no model."""
    talks: Talks = TALKS
    pairs: int = 3
    think_s: float = 2.0
    pool_blocks: int = 96
    block_size: int = 32
    slots: int = 16
    host: str = "2G"
    staging: str = "128M"
    """Host memory in front of a store."""
    args: tuple[str, ...] = ()
    folder: Path | None = None
    look_s: float = 1.0

    @property
    def sides(self) -> tuple[TierSide, ...]:
        return (
            TierSide("none"),
            TierSide("host", ("--host-memory", self.host)),
            TierSide("file", ("--host-memory", self.staging), StoreKind.FILE),
            TierSide("valkey", ("--host-memory", self.staging), StoreKind.VALKEY),
        )

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            "--max-model-len", str(min(self.pool_blocks * self.block_size, self.talks.context_tokens + 256)),
            "--max-num-seqs", str(self.slots),
            "--block-size", str(self.block_size),
            "--kv-blocks", str(self.pool_blocks),
        )  # fmt: skip


class ChatRow(msgspec.Struct):
    side: str
    command: str
    ttft_mean_s: list[Measured] = []
    ttft_p90_s: list[float] = []
    hit_rate: list[float] = []
    took_s: list[float] = []
    counts: list[Counts] = []
    absent: str = ""
    ratio: RatioSpread | None = None
    """Mean time to the first token ÷ that without anything behind the pool, pair by pair."""


class ChatReport(msgspec.Struct):
    schema: int
    made: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    model: str
    settings: dict[str, str | int | float]
    requests: int
    prompt_tokens: int
    """Of one run."""
    new_tokens: int
    """Of those, what no earlier round has had: the most that can be found is the rest."""
    rows: list[ChatRow]
    notes: list[str]
    failures: list[str]


class ChatBench:
    def __init__(self, options: ChatOptions, sessions: Sequence[Session], voice: Voice) -> None:
        self._options = options
        self._sessions = [replace(session, think_s=options.think_s) for session in sessions]
        self._voice = voice
        self._rows = [ChatRow(side.name, "", absent=why_not(side) or "") for side in options.sides]
        self._failures: list[str] = []
        self._prompt_tokens = 0

    @property
    def measurements(self) -> int:
        return self._options.pairs * sum(not row.absent for row in self._rows)

    def run(self) -> ChatReport:
        """A failure ends the measurements; what was measured before it is still reported."""
        try:
            with contextlib.ExitStack() as stack:
                self._pairs(self._start(stack))
        except (ChildFailed, MeasurementFailed) as error:
            self._failures.append(str(error))
            self._voice.say(f"failed: {error}")
        return self._conclude()

    def _start(self, stack: contextlib.ExitStack) -> Turns:
        options = self._options
        sides = []
        for row, side in zip(self._rows, options.sides, strict=True):
            if row.absent:
                continue
            store = stack.enter_context(store_args(side, options.folder, STORE_LIMIT))
            sides.append(serve_side(side.name, options.model, (*options.flags, *side.args, *store, *options.args)))
            row.command = sides[-1].told()
        servers = start_all(stack, sides, self._voice)
        turns, _ = arrange(servers, self._voice, options.talks.seed + 77, tokens_of(options.model))
        return turns

    def _pairs(self, turns: Turns) -> None:
        rows = [row for row in self._rows if not row.absent]
        for pair in range(self._options.pairs):
            for at in order(range(len(rows)), pair):
                self._measure(rows[at], pair, turns, at)

    def _measure(self, row: ChatRow, pair: int, turns: Turns, at: int) -> None:
        serving, options = turns.servers[at], self._options

        def work() -> tuple[float, str]:
            before = counts_of(serving)
            seed = options.talks.seed + 1 + pair  # other words for each pair, the same for all sides
            result = turns.send(serving, self._sessions, options.talks.concurrency, seed)
            row.counts.append(gained(before, counts_of(serving)))
            return self._keep(row, result)

        look = Look("chat", "s to the first token", row.side, pair, options.pairs, options.look_s)
        row.ttft_mean_s.append(measure(self._voice, look, work))

    def _keep(self, row: ChatRow, result: RunResult) -> tuple[float, str]:
        times = describe([record.ttft_s for record in result.records if record.ttft_s is not None])
        if times is None:
            raise MeasurementFailed(f"{row.side}: no request gave a token")
        self._prompt_tokens = sum(record.prompt_tokens for record in result.records)
        cached = sum(record.cached_tokens or 0 for record in result.records)
        row.hit_rate.append(cached / max(1, self._prompt_tokens))
        row.ttft_p90_s.append(times.p90)
        row.took_s.append(max(record.end_s for record in result.records))
        return times.mean, f"{row.hit_rate[-1]:.1%} found, p90 {times.p90:.2f} s, {row.took_s[-1]:.0f} s in all"

    def _conclude(self) -> ChatReport:
        options = self._options
        for row in self._rows:
            row.ratio = pair_by_pair(row.ttft_mean_s, self._rows[0].ttft_mean_s)
        told = {**asdict(options.talks), **asdict(options)}
        return ChatReport(
            schema=SCHEMA,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            versions=versions_of(None, self._failures),
            model="no model" if options.model is None else options.model.name,
            settings={name: value for name, value in told.items() if isinstance(value, str | int | float)},
            requests=sum(len(session.rounds) for session in self._sessions),
            prompt_tokens=self._prompt_tokens,
            new_tokens=sum(each.input_tokens for session in self._sessions for each in session.rounds),
            rows=self._rows,
            notes=notes_on_others([each.load for row in self._rows for each in row.ttft_mean_s]),
            failures=self._failures,
        )


def show(console: Console, report: ChatReport) -> None:
    told = report.settings
    title = (
        f"{machine_title(report.model, report.machine, report.versions)}\n"
        f"{told['count']} conversations, {told['concurrency']} at once, {report.requests} requests, "
        f"{report.prompt_tokens:,} prompt tokens ({report.new_tokens:,} new), "
        f"answers up to {told['output_tokens_max']}, pauses of {told['think_s']:g} s\n"
        f"pool of {told['pool_blocks']} blocks of {told['block_size']}, {told['slots']} slots; host {told['host']}, "
        f"{told['staging']} in front of a store"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("behind the pool")
    for name in (
        "found",
        "TTFT mean, s",
        "÷ none",
        "TTFT p90, s",
        "whole run, s",
        "blocks loaded",
        "from the store",
        "stored",
    ):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(row.side, *_cells(row))
    console.print(table)
    print_remarks(console, report.notes, report.failures)


def _cells(row: ChatRow) -> list[str]:
    if not row.counts:
        return [row.absent or "–"]
    counts = [f"{median([each[name] for each in row.counts]):,.0f}" for name in ("loaded", "fetched", "stored")]
    return [
        f"{median(row.hit_rate):.1%}",
        shown_values(row.ttft_mean_s, ""),
        shown_ratio(row.ratio),
        f"{median(row.ttft_p90_s):.3g}",
        f"{median(row.took_s):.0f}",
        *counts,
    ]
