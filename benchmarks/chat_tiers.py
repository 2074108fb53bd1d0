"""Conversations of several rounds on one instance whose pool holds few of them.

Owns the measurement. Many conversations are open at once, with a pause before each round, and a prompt contains all earlier
rounds. KV still in the pool, in host memory or in a store need not be computed. The instances (no tier, host memory, a file
store, Valkey) all run and are loaded in turns. Lengths are those of a trace, reduced for a CPU; each pair has its own seed.
The host memory in front of a store is too small for all conversations.

The figures are the share of cached prompt tokens, from `usage`, and the time to the first token.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.load import RunResult
from baton.bench.stats import describe, median
from baton.bench.workload import BenchSession
from benchmarks.conversations import ConversationLoad, find_conversations, read_conversations
from benchmarks.options import ConversationFile, JsonFile, ModelOrScripted, OurArgs, Pairs, Seed, ShareGptFolder, StoreFolder
from benchmarks.runner import (
    ABSENT,
    Columns,
    Experiment,
    Measured,
    MeasuredSide,
    MeasurementFailed,
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
from benchmarks.servers import RunningServer, ServerReport, ServersInTurn, versions_of
from benchmarks.tier_sides import SCRIPTED, Hosting, SideRow, StoreKind, TierSide, counts_of, gained, why_not

LOAD = ConversationLoad(count=78, concurrency=39, input_scale=0.25, output_tokens_max=16, context_tokens=1024)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    model: Path | None
    """None: the scripted executor."""
    load: ConversationLoad = LOAD
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
            "--max-model-len", str(min(self.pool_blocks * self.block_size, self.load.context_tokens + 256)),
            "--max-num-seqs", str(self.slots),
            "--block-size", str(self.block_size),
            "--kv-blocks", str(self.pool_blocks),
        )  # fmt: skip


class ChatRow(SideRow):
    ttft_mean_s: list[Measured] = msgspec.field(default_factory=list)
    ttft_p90_s: list[float] = msgspec.field(default_factory=list)
    hit_rate: list[float] = msgspec.field(default_factory=list)
    took_s: list[float] = msgspec.field(default_factory=list)
    ratio: Spread | None = None
    """Mean time to the first token ÷ that without anything behind the pool, pair by pair."""


class ChatReport(ServerReport, kw_only=True):
    settings: dict[str, str | int | float]
    requests: int
    prompt_tokens: int
    """Prompt tokens of one run."""
    new_tokens: int
    """Prompt tokens that no earlier round contains; only the others can be cached."""
    rows: list[ChatRow]


class ChatBench:
    def __init__(self, options: ChatOptions, sessions: Sequence[BenchSession], progress: Progress) -> None:
        self._options = options
        self._sessions = [replace(session, think_s=options.think_s) for session in sessions]
        self._progress = progress
        self._rows = [ChatRow(side.name, absent=why_not(side) or "") for side in options.sides]
        self._rounds = Rounds(progress, options.pairs, options.look_s)
        self._failures: list[str] = []
        self._prompt_tokens = 0

    @property
    def measurements(self) -> int:
        return self._options.pairs * sum(not row.absent for row in self._rows)

    def run(self) -> ChatReport:
        """Measure and report. A failure ends the measurements; earlier ones are still reported."""
        with failures_noted(self._failures, self._progress), contextlib.ExitStack() as stack:
            self._measure(stack)
        return self._conclude()

    def _measure(self, stack: contextlib.ExitStack) -> None:
        options = self._options
        hosting = Hosting(options.model, options.flags, options.args, options.folder, options.load.seed)
        turns = hosting.start(stack, options.sides, self._rows, self._progress)
        present = zip((row for row in self._rows if not row.absent), turns.servers, strict=True)
        sides = [
            MeasuredSide(row.side, partial(self._taken, turns, serving, row), row.ttft_mean_s) for row, serving in present
        ]
        self._rounds.compare("chat", "s to the first token", sides)

    def _taken(self, turns: ServersInTurn, serving: RunningServer, row: ChatRow, pair: int) -> tuple[float, str]:
        before, load = counts_of(serving), self._options.load
        # Another seed for each pair, the same for all sides.
        result = turns.send(serving, self._sessions, load.concurrency, load.seed + 1 + pair)
        row.counts.append(gained(before, counts_of(serving)))
        return self._keep(row, result)

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
            row.ratio = ratio_of(row.ttft_mean_s, self._rows[0].ttft_mean_s)
        settings = {**asdict(options.load), **asdict(options)}
        return ChatReport(
            versions=versions_of(None, self._failures),
            model="no model" if options.model is None else options.model.name,
            settings={name: value for name, value in settings.items() if isinstance(value, str | int | float)},
            requests=sum(len(session.rounds) for session in self._sessions),
            prompt_tokens=self._prompt_tokens,
            new_tokens=sum(each.input_tokens for session in self._sessions for each in session.rounds),
            rows=self._rows,
            notes=notes_on_other_load(self._rounds.loads),
            failures=self._failures,
        )


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Sessions = Annotated[int, typer.Option(min=1, max=10_000, help="Conversations.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Conversations at once.")]
Think = Annotated[float, typer.Option("--think", min=0.0, max=600.0, help="Seconds before each next round.")]
Pool = Annotated[int, typer.Option("--kv-blocks", min=1, help="Blocks of 32 tokens in the pool.")]


def chat_tiers(
    model: ModelOrScripted = "smollm2",
    trace: ConversationFile = None,
    traces: ShareGptFolder = None,
    pairs: Pairs = 3,
    sessions: Sessions = 78,
    concurrency: Concurrency = 39,
    think: Think = 2.0,
    kv_blocks: Pool = 96,
    our_args: OurArgs = "",
    folder: StoreFolder = None,
    seed: Seed = 0,
    json_file: JsonFile = Path("bench-results/chat-tiers.json"),
) -> None:
    """How much of each prompt need not be computed, and the time to the first token, when the pool holds few conversations.

    One instance with nothing behind its pool, with host memory, with a file store and with Valkey; lengths from a trace.
    """

    def prepare(progress: Progress) -> Experiment[ChatReport]:
        load = replace(LOAD, count=sessions, concurrency=concurrency, seed=seed)
        drawn = load.drawn(read_conversations(find_conversations(trace, traces)))
        options = ChatOptions(
            model=None if model == SCRIPTED else model_folder(model, progress),
            load=load,
            pairs=pairs,
            think_s=think,
            pool_blocks=kv_blocks,
            args=tuple(shlex.split(our_args)),
            folder=folder,
        )
        work = ChatBench(options, drawn, progress)
        return Experiment(work.measurements, work.run)

    run_benchmark(prepare, show, json_file)


def show(console: Console, report: ChatReport) -> None:
    settings = report.settings
    title = (
        f"{report.title}\n"
        f"{settings['count']} conversations, {settings['concurrency']} at once, {report.requests} requests, "
        f"{report.prompt_tokens:,} prompt tokens ({report.new_tokens:,} new), "
        f"answers up to {settings['output_tokens_max']}, pauses of {settings['think_s']:g} s\n"
        f"pool of {settings['pool_blocks']} blocks of {settings['block_size']}, {settings['slots']} slots; "
        f"host {settings['host']}, {settings['staging']} in front of a store"
    )
    columns: Columns[ChatRow] = (
        ("behind the pool", lambda row: row.side),
        ("found", lambda row: f"{median(row.hit_rate):.1%}" if row.hit_rate else row.absent or ABSENT),
        ("TTFT mean, s", lambda row: shown_values(row.ttft_mean_s)),
        ("÷ none", lambda row: shown_ratio(row.ratio)),
        ("TTFT p90, s", lambda row: f"{median(row.ttft_p90_s):.3g}" if row.ttft_p90_s else ABSENT),
        ("whole run, s", lambda row: f"{median(row.took_s):.0f}" if row.took_s else ABSENT),
        ("blocks loaded", lambda row: f"{row.count('loaded'):,.0f}"),
        ("from the store", lambda row: f"{row.count('fetched'):,.0f}"),
        ("stored", lambda row: f"{row.count('stored'):,.0f}"),
    )
    console.print(table_of(title, columns, report.rows))
    print_remarks(console, report)
