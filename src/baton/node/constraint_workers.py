"""Processes that build and compile constraints for a front end, so that a schema made to be dear harms nobody.

A worker has limits of memory and of CPU time, which it sets itself: one that exceeds either ends and is replaced. Where the
machine is so busy that it gets no CPU time, it is ended from here, and the client may try again. Tenants take turns, each
with one constraint at work; what waits is bounded. One worker may be started before a constraint is wanted, so that the
first one does not wait for it; the others start with the first constraint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from baton.api.constraint_cache import ConstraintCache, ConstraintRefusal, Outcome
from baton.api.constraint_compiler import CompileMeter, CompileOutcome, NoMeter
from baton.api.constraint_jobs import MaskJob
from baton.api.errors import ApiError, invalid, refused, unsupported
from baton.api.fair_queue import FairQueue, QueueEntry, ShareLimits
from baton.core.engine.request import Constraint
from baton.core.errors import Refusal, RefusalCode
from baton.node.available_memory import available_bytes
from baton.node.constraint_messages import FromWorker, GrammarCompiled, GrammarRefused, MaskComputed
from baton.node.constraint_worker_process import (
    ConstraintsUnsupported,
    WorkerLate,
    WorkerLost,
    WorkerOverLimit,
    WorkerProcess,
    WorkerUnavailable,
    spawned,
)

log = logging.getLogger("baton.constraints")

WORKERS = 2
CPU_S_MAX = 1.0
"""CPU time of one constraint. Real schemas take 20 ms, and few take 100."""
WALL_S_MAX = 10.0
"""For the same by the clock, on a busy machine."""
MASK_TRIES = 4
"""To compute a mask on a machine that is too busy for it."""
MASK_PAUSE_S = 1.0
START_S_MAX = 60.0
"""A worker reads the tokenizer first, which has up to tens of megabytes."""
TENANT_WAITING_BYTES_MAX = 2 << 20
WAITING_BYTES_MAX = 16 << 20
ENTRY_BYTES = 4096
"""Counted for each that waits beside its own bytes, so that their number is bounded too."""
SPARE_BYTES_MIN = 1 << 30
"""Memory that must be left for a worker to start before a constraint is wanted: it holds about 85 MiB, and may take 512 MiB
more for a constraint."""
LATER = "--later"
"""Argument of a worker that nobody waits for."""
_NO_LIMIT = 1 << 62
TOO_COMPLEX = "is too complex: it cannot be compiled within the limits of time and memory"

_Turn = asyncio.Future[None]


class ConstraintTooComplex(Exception):
    """Compiling it exceeds the limits of a worker."""


@dataclass(slots=True, eq=False)
class _Compiling:
    """A constraint that is being compiled, or waits for that."""

    task: asyncio.Task[Outcome]
    entry: QueueEntry[_Turn]
    waiting: int = 0
    """Requests that wait for it."""


class ConstraintWorkers:
    """Implements `api.constraint_compiler.ConstraintCompiler`."""

    def __init__(
        self,
        folder: Path,
        meter: CompileMeter | None = None,
        workers: int = WORKERS,
        cpu_s: float = CPU_S_MAX,
        wall_s: float = WALL_S_MAX,
    ) -> None:
        """`folder` has the model's tokenizer."""
        self._folder = folder
        self._meter = meter or NoMeter()
        self._workers = workers
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._limits = ShareLimits(_NO_LIMIT, 1, workers)
        self._queue: FairQueue[_Turn] = FairQueue()
        self._idle: list[WorkerProcess] = []
        self._starting: list[asyncio.Task[WorkerProcess]] = []
        """Those that nobody waits for yet."""
        self._has_started = False
        self._living: list[WorkerProcess] = []
        """All whose processes have not been seen to end."""
        self._cache = ConstraintCache()
        self._compiling: dict[tuple[str, bytes], _Compiling] = {}
        self.lost = 0
        """Workers that ended without an answer, or were ended."""

    def start_early(self) -> None:
        """Start one worker before a constraint is wanted, unless memory is short. It leaves the processor to others until it
        is ready."""
        spare = available_bytes()
        if spare is not None and spare < SPARE_BYTES_MIN:
            log.info("memory is short (%d MiB left): constraints are compiled by processes that start later", spare >> 20)
            return
        self._starting.append(asyncio.create_task(self._started(LATER)))

    async def compile(self, tenant: str, job: bytes, param: str) -> Constraint | None:
        key = tenant, blake2b(job, digest_size=32).digest()
        is_shared = key in self._compiling or self._cache.get(*key) is not None
        try:
            outcome = await self._outcome(key, job)
        except ConstraintTooComplex:
            self._meter.count_constraint(CompileOutcome.TOO_COMPLEX)
            raise invalid(param, f"'{param}' {TOO_COMPLEX}", "constraint_too_complex") from None
        except ConstraintsUnsupported as reason:
            self._meter.count_constraint(CompileOutcome.UNAVAILABLE)
            log.error("constraints cannot be compiled for this model: %s", reason)
            raise unsupported(param, f"'{param}' is not supported: {reason}") from None
        except WorkerUnavailable as reason:
            self._meter.count_constraint(CompileOutcome.UNAVAILABLE)
            log.error("a constraint could not be compiled: %s", reason)
            raise _try_again("the constraint could not be compiled now, which is no fault of it", "unavailable") from None
        except ApiError:
            self._meter.count_constraint(CompileOutcome.BUSY)
            raise
        if isinstance(outcome, ConstraintRefusal):
            self._meter.count_constraint(CompileOutcome.REFUSED)
            raise invalid(outcome.field or param, outcome.message, "unsupported_constraint")
        self._meter.count_constraint(CompileOutcome.CACHED if is_shared else CompileOutcome.COMPILED)
        return outcome if outcome.source else None

    async def mask_digest(self, constraint: Constraint, outputs: Sequence[int]) -> bytes:
        """Digest of the mask after these outputs. Empty where this front end has another version of the constraint's backend
        than the answer began under, or cannot compute it. Then any version that permits the outputs goes on, and may draw
        other tokens: so a machine that is merely busy is asked again."""
        job = MaskJob(constraint.backend, constraint.began_under, constraint.source, tuple(outputs)).encode()
        for tries_left in reversed(range(MASK_TRIES)):
            try:
                return await self._digest(job)
            except WorkerUnavailable as reason:
                log.warning("a constraint could not be compared (%d more tries): %s", tries_left, reason)
            except (ConstraintTooComplex, ConstraintsUnsupported) as reason:
                log.warning("a constraint cannot be compared with those of instances of another version: %s", reason)
                return b""
            await asyncio.sleep(MASK_PAUSE_S if tries_left else 0.0)
        return b""

    async def _digest(self, job: bytes) -> bytes:
        entry = QueueEntry("", len(job) + ENTRY_BYTES, asyncio.get_running_loop().create_future())
        self._queue.put(entry)
        answer = await self._answered(entry, job)
        return answer if isinstance(answer, bytes) else b""

    async def close(self) -> None:
        """End all workers."""
        tasks = [*(one.task for one in self._compiling.values()), *self._starting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._living:
            worker.kill()
        await asyncio.gather(*(worker.process.wait() for worker in self._living))
        self._idle, self._starting, self._living = [], [], []

    async def _outcome(self, key: tuple[str, bytes], job: bytes) -> Outcome:
        """Raises an ApiError where too much waits."""
        if (known := self._cache.get(*key)) is not None:
            return known
        compiling = self._compiling.get(key)
        if compiling is None:
            compiling = self._begin(key, job)
        compiling.waiting += 1
        try:
            # Shielded: others may wait for the same constraint, and a worker that is asked must be heard.
            return await asyncio.shield(compiling.task)
        finally:
            compiling.waiting -= 1
            if not compiling.waiting:
                self._drop_queued(key, compiling)

    def _begin(self, key: tuple[str, bytes], job: bytes) -> _Compiling:
        tenant, _ = key
        self._check_room(tenant, len(job))
        entry = QueueEntry(tenant, len(job) + ENTRY_BYTES, asyncio.get_running_loop().create_future())
        self._queue.put(entry)
        compiling = _Compiling(asyncio.create_task(self._compiled(entry, job)), entry)
        self._compiling[key] = compiling
        compiling.task.add_done_callback(lambda done: self._ended(key, done))
        return compiling

    def _drop_queued(self, key: tuple[str, bytes], compiling: _Compiling) -> None:
        """Nobody waits for it any more. One that is being compiled goes on: it ends soon, and its worker must be heard."""
        if self._queue.drop(compiling.entry):
            del self._compiling[key]
            compiling.task.cancel()

    def _ended(self, key: tuple[str, bytes], task: asyncio.Task[Outcome]) -> None:
        compiling = self._compiling.get(key)
        if compiling is not None and compiling.task is task:
            del self._compiling[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.put(*key, task.result())
            self._meter.note_constraints_held(self._cache.size_bytes)

    def _check_room(self, tenant: str, size: int) -> None:
        own = self._queue.waiting_weight_of(tenant)
        if own and own + size > TENANT_WAITING_BYTES_MAX:
            raise refused(Refusal(RefusalCode.RATE_LIMITED, "too many constraints of this key wait to be compiled", 1), None)
        everyone = self._queue.waiting_weight
        if everyone and everyone + size > WAITING_BYTES_MAX:
            raise _try_again("too many constraints wait to be compiled", "busy")

    async def _compiled(self, entry: QueueEntry[_Turn], job: bytes) -> Outcome:
        answer = await self._answered(entry, job)
        if isinstance(answer, bytes):
            raise WorkerUnavailable("a worker for constraints answered something else")
        return answer

    async def _answered(self, entry: QueueEntry[_Turn], job: bytes) -> Outcome | bytes:
        began_s = time.perf_counter()
        self._start_next()
        try:
            await entry.item
        except asyncio.CancelledError:
            if not self._queue.drop(entry) and entry.held:
                self._queue.end(entry)
                self._start_next()
            raise
        try:
            return await self._ask(job)
        finally:
            self._meter.observe_constraint(time.perf_counter() - began_s)
            self._queue.end(entry)
            self._start_next()

    async def _ask(self, job: bytes) -> Outcome | bytes:
        """Where a worker ends without an answer, a new one is asked: the system may have ended the first for any reason.
        Twice in a row it is the constraint's, most likely the memory that it takes."""
        try:
            return await self._answer_of(await self._worker(), job)
        except WorkerLost as loss:
            log.warning("a worker ended without an answer, a new one is asked: %s", loss)
        try:
            return await self._answer_of(await self._started(), job)
        except WorkerLost as loss:
            log.warning("a constraint ended two workers: %s", loss)
            self._start_another()
            raise ConstraintTooComplex from None

    async def _answer_of(self, worker: WorkerProcess, job: bytes) -> Outcome | bytes:
        try:
            answer = await worker.ask(job, self._wall_s)
        except WorkerLost:
            self.lost += 1
            raise
        except (WorkerOverLimit, WorkerLate) as loss:
            self.lost += 1
            self._start_another()
            if isinstance(loss, WorkerLate):
                raise WorkerUnavailable(f"a worker for constraints gave {loss}") from None
            log.warning("a constraint took more than %g s of CPU time", self._cpu_s)
            raise ConstraintTooComplex from None
        outcome = _outcome_of(worker, answer)
        self._idle.append(worker)
        return outcome

    def _start_another(self) -> None:
        """In place of one that ended, now, so that the next constraint does not wait for it."""
        self._starting.append(asyncio.create_task(self._started()))

    async def _worker(self) -> WorkerProcess:
        if not self._has_started:  # all at once, so that the next tenant does not wait for a worker to start
            self._has_started = True
            for _ in range(self._workers - len(self._starting)):
                self._start_another()
        while self._idle or self._starting:
            if self._idle:
                worker = self._idle.pop()
            elif _has_failed(task := self._starting.pop(0)):
                continue  # that was then; the next one may start
            else:
                worker = await task
            if worker.process.returncode is None:  # one that waited for long may have been ended by the system
                return worker
        return await self._started()

    async def _started(self, *options: str) -> WorkerProcess:
        self._living = [worker for worker in self._living if worker.process.returncode is None]
        worker = await spawned(self._folder, self._cpu_s, *options)
        self._living.append(worker)
        await worker.begin(START_S_MAX)
        return worker

    def _start_next(self) -> None:
        for entry in self._queue.start(self._limits):
            if not entry.item.done():
                entry.item.set_result(None)


def _has_failed(task: asyncio.Task[WorkerProcess]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _outcome_of(worker: WorkerProcess, answer: FromWorker) -> Outcome | bytes:
    match answer:
        case MaskComputed(digest):
            return digest
        case GrammarCompiled(source):
            return Constraint(worker.backend, worker.version, source)
        case GrammarRefused(field, message):
            return ConstraintRefusal(field, message)
        case _:
            worker.kill()
            raise WorkerUnavailable("a worker for constraints answered something else")


def _try_again(message: str, code: str) -> ApiError:
    return ApiError(503, message, "service_unavailable_error", code=code, headers={"Retry-After": "1"})
