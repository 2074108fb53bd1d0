"""The cost of a store to the scheduler: one engine with host memory alone, and with stores that are quick, slow or dead.

Owns the load and what is timed. The engine is the real one, all of it in this process: the loop, the worker, the threads
that copy, the threads around the store, and one that waits for steps. Only the model is none: a step is a pause, in which
Python is free, as it is while a real one computes. Times are of the wall, so that whatever other threads do to the loop
(the interpreter's lock, the cores, the memory) is in them.

    plan      Worker.handle(Tick) where it gave a plan
    settle    Worker.handle(StepDone)
    in all    everything that the loop did for one step: both, what it heard from copies and the store, and the giving of
              orders to their threads

The load preempts and saves all the time: many more requests are open than the pool has room for, nothing is reserved for
growth, and prompts come again after host memory has dropped them, so that the store is read, too. Whatever lies outside
the pool is brought back (`always`): a step without a model computes so quickly that it would not be worth it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
import zmq
from rich.console import Console
from rich.table import Table

from baton.bench.machine import OtherLoad, other_load
from baton.bench.stats import median, percentile
from baton.core.config import BringBack, ReservePolicy, TierConfig, WorkerConfig
from baton.core.engine.gauges import SchedulerGauges, StoreTraffic
from baton.core.engine.orders import Submit
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Deliver, Effect, Event, FrontEndLost, Launch, StepDone, Tick, Worker
from baton.core.tiers.transfers import StorageEffect
from baton.executor.contract import ExecutorShape
from baton.executor.counting import STOP_TOKEN, CountingExecutor
from baton.kv.block_access import HostBlocks
from baton.kv.store import Store, open_store
from baton.kv.transfer_contract import KvLayout
from baton.node.clock import monotonic_us
from baton.node.engine import EngineLoop
from baton.node.engine_setup import MaskClock, PacedExecutor
from baton.node.gc_pauses import freeze_gc
from baton.node.inbox import EngineInbox
from baton.node.kv_storage import KvStorage
from benchmarks.options import JsonFile, StoreFolder
from benchmarks.runner import (
    Experiment,
    MeasurementFailed,
    Progress,
    Report,
    Spread,
    alternating,
    notes_on_other_load,
    print_remarks,
    run_benchmark,
    shown_load,
    shown_ratio,
)
from benchmarks.slow_stores import DelayedStore, SilentStore

SLOWER = 100.0
RUN_LIMIT_S = 300.0
VOCABULARY = 1000
PARTS = ("plan", "settle", "in all")


class PassKind(StrEnum):
    """The store behind host memory."""

    NONE = "no store"
    FILE = "file"
    SLOW = "file, 100× slower"
    SILENT = "never answers"


@dataclass(frozen=True, slots=True)
class PassOptions:
    rounds: int = 5
    steps: int = 1000
    """Timed steps of each run."""
    warm_up: int = 200
    rows: int = 128
    """Most requests that run at once."""
    clients: int = 256
    """Open requests."""
    prompt_tokens: int = 256
    answer_tokens: int = 256
    prompts: int = 256
    """Number of distinct prompts."""
    pool_blocks: int = 2560
    host_rows: int = 2560
    block_size: int = 16
    block_bytes: int = 64 << 10
    step_ms: float = 5.0
    folder: Path | None = None
    """Folder of the stores; None: the temporary folder."""
    look_s: float = 1.0


class PassTimes(msgspec.Struct, frozen=True):
    """Microseconds."""

    p50: float
    p99: float


class PassRun(msgspec.Struct, frozen=True):
    kind: PassKind
    round: int
    plan: PassTimes
    settle: PassTimes
    in_all: PassTimes
    steps: int
    took_s: float
    preemptions: int
    saved: int
    loaded: int
    stored: int
    fetched: int
    late: int
    breaker_opened: int
    load: OtherLoad


class PassReport(Report, kw_only=True):
    settings: dict[str, str | int | float]
    runs: list[PassRun]

    def of(self, kind: PassKind) -> list[PassRun]:
        """Runs of one kind, by round."""
        return [run for run in self.runs if run.kind is kind]

    def ratios(self, kind: PassKind, part: str, which: str) -> Spread:
        """Time ÷ that without a store in the same round."""
        pairs = zip(self.of(kind), self.of(PassKind.NONE), strict=True)
        return Spread.of([value(run, part, which) / value(without, part, which) for run, without in pairs])


def value(run: PassRun, part: str, which: str) -> float:
    times = {"plan": run.plan, "settle": run.settle, "in all": run.in_all}[part]
    return {"p50": times.p50, "p99": times.p99}[which]


# ── what is timed ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class PassTimer:
    plan_us: list[float] = field(default_factory=list)
    settle_us: list[float] = field(default_factory=list)
    in_all_us: list[float] = field(default_factory=list)
    """One value per step."""
    _open_us: float = 0.0
    """Cost so far of the step that is planned next."""

    def handled(self, event: Event, effects: list[Effect], spent_us: float) -> None:
        self._open_us += spent_us
        if isinstance(event, StepDone):
            self.settle_us.append(spent_us)
        elif isinstance(event, Tick) and any(isinstance(effect, Launch) for effect in effects):
            self.plan_us.append(spent_us)
            self.in_all_us.append(self._open_us)
            self._open_us = 0.0

    def ordered(self, spent_us: float) -> None:
        self._open_us += spent_us


class TimedWorker(Worker):
    """A Worker that times each call and counts ended requests."""

    def __init__(self, config: WorkerConfig, prefix: PrefixIndex) -> None:
        super().__init__(config, prefix)
        self.meter = PassTimer()
        self.ended = 0

    def handle(self, event: Event, now_us: int) -> list[Effect]:
        began_ns = time.perf_counter_ns()
        effects = super().handle(event, now_us)
        self.meter.handled(event, effects, (time.perf_counter_ns() - began_ns) / 1000)
        self.ended += sum(len(effect.settled.ended) for effect in effects if isinstance(effect, Deliver))
        return effects


@dataclass(frozen=True, slots=True)
class TimedStorage:
    storage: KvStorage
    meter: PassTimer

    def carry_out(self, effect: StorageEffect) -> None:
        began_ns = time.perf_counter_ns()
        self.storage.carry_out(effect)
        self.meter.ordered((time.perf_counter_ns() - began_ns) / 1000)

    def traffic(self) -> StoreTraffic:
        return self.storage.traffic()


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PassEngine:
    """One engine without a model, and its clients."""

    def __init__(self, options: PassOptions, store: Store | None, front: zmq.Socket[bytes], back: zmq.Socket[bytes]) -> None:
        self._options = options
        self._front = front
        config = _config(options, store is not None)
        shape = ExecutorShape(config.slots, config.blocks, config.block_size, config.context_tokens)
        # No answer ends before its limit.
        executor = CountingExecutor(shape, lambda _seed: options.answer_tokens + 1)
        layout = KvLayout(executor.fingerprint, "bytes", config.block_size, (options.block_bytes,))
        pool = np.zeros((config.blocks, options.block_bytes), dtype=np.uint8)
        pool[:] = 1  # mapped now, and not while something is timed
        self._inbox = EngineInbox()
        self._storage = KvStorage(HostBlocks(pool), layout, options.host_rows, store, self._inbox.put)
        self.worker = TimedWorker(config, PrefixIndex(b"bench", executor.fingerprint, config.blocks))
        step_s = options.step_ms / 1000
        paced = PacedExecutor(executor, step_s, MaskClock(step_s))
        timed = TimedStorage(self._storage, self.worker.meter)
        self._loop = EngineLoop(self.worker, paced, back, self._inbox, storage=timed)
        self._draws = np.random.default_rng(0)
        self._sent = 0

    def go_on(self, steps: int) -> None:
        """Run until `steps` more steps were planned."""
        meter, until_s = self.worker.meter, time.perf_counter() + RUN_LIMIT_S
        upto = len(meter.plan_us) + steps
        while len(meter.plan_us) < upto:
            if time.perf_counter() > until_s:
                raise MeasurementFailed(f"{steps} steps were not planned within {RUN_LIMIT_S:g} s")
            self._ask()
            self._loop.turn()
            self._read()

    def close(self) -> None:
        """End all requests first, so that threads working on a step can report it."""
        self.worker.handle(FrontEndLost(), monotonic_us())
        while self.worker.scheduler.in_flight:
            self._loop.turn()
            self._read()
        self._storage.close()
        self._inbox.close()

    def _ask(self) -> None:
        options = self._options
        while self._sent - self.worker.ended < options.clients:
            which = int(self._draws.integers(options.prompts))
            prompt = frozen_tokens(np.random.default_rng([1, which]).integers(10, VOCABULARY, size=options.prompt_tokens))
            sampling = Sampling(seed=0, temperature=0.0, stop_token_ids=(STOP_TOKEN,))
            submission = Submission(RequestId(str(self._sent)), prompt, sampling, options.answer_tokens)
            self.worker.handle(Submit(self._sent, (submission,)), monotonic_us())
            self._sent += 1

    def _read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._front.recv(zmq.NOBLOCK)


def _config(options: PassOptions, has_store: bool) -> WorkerConfig:
    return WorkerConfig(
        slots=options.rows,
        blocks=options.pool_blocks,
        block_size=options.block_size,
        context_tokens=options.prompt_tokens + options.answer_tokens,
        waiting_max=options.clients,
        reserve=ReservePolicy.NONE,
        tiers=TierConfig(host_rows=options.host_rows, store=has_store, bring_back=BringBack.ALWAYS),
    )


def store_of(kind: PassKind, folder: str) -> Store | None:
    """An empty store."""
    if kind is PassKind.NONE:
        return None
    store = open_store(f"file:{folder}")
    if kind is PassKind.FILE:
        return store
    return SilentStore(store) if kind is PassKind.SILENT else DelayedStore(store, SLOWER)


@contextlib.contextmanager
def engine_of(options: PassOptions, kind: PassKind) -> Iterator[PassEngine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(prefix="baton-passes-", dir=options.folder) as folder:
        back, front = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        back.bind("inproc://passes")
        front.connect("inproc://passes")
        store = store_of(kind, folder)
        engine = PassEngine(options, store, front, back)
        try:
            yield engine
        finally:
            if isinstance(store, DelayedStore):
                store.release()
            engine.close()
            context.destroy(0)


def time_passes(options: PassOptions, kind: PassKind, number: int) -> PassRun:
    load = other_load(options.look_s)
    with engine_of(options, kind) as engine:
        freeze_gc()
        engine.go_on(options.warm_up)
        before, meter = engine.worker.gauges(), engine.worker.meter
        plans, settles = len(meter.plan_us), len(meter.settle_us)
        began_s = time.perf_counter()
        engine.go_on(options.steps)
        took_s = time.perf_counter() - began_s
        after = engine.worker.gauges()
    gc.unfreeze()
    was, now = before.storage, after.storage
    return PassRun(
        kind=kind,
        round=number,
        plan=_times(meter.plan_us[plans:]),
        settle=_times(meter.settle_us[settles:]),
        in_all=_times(meter.in_all_us[plans:]),
        steps=options.steps,
        took_s=took_s,
        preemptions=_preemptions(after) - _preemptions(before),
        saved=now.saved - was.saved,
        loaded=now.loaded - was.loaded,
        stored=now.stored - was.stored,
        fetched=now.fetched - was.fetched,
        late=now.late,
        breaker_opened=now.breaker_opened,
        load=load,
    )


def _preemptions(gauges: SchedulerGauges) -> int:
    return gauges.preemptions_for_others + gauges.preemptions_of_self


def _times(spent_us: list[float]) -> PassTimes:
    ordered = sorted(spent_us)
    return PassTimes(percentile(ordered, 0.5), percentile(ordered, 0.99))


def measure(options: PassOptions, progress: Progress) -> PassReport:
    """Measure every kind once a round, in turns."""
    runs: list[PassRun] = []
    for number, kind in alternating(list(PassKind), options.rounds):
        what = f"round {number + 1} of {options.rounds}, {kind}"
        progress.doing(what)
        runs.append(time_passes(options, kind, number))
        progress.say(f"{what}: {describe_run(runs[-1])}")
        progress.done()
    settings: dict[str, str | int | float] = {
        name: text for name, text in asdict(options).items() if isinstance(text, int | float)
    }
    return PassReport(settings=settings, runs=runs, notes=notes_on_other_load([run.load for run in runs]))


def describe_run(run: PassRun) -> str:
    parts = (("plan", run.plan), ("settle", run.settle), ("in all", run.in_all))
    times = ", ".join(f"{name} {each.p50:,.0f} / {each.p99:,.0f} µs" for name, each in parts)
    counts = f"{run.preemptions} preemptions, {run.saved} saved, {run.stored} stored, {run.fetched} fetched"
    return f"{times}; {counts}  [{shown_load(run.load)}]"


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


RoundCount = Annotated[int, typer.Option(min=1, max=100, help="How often each is measured, in turns.")]
Steps = Annotated[int, typer.Option(min=100, max=1_000_000, help="Steps to time in each run.")]
Check = Annotated[bool, typer.Option(help="Exit 1 when a store costs more than 10 % at p50 or 50 % at p99.")]
# Hidden: another load is another benchmark. It is there to try the command out quickly.
Rows = Annotated[int, typer.Option(min=8, max=4096, hidden=True)]


def passes(
    rounds: RoundCount = 5,
    steps: Steps = 1000,
    folder: StoreFolder = None,
    check: Check = False,
    rows: Rows = 128,
    json_file: JsonFile = Path("bench-results/passes.json"),
) -> None:
    """Time scheduler passes while KV is saved all the time: without a store, with one, with a slow and with a dead one.

    The engine is the real one, without a model. Takes about three minutes.
    """
    options = _sized(replace(PassOptions(), rounds=rounds, steps=steps, folder=folder), rows)
    with _errors_only("baton.store"):
        report = run_benchmark(
            lambda progress: Experiment(rounds * len(PassKind), lambda: measure(options, progress)), show, json_file
        )
    if check and missed(report):
        raise typer.Exit(1)


@contextlib.contextmanager
def _errors_only(logger: str) -> Iterator[None]:
    """Hide warnings of that logger, which reports failing stores; two of these fail on purpose."""
    ours = logging.getLogger(logger)
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        ours.setLevel(before)


def _sized(options: PassOptions, rows: int) -> PassOptions:
    """Scale blocks and clients with the rows."""
    each = options.pool_blocks // options.rows
    return replace(options, rows=rows, clients=2 * rows, pool_blocks=each * rows, host_rows=each * rows)


LIMITS = {"p50": 1.10, "p99": 1.50}
"""Largest allowed ratio to the time without a store."""
COUNTED: dict[str, Callable[[PassRun], float]] = {
    "preempted": lambda run: run.preemptions,
    "blocks saved": lambda run: run.saved,
    "loaded": lambda run: run.loaded,
    "stored": lambda run: run.stored,
    "fetched": lambda run: run.fetched,
    "late": lambda run: run.late,
    "given up": lambda run: run.breaker_opened,
    "steps/s": lambda run: run.steps / run.took_s,
}


def show(console: Console, report: PassReport) -> None:
    settings, machine = report.settings, report.machine
    title = (
        f"scheduler passes beside a store, {machine['cpu']}, {machine['cores']} cores\n"
        f"{settings['rows']} rows, {settings['clients']} requests open "
        f"({settings['prompt_tokens']} in, {settings['answer_tokens']} out), "
        f"pool {settings['pool_blocks']:,} and host {settings['host_rows']:,} "
        f"blocks of {int(settings['block_bytes']) >> 10} KiB, "
        f"steps of {settings['step_ms']:g} ms; {settings['rounds']} rounds of {settings['steps']:,} steps"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("behind host memory")
    table.add_column("µs of")
    for name in ("p50", "÷ no store", "p99", "÷ no store", *COUNTED):
        table.add_column(name, justify="right")
    for kind in PassKind:
        for part in PARTS:
            first = part == PARTS[0]
            counts = _counts(report.of(kind)) if first else []
            table.add_row(
                kind if first else "", part, *_shown_times(report, kind, part), *counts, end_section=part == PARTS[-1]
            )
    console.print(table)
    legend = "Medians of the rounds; ratios are taken within a round (smallest – largest). Counts are of one run."
    print_remarks(console, report, legend)
    for note in missed(report):
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def missed(report: PassReport) -> list[str]:
    """One line for each plan or settle time beyond its limit."""
    found = []
    for kind in (kind for kind in PassKind if kind is not PassKind.NONE):
        for part in ("plan", "settle"):
            for which, limit in LIMITS.items():
                middle = report.ratios(kind, part, which).median
                if middle > limit:
                    found.append(f"{kind}: {part} {which} is {middle:.2f} of no store, and may be {limit:.2f}")
    return found


def _shown_times(report: PassReport, kind: PassKind, part: str) -> list[str]:
    cells = []
    for which in LIMITS:
        cells.append(f"{median([value(run, part, which) for run in report.of(kind)]):,.0f}")
        cells.append("" if kind is PassKind.NONE else shown_ratio(report.ratios(kind, part, which)))
    return cells


def _counts(runs: list[PassRun]) -> list[str]:
    return [f"{median([read(run) for run in runs]):,.0f}" for read in COUNTED.values()]
