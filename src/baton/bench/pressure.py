"""`baton bench pressure`: output tokens a second when the KV pool is too small, Baton beside vLLM.

Owns the load, the pools and the report. The pools are what the load fills, half of it and a quarter; each (side, pool) has a
server of its own, all are up, and they take turns. A side is judged against the other in the same pool, and against itself
with room for all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from baton.bench.children import ChildFailed
from baton.bench.client import open_http
from baton.bench.machine import describe_machine
from baton.bench.report import summarise
from baton.bench.sides import OURS, PEER, ServerShape, Serving, Side, our_side, peer_side
from baton.bench.stats import median
from baton.bench.turns import (
    NO_PEER,
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
from baton.bench.verdict import RatioSpread, Row, machine_title, pair_by_pair, print_remarks, shown_ratio, shown_values
from baton.bench.workload import Round

SCHEMA = 1
SCRAPE_LIMIT_S = 30.0
SHARES = (1.0, 0.5, 0.25)
PREEMPTIONS = {OURS: "baton_num_preemptions_total", PEER: "vllm:num_preemptions_total"}
OWN_BLOCKS_OF_PEER = 1
"""vLLM keeps one block of its pool as a placeholder; with one more it has as many to use as we have."""


@dataclass(frozen=True, slots=True)
class PressureOptions:
    model: Path
    peer: str | None
    pairs: int = 3
    requests: int = 64
    """All at once."""
    input_tokens: int = 128
    output_tokens: int = 192
    our_args: str = ""
    peer_args: str = ""
    seed: int = 0
    look_s: float = 1.0

    @property
    def shape(self) -> ServerShape:
        """A sequence may not be longer than the smallest pool, so that all servers are told the same."""
        whole = ServerShape(self.model, max_num_seqs=self.requests)
        return replace(whole, max_model_len=min(whole.max_model_len, min(self.pools) * whole.block_size))

    @property
    def pools(self) -> tuple[int, ...]:
        """Blocks, from what the whole load fills downwards; none smaller than one request."""
        each = -(-(self.input_tokens + self.output_tokens) // ServerShape(self.model).block_size)
        return tuple(max(each, round(share * each * self.requests)) for share in SHARES)


@dataclass(frozen=True, slots=True)
class Contender:
    """A side with a pool."""

    name: str
    """Whose it is: ours or the peer's."""
    pool_blocks: int
    side: Side


class Point(msgspec.Struct):
    """One size of the pool."""

    pool_blocks: int
    share: float
    """Of what the load fills."""
    speed: Row
    ours_preemptions: list[int | None] = []
    """Run by run, as `speed.ours`; None where the server does not tell."""
    peer_preemptions: list[int | None] = []
    ours_of_own: RatioSpread | None = None
    """Speed ÷ the same side's with room for all, pair by pair."""
    peer_of_own: RatioSpread | None = None
    ratio: RatioSpread | None = None
    """Ours ÷ the peer's."""


class PressureReport(msgspec.Struct):
    schema: int
    made: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    model: str
    load: str
    commands: dict[str, str]
    idle_busy_cores: dict[str, float]
    points: list[Point]
    notes: list[str]
    failures: list[str]


def contenders_of(options: PressureOptions) -> list[Contender]:
    """Ours, and the peer's where there is one, for each pool."""
    contenders = []
    for blocks in options.pools:
        ours = our_side(options.shape, f"--kv-blocks {blocks} {options.our_args}")
        contenders.append(Contender(OURS, blocks, _named(ours, blocks)))
        if options.peer is not None:
            override = f"--num-gpu-blocks-override {blocks + OWN_BLOCKS_OF_PEER} {options.peer_args}"
            contenders.append(Contender(PEER, blocks, _named(peer_side(options.shape, options.peer, override), blocks)))
    return contenders


def _named(side: Side, blocks: int) -> Side:
    return replace(side, name=f"{side.name}, {blocks} blocks")


class Pressure:
    def __init__(self, options: PressureOptions, contenders: Sequence[Contender], voice: Voice) -> None:
        self._options = options
        self._contenders = contenders
        self._voice = voice
        self._idle: dict[str, float] = {}
        self._failures: list[str] = []
        absent = "" if options.peer is not None else NO_PEER
        self._points = [
            Point(blocks, blocks / options.pools[0], Row("pressure", f"{blocks} blocks", "output tokens/s", "higher"))
            for blocks in options.pools
        ]
        for point in self._points:
            point.speed.peer_absent = absent

    @property
    def measurements(self) -> int:
        return self._options.pairs * len(self._contenders)

    def run(self) -> PressureReport:
        """A failure ends the measurements; what was measured before it is still reported."""
        try:
            with contextlib.ExitStack() as stack:
                servers = start_all(stack, [each.side for each in self._contenders], self._voice)
                turns, self._idle = arrange(servers, self._voice, self._options.seed + 77)
                self._pairs(turns)
        except (ChildFailed, MeasurementFailed) as error:
            self._failures.append(str(error))
            self._voice.say(f"failed: {error}")
        return self._conclude()

    def _pairs(self, turns: Turns) -> None:
        for pair in range(self._options.pairs):
            for point in order(self._points, pair):
                rivals = [at for at, each in enumerate(self._contenders) if each.pool_blocks == point.pool_blocks]
                for at in order(rivals, pair):
                    self._measure(point, pair, turns, at)

    def _measure(self, point: Point, pair: int, turns: Turns, at: int) -> None:
        """One run of the server at that place: its speed, and how many requests yielded meanwhile."""
        row, options = point.speed, self._options
        name, serving = self._contenders[at].name, turns.servers[at]
        is_ours = name == OURS
        yielded = point.ours_preemptions if is_ours else point.peer_preemptions

        def work() -> tuple[float, str]:
            before = _preemptions(serving, name)
            # Another seed for each pair: equal work on both sides, and nothing of it in any cache.
            seed = options.seed + 1 + pair
            each = Round(options.input_tokens, options.output_tokens)
            result = turns.run(serving, each, options.requests, concurrency=options.requests, seed=seed)
            after = _preemptions(serving, name)
            yielded.append(None if before is None or after is None else after - before)
            told = "preemptions not told" if yielded[-1] is None else f"{yielded[-1]} preemptions"
            return summarise(result).throughput.output_tokens_per_s, told

        look = Look(row.name, row.unit, name, pair, options.pairs, options.look_s)
        (row.ours if is_ours else row.peer).append(measure(self._voice, look, work))

    def _conclude(self) -> PressureReport:
        options = self._options
        whole = self._points[0].speed
        for point in self._points:
            point.ratio = pair_by_pair(point.speed.ours, point.speed.peer)
            point.ours_of_own = pair_by_pair(point.speed.ours, whole.ours)
            point.peer_of_own = pair_by_pair(point.speed.peer, whole.peer)
        loads = [each.load for point in self._points for each in (*point.speed.ours, *point.speed.peer)]
        return PressureReport(
            schema=SCHEMA,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            versions=versions_of(options.peer, self._failures),
            model=options.model.name,
            load=f"{options.requests} × ({options.input_tokens} in, {options.output_tokens} out) at once",
            commands={each.side.name: each.side.told() for each in self._contenders},
            idle_busy_cores=self._idle,
            points=self._points,
            notes=notes_on_others(loads),
            failures=self._failures,
        )


def _preemptions(serving: Serving, name: str) -> int | None:
    return counter_total(asyncio.run(scrape(serving.url)), PREEMPTIONS[name])


async def scrape(url: str) -> str:
    address = f"{url}/metrics"
    try:
        async with open_http(1) as http, asyncio.timeout(SCRAPE_LIMIT_S), http.get(address) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise MeasurementFailed(f"{address} cannot be read: {error!r}") from error


def counter_total(exposition: str, name: str) -> int | None:
    """A counter of a Prometheus page, summed over its labels; None where the page has no such counter."""
    try:
        samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    except ValueError as error:
        raise MeasurementFailed(f"the metrics are malformed: {error}") from error
    values = [sample.value for sample in samples if sample.name == name]
    return int(sum(values)) if values else None


def show(console: Console, report: PressureReport) -> None:
    table = Table(
        title=f"{machine_title(report.model, report.machine, report.versions)}\n{report.load}", title_justify="left"
    )
    table.add_column("KV pool, blocks")
    for side in (OURS, PEER):
        for column in (f"{side} tokens/s", "of its own", "preemptions"):
            table.add_column(column, justify="right")
    table.add_column("Baton / vLLM", justify="right")
    for point in report.points:
        row = point.speed
        table.add_row(
            f"{point.pool_blocks} ({point.share:.0%})",
            shown_values(row.ours, row.ours_absent), shown_ratio(point.ours_of_own), _shown_counts(point.ours_preemptions),
            shown_values(row.peer, row.peer_absent), shown_ratio(point.peer_of_own), _shown_counts(point.peer_preemptions),
            shown_ratio(point.ratio),
        )  # fmt: skip
    console.print(table)
    print_remarks(console, report.notes, report.failures)


def _shown_counts(counts: Sequence[int | None]) -> str:
    told = [count for count in counts if count is not None]
    if not told:
        return "–"
    middle = f"{median(told):g}"
    return middle if min(told) == max(told) else f"{middle} ({min(told)} – {max(told)})"
