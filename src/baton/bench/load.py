"""Runs sessions against a server in a closed loop (N at a time) or an open loop (each when due).

Owns concurrency and time, and collects `RunResult`. Bounded everywhere: sessions are drawn lazily, at most
`outstanding_max` are alive, and the whole run ends after `seconds_max` with the rest counted as unsent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from baton.bench.client import BenchRequest, RequestRecord, Sinks, StreamingClient, TargetServer, open_http
from baton.bench.stats import BoundedTimeline, Sample
from baton.bench.workload import BenchSession, Recipe, Round, WorkloadShape, converse, fixed_sessions

RECORDS_MAX = 1_000_000

Progress = Callable[[int, int], None]
"""Called after each request with (requests done, output tokens so far)."""


class LoadTooLarge(Exception):
    """More requests than a run can record."""


@dataclass(frozen=True, slots=True)
class ClosedLoopRate:
    """Always this many sessions at once."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class OpenLoopRate:
    """Each session starts when it is due, unless this many are alive already: then it waits, and the delay is reported."""

    outstanding_max: int


Loop = ClosedLoopRate | OpenLoopRate


@dataclass(frozen=True, slots=True)
class LoadPlan:
    target: TargetServer
    loop: Loop
    recipe: Recipe = field(default_factory=Recipe)
    ask: BenchRequest = field(default_factory=BenchRequest)
    seconds_max: float = 3600.0
    warmup: int = 0
    """Requests of 16 tokens in, 4 out, that are sent first and not measured."""
    tls: ssl.SSLContext | None = None
    """As `open_http` has it."""


@dataclass(slots=True)
class RunResult:
    records: list[RequestRecord] = field(default_factory=list)
    gaps: Sample = field(default_factory=Sample)
    tokens: BoundedTimeline = field(default_factory=BoundedTimeline)
    cut_short: bool = False
    """The time limit ended the run; requests in flight then are recorded as errors of kind `run_ended`."""


class _Run:
    """One run in progress."""

    def __init__(self, plan: LoadPlan, http: aiohttp.ClientSession, progress: Progress) -> None:
        self.result = RunResult()
        self._plan = plan
        self._progress = progress
        self._output_tokens = 0
        sinks = Sinks(gap=self.result.gaps.add, tokens=self.result.tokens.add)
        self._client = StreamingClient(http, plan.target, plan.ask, sinks)

    async def closed(self, sessions: Iterator[BenchSession], concurrency: int) -> None:
        async def work() -> None:
            for session in sessions:  # shared: each worker draws the next one
                await self._session(session, due_s=None)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def open(self, sessions: Iterator[BenchSession], outstanding_max: int) -> None:
        room = asyncio.Semaphore(outstanding_max)

        async def work(session: BenchSession, due_s: float) -> None:
            try:
                await self._session(session, due_s)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                due_s = session.due_s or 0.0
                await asyncio.sleep(max(0.0, due_s - self._client.now_s()))
                await room.acquire()
                group.create_task(work(session, due_s))

    async def _session(self, session: BenchSession, due_s: float | None) -> None:
        conversation = converse(self._client.target.endpoint, self._plan.recipe, session)
        last = len(session.rounds) - 1
        for number, this in enumerate(session.rounds):
            prompt = conversation.ask(number)
            sent_s = self._client.now_s()
            record = RequestRecord(session.index, number, due_s=sent_s if due_s is None else due_s, sent_s=sent_s)
            due_s = None
            self._keep(record)
            reply = await self._client.request(prompt, this.output_tokens, record, keep_reply=number < last)
            self._output_tokens += record.output_tokens
            self._progress(1, self._output_tokens)
            if number < last:
                if reply is None:
                    return  # the next round needs the answer as history
                conversation.add_reply(number, reply)
                await asyncio.sleep(session.think_s)

    def _keep(self, record: RequestRecord) -> None:
        if len(self.result.records) >= RECORDS_MAX:
            raise LoadTooLarge(f"a run keeps at most {RECORDS_MAX} requests; use --limit or --requests")
        self.result.records.append(record)

    def cut(self) -> None:
        """Record requests in flight at the time limit as errors."""
        self.result.cut_short = True
        now_s = self._client.now_s()
        for record in self.result.records:
            if record.end_s == 0.0:
                record.end_s = now_s
                record.error, record.error_message = "run_ended", "in flight at the time limit of the run"


async def run_load(
    plan: LoadPlan, sessions: Iterator[BenchSession], progress: Progress = lambda _done, _tokens: None
) -> RunResult:
    """Send all sessions and wait for the answers. Request failures are in the records; only caller errors raise."""
    connections = plan.loop.concurrency if isinstance(plan.loop, ClosedLoopRate) else plan.loop.outstanding_max
    async with open_http(connections, plan.tls) as http:
        await _warm_up(plan, http)
        run = _Run(plan, http, progress)
        try:
            async with asyncio.timeout(plan.seconds_max):
                match plan.loop:
                    case ClosedLoopRate(concurrency):
                        await run.closed(sessions, concurrency)
                    case OpenLoopRate(outstanding_max):
                        await run.open(sessions, outstanding_max)
        except TimeoutError:
            run.cut()
        except ExceptionGroup as group:
            raise _first_leaf(group) from group
        return run.result


async def _warm_up(plan: LoadPlan, http: aiohttp.ClientSession) -> None:
    if not plan.warmup:
        return
    client = StreamingClient(http, plan.target, plan.ask)
    # Another seed, so that the measured prompts are not in the server's cache.
    recipe = Recipe(seed=plan.recipe.seed + 1_000_003, tokens=plan.recipe.tokens)
    sessions = fixed_sessions(plan.warmup, Round(16, 4), WorkloadShape())
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            prompt = converse(plan.target.endpoint, recipe, session).ask(0)
            record = RequestRecord(session.index, 0, 0.0, 0.0)
            group.create_task(client.request(prompt, 4, record))


def _first_leaf(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, ExceptionGroup) else first
