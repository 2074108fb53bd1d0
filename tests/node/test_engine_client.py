"""The front end's client of an engine: whatever fails between them, no submitter waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.api.engine import EngineDead, TokenStream
from baton.core.engine.progress_watch import ProgressWatch
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.errors import RefusalCode, Refused
from baton.node import engine_client as client_module
from baton.node import engine_process
from baton.node.clock import monotonic_us
from baton.node.engine_client import EngineClient
from baton.node.settings import EngineSettings
from baton.wire.engine_messages import FromEngine, WireError
from baton.wire.recording_file import Recording
from baton.wire.replaying import Replay
from baton.wire.request_table import RequestTable, TableNews


def ask(tokens: int = 4) -> Submission:
    return Submission(RequestId("r"), frozen_tokens([1, 2, 3]), Sampling(seed=0, temperature=0.0), tokens)


def events_of(folder: Path) -> list[str]:
    """Of the only recording in the folder; it must be whole and replay to the same decisions."""
    (path,) = folder.iterdir()
    recording = Recording(path.read_bytes())
    calls = list(Replay(recording).steps())
    assert not recording.is_cut
    assert not [call for call in calls if call.difference]
    return [type(call.arguments[0]).__name__ for call in calls if call.method == "handle"]


@pytest.fixture
async def engine() -> AsyncIterator[EngineClient]:
    made = EngineClient(EngineSettings(endpoint="", model_folder=None, prefix_secret=b"x" * 32, step_ms=1.0))
    await made.start()
    await made.wait_ready()
    yield made
    await made.close()


async def test_a_short_answer_arrives_whole(engine: EngineClient) -> None:
    (stream,) = await engine.submit([ask()])
    bursts = [burst async for burst in stream]
    assert sum(len(burst.tokens) for burst in bursts) == 4
    assert bursts[-1].ended is not None
    assert engine.gauges.stalls == 0


async def test_a_fault_while_receiving_ends_every_open_request(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = await engine.submit([ask(4000)])

    def broken(_: bytes) -> None:
        raise WireError("not a message")

    monkeypatch.setattr(engine_process, "decode_from_engine", broken)
    with pytest.raises(EngineDead, match="cannot talk to the engine"):
        async for _ in stream:
            pass
    with pytest.raises(EngineDead):
        await engine.submit([ask()])


async def test_a_step_that_does_not_end_kills_the_engine_ends_its_requests_and_is_recorded(tmp_path: Path) -> None:
    settings = EngineSettings(
        endpoint="", model_folder=None, prefix_secret=b"x" * 32, step_ms=3_600_000.0, stall_us=1_000_000,
        record_folder=str(tmp_path),
    )  # fmt: skip
    hung = EngineClient(settings)
    await hung.start()
    try:
        await hung.wait_ready()
        assert hung.stall_limit_us == 20 * 3_600_000_000, "as many times the step that was tried"
        hung._process._progress.ready(0, monotonic_us())  # as if it had been a short one
        (stream,) = await hung.submit([ask()])
        with pytest.raises(EngineDead, match="it stalled and was killed; a step has not ended for 1"):
            async for _ in stream:
                pass
        assert (await hung.wait_dead()).startswith("it stalled")
        assert hung.gauges.stalls == 1
        process = hung._process._process
        assert process is not None
        assert await asyncio.wait_for(process.wait(), 20) == -9
    finally:
        await hung.close()
    assert events_of(tmp_path)[:2] == ["Submit", "Tick"]


async def test_closing_waits_while_a_stalled_engine_writes_its_last_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(endpoint="", model_folder=None, prefix_secret=b"x" * 32, step_ms=3_600_000.0)
    hung = EngineClient(replace(settings, stall_us=1_000_000, record_folder=str(tmp_path)))
    written, process = asyncio.Event(), hung._process

    async def recorded(_: object) -> None:
        await written.wait()

    monkeypatch.setattr(process, "_recorded", recorded)
    await hung.start()
    await hung.wait_ready()
    process._progress.ready(0, monotonic_us())  # as if its first step had been a short one
    await hung.submit([ask()])
    await hung.wait_dead()
    closing = asyncio.create_task(hung.close())
    done, _ = await asyncio.wait((closing,), timeout=0.5)
    assert not done, "the engine would end with its standard input"
    written.set()
    await closing


async def test_a_group_too_large_for_one_message_is_refused_and_the_engine_lives(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressWatch, "look", lambda _self, _now_us: None)  # as if silent, and not to be killed for it
    engine._process._progress._heard_us -= 60_000_001
    with monkeypatch.context() as limited:
        limited.setattr(client_module, "FRAME_BYTES_MAX", 100)
        with pytest.raises(Refused, match="at most 100"):
            await engine.submit([ask()])
    assert engine.open_requests == 0
    assert engine.silent_us > 60_000_000, "the engine has not said that"
    (stream,) = await engine.submit([ask()])
    assert [burst async for burst in stream]
    assert engine.silent_us < 60_000_000


async def test_giving_up_ends_open_requests_with_the_reason(engine: EngineClient) -> None:
    (stream,) = await engine.submit([ask(4000)])
    engine.give_up("told to")
    with pytest.raises(EngineDead, match="told to"):
        async for _ in stream:
            pass


async def test_a_submitter_that_leaves_before_the_answer_leaves_nothing_running(engine: EngineClient) -> None:
    leaving = asyncio.create_task(engine.submit([ask(4000)]))
    await asyncio.sleep(0)
    assert engine.open_requests == 1
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await engine.wait_idle()
    assert engine.gauges.scheduler.steps < 1000
    (stream,) = await engine.submit([ask()])
    assert [burst async for burst in stream]


async def test_a_submitter_that_leaves_as_the_answer_comes_leaves_nothing_running(
    engine: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = asyncio.create_task(engine.submit([ask(4000)]))
    take = RequestTable.take

    def leave_now(table: RequestTable, message: FromEngine) -> TableNews:
        leaving.cancel()
        return take(table, message)

    monkeypatch.setattr(RequestTable, "take", leave_now)
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await engine.wait_idle()
    assert engine.gauges.scheduler.steps < 1000


@pytest.mark.parametrize("let_go", [lambda stream: stream.stop(1), lambda stream: stream.abort()], ids=["stop", "abort"])
async def test_after_letting_go_the_end_still_comes(engine: EngineClient, let_go: Callable[[TokenStream], None]) -> None:
    (stream,) = await engine.submit([ask(4000)])
    bursts = []
    async for burst in stream:
        bursts.append(burst)
        let_go(stream)
    assert bursts[-1].ended is not None
    assert sum(len(burst.tokens) for burst in bursts) < 1000
    assert engine.open_requests == 0


async def test_nobody_waits_for_a_dead_engine_to_become_idle(engine: EngineClient) -> None:
    await engine.submit([ask(4000)])
    idle = asyncio.create_task(engine.wait_idle())
    await asyncio.sleep(0)
    engine.give_up("told to")
    await idle
    assert engine.open_requests == 0


async def test_who_comes_after_the_drain_is_told_of_a_drain_and_not_of_a_death(engine: EngineClient) -> None:
    engine.drain()
    await engine.wait_idle()
    engine.give_up("this instance was stopped")
    with pytest.raises(Refused) as refused:
        await engine.submit([ask(4)])
    assert refused.value.refusal.code is RefusalCode.DRAINING
