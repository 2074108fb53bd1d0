"""Output tokens a second when the KV pool is too small, Baton beside vLLM.

Owns the load, the pools and the report. The pools are what the load fills, half of it and a quarter; each (side, pool) has a
server of its own, all are up, and they take turns. A side is judged against the other in the same pool, and against itself
with room for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.report import summarise
from benchmarks.compare import ComparisonRow
from benchmarks.options import JsonFile, ModelArgument, OurArgs, Pairs, PeerArgs, PeerOption, Seed
from benchmarks.runner import (
    Columns,
    Experiment,
    Progress,
    Rounds,
    Spread,
    alternating,
    failures_noted,
    model_folder,
    notes_on_other_load,
    print_remarks,
    ratio_of,
    run_benchmark,
    shown_ratio,
    shown_spread,
    shown_values,
    table_of,
)
from benchmarks.servers import (
    NO_PEER,
    OURS,
    PEER,
    WARM_UP_SEED,
    RunningServer,
    ServerCommand,
    ServerReport,
    ServerShape,
    ServersInTurn,
    ServingLoad,
    counter_total,
    our_command,
    peer_command,
    scrape,
    servers_in_turn,
    start_servers,
    versions_of,
)

SHARES = (1.0, 0.5, 0.25)
PREEMPTIONS = {OURS: "baton_num_preemptions_total", PEER: "vllm:num_preemptions_total"}
OWN_BLOCKS_OF_PEER = 1
"""vLLM reserves one block of its pool as a placeholder, so it gets one more."""
LOAD = ServingLoad(64, 128, 192)


@dataclass(frozen=True, slots=True)
class PressureOptions:
    model: Path
    peer: str | None
    pairs: int = 3
    load: ServingLoad = LOAD
    our_args: str = ""
    peer_args: str = ""
    seed: int = 0
    look_s: float = 1.0

    @property
    def shape(self) -> ServerShape:
        """Settings of all servers; a sequence may not be longer than the smallest pool."""
        whole = ServerShape(self.model, max_num_seqs=self.load.requests)
        return replace(whole, max_model_len=min(whole.max_model_len, min(self.pools) * whole.block_size))

    @property
    def pools(self) -> tuple[int, ...]:
        """Pool sizes in blocks, from the whole load downwards; none smaller than one request."""
        each = -(-(self.load.input_tokens + self.load.output_tokens) // ServerShape(self.model).block_size)
        return tuple(max(each, round(share * each * self.load.requests)) for share in SHARES)


@dataclass(frozen=True, slots=True)
class PooledServer:
    """A server with one pool size."""

    name: str
    """OURS or PEER."""
    pool_blocks: int
    side: ServerCommand


class PoolPoint(msgspec.Struct):
    """One size of the pool."""

    pool_blocks: int
    share: float
    """Pool ÷ blocks that the load fills."""
    speed: ComparisonRow
    ours_preemptions: list[int | None] = []
    """By run, as `speed.ours`; None when the server has no such counter."""
    peer_preemptions: list[int | None] = []
    ours_of_own: Spread | None = None
    """Speed ÷ the same side's with the largest pool, pair by pair."""
    peer_of_own: Spread | None = None
    ratio: Spread | None = None
    """Baton ÷ peer."""

    def preemptions(self, side: str) -> list[int | None]:
        return self.ours_preemptions if side == OURS else self.peer_preemptions


class PressureReport(ServerReport, kw_only=True):
    load: str
    commands: dict[str, str]
    idle_busy_cores: dict[str, float]
    points: list[PoolPoint]


def pooled_servers(options: PressureOptions) -> list[PooledServer]:
    """Baton and, if configured, the peer, for each pool."""
    pooled = []
    for blocks in options.pools:
        ours = our_command(options.shape, f"--kv-blocks {blocks} {options.our_args}")
        pooled.append(PooledServer(OURS, blocks, _named(ours, blocks)))
        if options.peer is not None:
            override = f"--num-gpu-blocks-override {blocks + OWN_BLOCKS_OF_PEER} {options.peer_args}"
            pooled.append(PooledServer(PEER, blocks, _named(peer_command(options.shape, options.peer, override), blocks)))
    return pooled


def _named(side: ServerCommand, blocks: int) -> ServerCommand:
    return replace(side, name=f"{side.name}, {blocks} blocks")


class Pressure:
    def __init__(self, options: PressureOptions, pooled: Sequence[PooledServer], progress: Progress) -> None:
        self._options = options
        self._servers = pooled
        self._progress = progress
        self._rounds = Rounds(progress, options.pairs, options.look_s)
        self._idle: dict[str, float] = {}
        self._failures: list[str] = []
        absent = "" if options.peer is not None else NO_PEER
        self._points = [
            PoolPoint(
                blocks, blocks / options.pools[0], ComparisonRow("pressure", f"{blocks} blocks", "output tokens/s", "higher")
            )
            for blocks in options.pools
        ]
        for point in self._points:
            point.speed.peer_absent = absent

    @property
    def measurements(self) -> int:
        return self._options.pairs * len(self._servers)

    def run(self) -> PressureReport:
        """Measure and report. A failure ends the measurements; earlier ones are still reported."""
        with failures_noted(self._failures, self._progress), contextlib.ExitStack() as stack:
            servers = start_servers(stack, [each.side for each in self._servers], self._progress)
            turns, self._idle = servers_in_turn(servers, self._progress, self._options.seed + WARM_UP_SEED)
            self._pairs(turns)
        return self._conclude()

    def _pairs(self, turns: ServersInTurn) -> None:
        points = {point.pool_blocks: point for point in self._points}
        for pair, at in alternating(range(len(self._servers)), self._options.pairs):
            name, point = self._servers[at].name, points[self._servers[at].pool_blocks]
            take = partial(self._taken, turns, turns.servers[at], name, pair, point.preemptions(name))
            measured = self._rounds.measure(point.speed.name, point.speed.unit, name, pair, take)
            point.speed.values(name).append(measured)

    def _taken(
        self, turns: ServersInTurn, serving: RunningServer, name: str, pair: int, preemptions: list[int | None]
    ) -> tuple[float, str]:
        """One run of a server: its speed and its preemptions."""
        before = _preemptions(serving, name)
        # Another seed for each pair: equal work on both sides, and nothing cached.
        result = turns.run(serving, self._options.load, self._options.seed + 1 + pair)
        after = _preemptions(serving, name)
        preemptions.append(None if before is None or after is None else after - before)
        counted = "preemptions not told" if preemptions[-1] is None else f"{preemptions[-1]} preemptions"
        return summarise(result).throughput.output_tokens_per_s, counted

    def _conclude(self) -> PressureReport:
        options = self._options
        whole = self._points[0].speed
        for point in self._points:
            point.ratio = point.speed.ratio
            point.ours_of_own = ratio_of(point.speed.ours, whole.ours)
            point.peer_of_own = ratio_of(point.speed.peer, whole.peer)
        return PressureReport(
            versions=versions_of(options.peer, self._failures),
            model=options.model.name,
            load=options.load.name,
            commands={each.side.name: each.side.shell_line() for each in self._servers},
            idle_busy_cores=self._idle,
            points=self._points,
            notes=notes_on_other_load(self._rounds.loads),
            failures=self._failures,
        )


def _preemptions(serving: RunningServer, name: str) -> int | None:
    return counter_total(scrape(serving.url), PREEMPTIONS[name])


def _counts(counts: Sequence[int | None]) -> str:
    return shown_spread([count for count in counts if count is not None], "{:g}".format)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


# Hidden: another load is another benchmark. They are there to try the command out quickly.
Requests = Annotated[int, typer.Option(min=1, max=1024, hidden=True)]
Tokens = Annotated[int, typer.Option(min=1, max=2048, hidden=True)]


def pressure(
    model: ModelArgument = "smollm2",
    peer: PeerOption = None,
    pairs: Pairs = 3,
    our_args: OurArgs = "",
    peer_args: PeerArgs = "",
    seed: Seed = 0,
    requests: Requests = LOAD.requests,
    input_tokens: Tokens = LOAD.input_tokens,
    output_tokens: Tokens = LOAD.output_tokens,
    json_file: JsonFile = Path("bench-results/pressure.json"),
) -> None:
    """Measure output tokens a second under KV pressure, Baton beside vLLM on this machine.

    64 requests of 128 tokens in and 192 out at once, with KV for all of them, for half and for a quarter. Starts a server
    for each side and pool, keeps them up and loads one at a time. Takes about twenty-five minutes on two cores.
    """

    def prepare(progress: Progress) -> Experiment[PressureReport]:
        load = ServingLoad(requests, input_tokens, output_tokens)
        options = PressureOptions(model_folder(model, progress), peer, pairs, load, our_args, peer_args, seed)
        work = Pressure(options, pooled_servers(options), progress)
        return Experiment(work.measurements, work.run)

    run_benchmark(prepare, show, json_file)


def show(console: Console, report: PressureReport) -> None:
    columns: Columns[PoolPoint] = (
        ("KV pool, blocks", lambda point: f"{point.pool_blocks} ({point.share:.0%})"),
        (f"{OURS} tokens/s", lambda point: shown_values(point.speed.ours, point.speed.ours_absent)),
        ("of its own", lambda point: shown_ratio(point.ours_of_own)),
        ("preemptions", lambda point: _counts(point.ours_preemptions)),
        (f"{PEER} tokens/s", lambda point: shown_values(point.speed.peer, point.speed.peer_absent)),
        ("of its own", lambda point: shown_ratio(point.peer_of_own)),
        ("preemptions", lambda point: _counts(point.peer_preemptions)),
        ("Baton / vLLM", lambda point: shown_ratio(point.ratio)),
    )
    console.print(table_of(f"{report.title}\n{report.load}", columns, report.points))
    print_remarks(console, report)
