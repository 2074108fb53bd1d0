"""Workers that are lost, late or not to be had: what is our own trouble is no error of the client."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.wanted import ConstraintKind
from baton.api.errors import ApiError
from baton.core.engine.request import Constraint
from baton.node import constraint_workers
from baton.node.constraint_messages import FromWorker
from baton.node.constraint_worker_process import WorkerProcess
from baton.node.constraint_workers import ConstraintWorkers
from baton.node.scripted_text import write_byte_tokenizer

LONG_S = 60.0


def regex(pattern: str) -> bytes:
    return ConstraintJob(ConstraintKind.REGEX, pattern, "field").encode()


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[ConstraintWorkers]:
    write_byte_tokenizer(tmp_path)
    made = ConstraintWorkers(tmp_path, cpu_s=LONG_S, wall_s=LONG_S)
    yield made
    await made.close()


async def refusal_of(workers: ConstraintWorkers, job: bytes) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        await workers.compile("a", job, "field")
    return refusal.value


def killed_when_asked(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The system ends a worker as soon as it has a job, so many times."""
    ask, left = WorkerProcess.ask, [None] * times

    async def asked(self: WorkerProcess, payload: bytes, limit_s: float) -> FromWorker:
        if left:
            left.pop()
            self.kill()
        return await ask(self, payload, limit_s)

    monkeypatch.setattr(WorkerProcess, "ask", asked)


async def test_idle_workers_that_the_system_ended_are_no_error(workers: ConstraintWorkers) -> None:
    await workers.compile("a", regex("first"), "field")
    await asyncio.gather(*workers._starting)
    for worker in workers._living:
        worker.kill()  # nobody has seen them end yet
    assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint)


async def test_a_worker_that_is_ended_while_it_compiles_is_replaced_and_asked_again(
    workers: ConstraintWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_when_asked(monkeypatch, times=1)
    assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint)
    assert workers.lost == 1


async def test_a_constraint_that_ends_two_workers_is_too_complex(
    workers: ConstraintWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_when_asked(monkeypatch, times=2)
    refusal = await refusal_of(workers, regex("x"))
    assert (refusal.status, refusal.code, refusal.param) == (400, "constraint_too_complex", "field")
    assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint), "it was not remembered as refused"


async def test_where_no_process_can_be_started_the_client_may_try_again(
    workers: ConstraintWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_process(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", no_process)
        refusal = await refusal_of(workers, regex("x"))
    assert (refusal.status, refusal.code, refusal.param) == (503, "unavailable", None)
    assert refusal.headers["Retry-After"] == "1"
    assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint), "failures of then are not of now"


async def test_where_a_worker_starts_too_slowly_the_client_may_try_again(
    workers: ConstraintWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constraint_workers, "START_S_MAX", 0)
        refusal = await refusal_of(workers, regex("x"))
    assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")
    assert isinstance(await workers.compile("a", regex("x"), "field"), Constraint)


async def test_a_worker_that_gets_no_processor_is_ended_and_the_client_may_try_again(
    workers: ConstraintWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is busy with other work, for longer than a client is kept waiting."""
    stop_when_asked(monkeypatch)
    workers._wall_s = 0.5
    refusal = await refusal_of(workers, regex("x"))
    assert (refusal.status, refusal.code, refusal.headers["Retry-After"]) == (503, "unavailable", "1")


def stop_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = WorkerProcess.ask

    async def asked(self: WorkerProcess, payload: bytes, limit_s: float) -> FromWorker:
        self.process.send_signal(signal.SIGSTOP)
        return await ask(self, payload, limit_s)

    monkeypatch.setattr(WorkerProcess, "ask", asked)


async def test_time_that_a_worker_waits_for_the_processor_does_not_count(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    workers = ConstraintWorkers(tmp_path, workers=1, cpu_s=1.0, wall_s=LONG_S)
    try:
        await workers.compile("a", regex("first"), "field")
        (worker,) = workers._idle
        worker.process.send_signal(signal.SIGSTOP)
        late = asyncio.create_task(workers.compile("a", regex("x"), "field"))
        await asyncio.sleep(2.0)
        assert not late.done()
        worker.process.send_signal(signal.SIGCONT)
        assert isinstance(await late, Constraint)
        assert workers.lost == 0
    finally:
        await workers.close()


@pytest.mark.parametrize("schema", ['{"multipleOf":1e999}', '{"type":"integer","minimum":-1e999}'])
async def test_numbers_without_end_are_refused_by_a_worker_that_lives_on(workers: ConstraintWorkers, schema: str) -> None:
    refusal = await refusal_of(workers, ConstraintJob(ConstraintKind.JSON_SCHEMA, schema, "field").encode())
    assert (refusal.status, refusal.code) == (400, "unsupported_constraint")
    assert workers.lost == 0
