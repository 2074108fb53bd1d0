"""`baton bench compare`: Baton and vLLM on the same machine, model and load, in interleaved pairs.

Owns what is compared and in which order; how sides take turns is in `turns`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from baton.bench.children import ChildFailed, run_to_end
from baton.bench.client import RequestRecord
from baton.bench.machine import describe_machine
from baton.bench.report import summarise
from baton.bench.sides import OURS, PEER, ServerShape, Serving, Side, our_side, peer_side
from baton.bench.traces import TraceMalformed, read_trace
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
    server,
    start_all,
    versions_of,
)
from baton.bench.verdict import SCHEMA, Comparison, Row, ratio
from baton.bench.workload import Endpoint, Round, Session, Shape, traced_sessions

SCHEDULER_LIMIT_S = 300.0
SCHEDULER_ROWS, SCHEDULER_STEPS = 1024, 200
CHAT_TOKENS, CHAT_NEXT_TOKENS, CHAT_ANSWER_TOKENS = 2000, 32, 32
TRACE_REQUESTS, TRACE_TOKENS_MAX, TRACE_CONCURRENCY = 24, 1024, 16
NO_PEER_SCRIPT = "absent (set BATON_PEER_SCHEDULER)"
NO_TRACES = "no traces: set BATON_TRACES to a folder that holds one"


class Section(StrEnum):
    STARTUP = "startup"
    SERVING = "serving"
    PREFIX = "prefix"
    TRACE = "trace"
    SCHEDULER = "scheduler"


WITH_SERVERS = (Section.SERVING, Section.PREFIX, Section.TRACE)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    model: Path
    peer: str | None
    peer_script: Path | None
    traces: Path | None
    sections: tuple[Section, ...] = tuple(Section)
    pairs: int = 3
    our_args: str = ""
    peer_args: str = ""
    seed: int = 0
    look_s: float = 1.0
    """How long the machine is watched before each run."""


@dataclass(frozen=True, slots=True)
class ServingLoad:
    requests: int
    input_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.requests} × ({self.input_tokens} in, {self.output_tokens} out) at once"


SERVING_LOADS = (ServingLoad(64, 128, 64), ServingLoad(16, 512, 128))
SEEDS_A_LOAD = 100
"""Prompts of one seed begin alike, whatever their length."""


@dataclass(slots=True)
class _Findings:
    rows: list[Row] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def sides_of(options: CompareOptions) -> list[Side]:
    """Ours, and the peer's where there is one."""
    shape = ServerShape(options.model)
    sides = [our_side(shape, options.our_args)]
    if options.peer is not None:
        sides.append(peer_side(shape, options.peer, options.peer_args))
    return sides


class Compare:
    def __init__(self, options: CompareOptions, sides: Sequence[Side], voice: Voice) -> None:
        self._options = options
        self._sides = sides
        self._voice = voice
        self._found = _Findings()

    @property
    def measurements(self) -> int:
        """How many will be taken if all goes well."""
        rows = sum(len(SERVING_LOADS) if section is Section.SERVING else 1 for section in self._options.sections)
        return rows * self._options.pairs * max(1, len(self._sides))

    def run(self) -> Comparison:
        """All sections that were asked for. A section that fails is reported, and the next one still runs."""
        sections = self._options.sections
        # Servers first: starts are timed after each side has started once, with the caches that leaves behind.
        if any(section in sections for section in WITH_SERVERS):
            self._guard("servers", self._with_servers)
        if Section.STARTUP in sections:
            self._guard("startup", self._startup)
        if Section.SCHEDULER in sections:
            self._guard("scheduler", self._scheduler)
        return self._conclude()

    def _guard(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (ChildFailed, MeasurementFailed, TraceMalformed) as error:
            self._found.failures.append(f"{name}: {error}")
            self._voice.say(f"{name} failed: {error}")

    # --- from the command to the first token

    def _startup(self) -> None:
        row = self._row("startup", "command to first token", "s", "lower")

        def taken(side: Side, _pair: int) -> tuple[float, str]:
            with server(side) as serving:
                return serving.first_token_s, ""

        for pair in range(self._options.pairs):
            for side in order(self._sides, pair):
                self._measure(row, side.name, pair, partial(taken, side, pair))

    # --- both servers up, one loaded at a time

    def _with_servers(self) -> None:
        with contextlib.ExitStack() as stack:
            servers = start_all(stack, self._sides, self._voice)
            turns, idle = arrange(servers, self._voice, self._options.seed + 77)
            self._found.idle |= idle
            sections = self._options.sections
            if Section.SERVING in sections:
                for load in SERVING_LOADS:
                    self._guard(load.name, partial(self._serving, turns, load))
            if Section.PREFIX in sections:
                self._guard("prefix", lambda: self._prefix(turns))
            if Section.TRACE in sections:
                self._guard("trace", lambda: self._trace(turns))

    def _serving(self, turns: Turns, load: ServingLoad) -> None:
        row = self._row("serving", load.name, "output tokens/s", "higher")
        each = Round(load.input_tokens, load.output_tokens)

        def taken(serving: Serving, pair: int) -> tuple[float, str]:
            # Another seed for each load and pair: equal work on both sides, and nothing of it in any cache.
            seed = self._options.seed + 1 + pair + SEEDS_A_LOAD * SERVING_LOADS.index(load)
            result = turns.run(serving, each, load.requests, concurrency=load.requests, seed=seed)
            summary = summarise(result)
            first = summary.latency.ttft_ms
            detail = f"TTFT p50 {first.p50:,.0f} ms" if first is not None else ""
            return summary.throughput.output_tokens_per_s, detail

        self._pairs(row, turns, taken)

    def _prefix(self, turns: Turns) -> None:
        row = self._row("prefix", f"second turn of a {CHAT_TOKENS:,}-token chat, TTFT ÷ the first turn's", "", "lower")

        def taken(serving: Serving, pair: int) -> tuple[float, str]:
            rounds = (Round(CHAT_TOKENS, CHAT_ANSWER_TOKENS), Round(CHAT_NEXT_TOKENS, CHAT_ANSWER_TOKENS))
            session = Session(index=pair, rounds=rounds)
            result = turns.send(serving, [session], concurrency=1, seed=self._options.seed + 1000, endpoint=Endpoint.CHAT)
            first_s, second_s = (_first_token_s(record) for record in result.records)
            tokens = result.records[0].prompt_tokens
            return second_s / first_s, f"{tokens:,} tokens: {first_s * 1000:,.0f} ms, then {second_s * 1000:,.0f} ms"

        self._pairs(row, turns, taken)

    def _trace(self, turns: Turns) -> None:
        trace = find_trace(self._options.traces)
        if trace is None:
            self._found.notes.append(f"trace: {NO_TRACES}")
            return
        row = self._row("trace", f"{TRACE_REQUESTS} requests of {trace.name}", "output tokens/s", "higher")
        fitting = (r for r in read_trace(trace) if r.input_tokens + r.output_tokens <= TRACE_TOKENS_MAX)
        requests = [request for request, _ in zip(fitting, range(TRACE_REQUESTS), strict=False)]

        def taken(serving: Serving, pair: int) -> tuple[float, str]:
            sessions = list(traced_sessions(requests, Shape()))
            result = turns.send(serving, sessions, TRACE_CONCURRENCY, seed=self._options.seed + 2000 + pair)
            return summarise(result).throughput.output_tokens_per_s, ""

        self._pairs(row, turns, taken)

    def _pairs(self, row: Row, turns: Turns, taken: Callable[[Serving, int], tuple[float, str]]) -> None:
        for pair in range(self._options.pairs):
            for serving in order(turns.servers, pair):
                self._measure(row, serving.side.name, pair, partial(taken, serving, pair))

    # --- the scheduler alone

    def _scheduler(self) -> None:
        row = self._row("scheduler", f"scheduler, {SCHEDULER_ROWS:,} decoding requests", "µs a step", "lower")
        peer, script = self._options.peer, self._options.peer_script
        names = [OURS]
        if peer is not None and script is not None:
            names.append(PEER)
        elif peer is not None:
            row.peer_absent = NO_PEER_SCRIPT

        def taken(name: str) -> tuple[float, str]:
            if name == OURS or peer is None or script is None:
                return _our_scheduler_us(), ""
            return _peer_scheduler_us(peer, script, self._options.model), ""

        for pair in range(self._options.pairs):
            for name in order(names, pair):
                self._measure(row, name, pair, partial(taken, name))

    # --- what they share

    def _row(self, section: str, name: str, unit: str, better: str) -> Row:
        row = Row(section, name, unit, better, peer_absent="" if self._options.peer is not None else NO_PEER)
        self._found.rows.append(row)
        return row

    def _measure(self, row: Row, side: str, pair: int, work: Callable[[], tuple[float, str]]) -> None:
        look = Look(row.name, row.unit, side, pair, self._options.pairs, self._options.look_s)
        (row.ours if side == OURS else row.peer).append(measure(self._voice, look, work))

    def _conclude(self) -> Comparison:
        rows = self._found.rows
        self._found.notes += notes_on_others([each.load for row in rows for each in (*row.ours, *row.peer)])
        return Comparison(
            schema=SCHEMA,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            versions=versions_of(self._options.peer, self._found.failures),
            model=self._options.model.name,
            commands={side.name: side.told() for side in self._sides},
            idle_busy_cores=self._found.idle,
            rows=rows,
            ratios={row.name: spread for row in rows if (spread := ratio(row)) is not None},
            notes=self._found.notes,
            failures=self._found.failures,
        )


def _first_token_s(record: RequestRecord) -> float:
    if record.ttft_s is None:
        raise MeasurementFailed(f"round {record.round + 1} gave no token")
    return record.ttft_s


def find_trace(folder: Path | None) -> Path | None:
    """A trace of moderate lengths: chats of a live service before anything else."""
    if folder is None or not folder.is_dir():
        return None
    found = sorted(path for pattern in ("*conv*.csv*", "*.csv*", "*.jsonl*") for path in folder.glob(pattern))
    chats = [path for path in found if "conv" in path.name and ".csv" in path.name]
    return next(iter(chats or found), None)


class _SchedulerTiming(msgspec.Struct):
    us_per_step: float


def _our_scheduler_us() -> float:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        output = Path(folder) / "scheduler.json"
        size = ["--rows", str(SCHEDULER_ROWS), "--steps", str(SCHEDULER_STEPS)]
        command = [sys.executable, "-m", "baton", "bench", "scheduler", *size, "--json", str(output)]
        run_to_end("baton bench scheduler", command, {}, SCHEDULER_LIMIT_S)
        try:
            return msgspec.json.decode(output.read_bytes(), type=_SchedulerTiming).us_per_step
        except (OSError, msgspec.DecodeError) as error:
            raise MeasurementFailed(f"baton bench scheduler wrote no us_per_step: {error}") from error


def _peer_scheduler_us(peer: str, script: Path, model: Path) -> float:
    command = [*shlex.split(peer), "python", str(script), str(model), str(SCHEDULER_ROWS), str(SCHEDULER_STEPS)]
    output = run_to_end("the scheduler benchmark of vLLM", command, {}, SCHEDULER_LIMIT_S)
    told = re.search(r"us_per_step=([0-9.]+)", output)
    if told is None:
        raise MeasurementFailed(f"the scheduler benchmark of vLLM printed no us_per_step:\n{output}")
    return float(told.group(1))
