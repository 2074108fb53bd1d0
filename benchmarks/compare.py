"""Baton and vLLM on the same machine, model and load, in interleaved pairs.

Owns what is compared and in which order. One `ComparisonRow` is one measurement taken on both sides in pairs; the ratio is
computed pair by pair, so that slow drift of the machine cancels.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.child_processes import ChildFailed, run_to_end
from baton.bench.client import RequestRecord
from baton.bench.report import summarise
from baton.bench.traces import TraceMalformed, read_trace
from baton.bench.workload import BenchSession, Endpoint, Round, WorkloadShape, traced_sessions
from benchmarks.options import JsonFile, ModelArgument, OurArgs, Pairs, PeerArgs, PeerOption, Seed
from benchmarks.runner import (
    Columns,
    Experiment,
    Measured,
    MeasuredSide,
    MeasurementFailed,
    Progress,
    Rounds,
    Spread,
    model_folder,
    notes_on_other_load,
    print_remarks,
    ratio_of,
    run_benchmark,
    shown_ratio,
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
    our_command,
    peer_command,
    server,
    servers_in_turn,
    start_servers,
    versions_of,
)

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
    """Seconds for which other load is sampled before each run."""


class ComparisonRow(msgspec.Struct):
    section: str
    name: str
    unit: str
    better: str
    """"higher" or "lower"."""
    ours: list[Measured] = []
    peer: list[Measured] = []
    ours_absent: str = ""
    """Why there are no values for Baton."""
    peer_absent: str = ""

    def values(self, side: str) -> list[Measured]:
        return self.ours if side == OURS else self.peer

    @property
    def ratio(self) -> Spread | None:
        """Baton ÷ peer."""
        return ratio_of(self.ours, self.peer)


class Comparison(ServerReport, kw_only=True):
    commands: dict[str, str]
    """Command line of each server, with its environment."""
    idle_busy_cores: dict[str, float]
    rows: list[ComparisonRow]
    ratios: dict[str, Spread]


SERVING_LOADS = (ServingLoad(64, 128, 64), ServingLoad(16, 512, 128))
SEEDS_A_LOAD = 100
"""Distance of seeds between loads, since prompts of one seed share their beginning."""


@dataclass(slots=True)
class _Findings:
    rows: list[ComparisonRow] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def sides_of(options: CompareOptions) -> list[ServerCommand]:
    """Commands of Baton and, if configured, of the peer."""
    shape = ServerShape(options.model)
    sides = [our_command(shape, options.our_args)]
    if options.peer is not None:
        sides.append(peer_command(shape, options.peer, options.peer_args))
    return sides


class Compare:
    def __init__(self, options: CompareOptions, sides: Sequence[ServerCommand], progress: Progress) -> None:
        self._options = options
        self._sides = sides
        self._progress = progress
        self._rounds = Rounds(progress, options.pairs, options.look_s)
        self._found = _Findings()

    @property
    def measurements(self) -> int:
        """Number of planned measurements."""
        rows = sum(len(SERVING_LOADS) if section is Section.SERVING else 1 for section in self._options.sections)
        return rows * self._options.pairs * max(1, len(self._sides))

    def run(self) -> Comparison:
        """Run the requested sections. A failed section is reported, and the next one still runs."""
        sections = self._options.sections
        # Servers first: start-up is timed after each side has started once and filled its caches.
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
            self._progress.say(f"{name} failed: {error}")

    # --- from the command to the first token

    def _startup(self) -> None:
        row = self._row("startup", "command to first token", "s", "lower")

        def taken(side: ServerCommand, _pair: int) -> tuple[float, str]:
            with server(side) as serving:
                return serving.first_token_s, ""

        self._measure(row, {side.name: partial(taken, side) for side in self._sides})

    # --- both servers up, one loaded at a time

    def _with_servers(self) -> None:
        with contextlib.ExitStack() as stack:
            servers = start_servers(stack, self._sides, self._progress)
            turns, idle = servers_in_turn(servers, self._progress, self._options.seed + WARM_UP_SEED)
            self._found.idle |= idle
            sections = self._options.sections
            if Section.SERVING in sections:
                for load in SERVING_LOADS:
                    self._guard(load.name, partial(self._serving, turns, load))
            if Section.PREFIX in sections:
                self._guard("prefix", lambda: self._prefix(turns))
            if Section.TRACE in sections:
                self._guard("trace", lambda: self._trace(turns))

    def _serving(self, turns: ServersInTurn, load: ServingLoad) -> None:
        row = self._row("serving", load.name, "output tokens/s", "higher")

        def taken(serving: RunningServer, pair: int) -> tuple[float, str]:
            # Another seed for each load and pair: equal work on both sides, and nothing cached.
            seed = self._options.seed + 1 + pair + SEEDS_A_LOAD * SERVING_LOADS.index(load)
            summary = summarise(turns.run(serving, load, seed))
            first = summary.latency.ttft_ms
            detail = f"TTFT p50 {first.p50:,.0f} ms" if first is not None else ""
            return summary.throughput.output_tokens_per_s, detail

        self._pairs(row, turns, taken)

    def _prefix(self, turns: ServersInTurn) -> None:
        row = self._row("prefix", f"second turn of a {CHAT_TOKENS:,}-token chat, TTFT ÷ the first turn's", "", "lower")

        def taken(serving: RunningServer, pair: int) -> tuple[float, str]:
            rounds = (Round(CHAT_TOKENS, CHAT_ANSWER_TOKENS), Round(CHAT_NEXT_TOKENS, CHAT_ANSWER_TOKENS))
            session = BenchSession(index=pair, rounds=rounds)
            result = turns.send(serving, [session], concurrency=1, seed=self._options.seed + 1000, endpoint=Endpoint.CHAT)
            first_s, second_s = (_first_token_s(record) for record in result.records)
            tokens = result.records[0].prompt_tokens
            return second_s / first_s, f"{tokens:,} tokens: {first_s * 1000:,.0f} ms, then {second_s * 1000:,.0f} ms"

        self._pairs(row, turns, taken)

    def _trace(self, turns: ServersInTurn) -> None:
        trace = find_chat_trace(self._options.traces)
        if trace is None:
            self._found.notes.append(f"trace: {NO_TRACES}")
            return
        row = self._row("trace", f"{TRACE_REQUESTS} requests of {trace.name}", "output tokens/s", "higher")
        fitting = (r for r in read_trace(trace) if r.input_tokens + r.output_tokens <= TRACE_TOKENS_MAX)
        requests = [request for request, _ in zip(fitting, range(TRACE_REQUESTS), strict=False)]

        def taken(serving: RunningServer, pair: int) -> tuple[float, str]:
            sessions = list(traced_sessions(requests, WorkloadShape()))
            result = turns.send(serving, sessions, TRACE_CONCURRENCY, seed=self._options.seed + 2000 + pair)
            return summarise(result).throughput.output_tokens_per_s, ""

        self._pairs(row, turns, taken)

    def _pairs(
        self, row: ComparisonRow, turns: ServersInTurn, taken: Callable[[RunningServer, int], tuple[float, str]]
    ) -> None:
        self._measure(row, {serving.side.name: partial(taken, serving) for serving in turns.servers})

    # --- the scheduler alone

    def _scheduler(self) -> None:
        row = self._row("scheduler", f"scheduler, {SCHEDULER_ROWS:,} decoding requests", "µs a step", "lower")
        peer, script = self._options.peer, self._options.peer_script
        names = [OURS]
        if peer is not None and script is not None:
            names.append(PEER)
        elif peer is not None:
            row.peer_absent = NO_PEER_SCRIPT

        def taken(name: str, _pair: int) -> tuple[float, str]:
            if name == OURS or peer is None or script is None:
                return _our_scheduler_us(), ""
            return _peer_scheduler_us(peer, script, self._options.model), ""

        self._measure(row, {name: partial(taken, name) for name in names})

    # --- what they share

    def _row(self, section: str, name: str, unit: str, better: str) -> ComparisonRow:
        row = ComparisonRow(section, name, unit, better, peer_absent="" if self._options.peer is not None else NO_PEER)
        self._found.rows.append(row)
        return row

    def _measure(self, row: ComparisonRow, sides: dict[str, Callable[[int], tuple[float, str]]]) -> None:
        measured = [MeasuredSide(name, take, row.values(name)) for name, take in sides.items()]
        self._rounds.compare(row.name, row.unit, measured)

    def _conclude(self) -> Comparison:
        rows = self._found.rows
        self._found.notes += notes_on_other_load(self._rounds.loads)
        return Comparison(
            versions=versions_of(self._options.peer, self._found.failures),
            model=self._options.model.name,
            commands={side.name: side.shell_line() for side in self._sides},
            idle_busy_cores=self._found.idle,
            rows=rows,
            ratios={row.name: spread for row in rows if (spread := row.ratio) is not None},
            notes=self._found.notes,
            failures=self._found.failures,
        )


def _first_token_s(record: RequestRecord) -> float:
    if record.ttft_s is None:
        raise MeasurementFailed(f"round {record.round + 1} gave no token")
    return record.ttft_s


def find_chat_trace(folder: Path | None) -> Path | None:
    """A trace of moderate lengths; chats of a live service are preferred."""
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
        command = [sys.executable, "-m", "benchmarks", "scheduler", *size, "--json", str(output)]
        run_to_end("benchmarks scheduler", command, {}, SCHEDULER_LIMIT_S)
        try:
            return msgspec.json.decode(output.read_bytes(), type=_SchedulerTiming).us_per_step
        except (OSError, msgspec.DecodeError) as error:
            raise MeasurementFailed(f"benchmarks scheduler wrote no us_per_step: {error}") from error


def _peer_scheduler_us(peer: str, script: Path, model: Path) -> float:
    command = [*shlex.split(peer), "python", str(script), str(model), str(SCHEDULER_ROWS), str(SCHEDULER_STEPS)]
    output = run_to_end("the scheduler benchmark of vLLM", command, {}, SCHEDULER_LIMIT_S)
    found = re.search(r"us_per_step=([0-9.]+)", output)
    if found is None:
        raise MeasurementFailed(f"the scheduler benchmark of vLLM printed no us_per_step:\n{output}")
    return float(found.group(1))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


PeerScript = Annotated[
    Path | None,
    typer.Option(envvar="BATON_PEER_SCHEDULER", exists=True, dir_okay=False, help="Script that times vLLM's scheduler."),
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Folder of request traces; absent: skipped.")
]
SectionNames = Annotated[list[Section] | None, typer.Option("--section", help="Only this part; repeat for more [all].")]


def compare(
    model: ModelArgument = "smollm2",
    peer: PeerOption = None,
    peer_scheduler_script: PeerScript = None,
    traces: TracesFolder = None,
    section: SectionNames = None,
    pairs: Pairs = 3,
    our_args: OurArgs = "",
    peer_args: PeerArgs = "",
    seed: Seed = 0,
    json_file: JsonFile = Path("bench-results/compare.json"),
) -> None:
    """Measure Baton beside vLLM on this machine: start-up, serving, prefix cache, a trace, the scheduler.

    Starts both servers itself, takes turns, prints the spread and what else the machine was doing. Takes about fifteen
    minutes on two cores; --section and --pairs make it shorter. Ctrl-C stops everything that was started.
    """

    def prepare(progress: Progress) -> Experiment[Comparison]:
        sections = tuple(section or Section)
        options = CompareOptions(
            model_folder(model, progress), peer, peer_scheduler_script, traces, sections, pairs, our_args, peer_args, seed
        )
        work = Compare(options, sides_of(options), progress)
        return Experiment(work.measurements, work.run)

    run_benchmark(prepare, show, json_file)


def show(console: Console, comparison: Comparison) -> None:
    columns: Columns[ComparisonRow] = (
        ("measurement", lambda row: f"{row.name}, {row.unit}" if row.unit else row.name),
        ("Baton", lambda row: shown_values(row.ours, row.ours_absent)),
        ("vLLM", lambda row: shown_values(row.peer, row.peer_absent)),
        ("Baton / vLLM", lambda row: shown_ratio(row.ratio)),
        ("better", lambda row: row.better),
    )
    console.print(table_of(comparison.title, columns, comparison.rows))
    print_remarks(console, comparison)
