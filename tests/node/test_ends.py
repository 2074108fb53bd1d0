"""Ends of requests and gauges of the core reach the HTTP surface unchanged, over the real wire format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from baton.api.engine import StreamEnd
from baton.core.engine.blocks import BlockGauges
from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.gauges import DraftGauges, HandoverGauges, SchedulerGauges, StorageGauges, StoreTraffic
from baton.core.engine.orders import Accepted
from baton.core.engine.request import FinishReason, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.node.engine_client import EngineClient
from baton.node.settings import EngineSettings
from baton.wire.engine_messages import (
    WIRE_VERSION,
    DrainBegun,
    FromEngine,
    ReadyMessage,
    StepOutput,
    decode_from_engine,
    encode_from_engine,
    ended_output,
)

GAUGES = SchedulerGauges(
    running=1,
    waiting=2,
    free_blocks=3,
    evictable_blocks=4,
    running_blocks=5,
    leased_blocks=6,
    receiving_blocks=7,
    leaving_blocks=8,
    reserve_ratio=0.5,
    handovers=HandoverGauges(peers=1, open=2, made=3, refused=4, not_delivered=5, preempted=6, timed_out=7),
    storage=StorageGauges(40, 9, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2),
)


@pytest.fixture
async def engine() -> AsyncIterator[EngineClient]:
    """Without a process: the test sends the engine's messages."""
    made = EngineClient(EngineSettings(endpoint="", model_folder=None, prefix_secret=b"x" * 32))
    hear(made, ReadyMessage(WIRE_VERSION, 512, 320, 4, 25, 16, "", GAUGES))
    await made.wait_ready()
    yield made
    await made.close()


def hear(engine: EngineClient, message: FromEngine) -> None:
    engine._take(decode_from_engine(encode_from_engine(message)))


async def end_of_a_request(
    engine: EngineClient, reason: FinishReason, bill: Bill, fault: PdFault | None
) -> StreamEnd | None:
    submission = Submission(RequestId("r"), frozen_tokens([1]), Sampling(seed=0), 4)
    submitting = asyncio.create_task(engine.submit([submission]))
    await asyncio.sleep(0)
    hear(engine, Accepted(0, (7,)))
    (stream,) = await submitting
    hear(engine, ended_output(EndedRequest(Serial(7), reason, 3, bill, fault), GAUGES, DraftGauges(9, 8)))
    return [burst.ended async for burst in stream][-1]


@pytest.mark.parametrize("code", list(PdCode))
@pytest.mark.parametrize("stage", list(PdStage))
async def test_a_fault_arrives_as_it_was_said(engine: EngineClient, code: PdCode, stage: PdStage) -> None:
    ended = await end_of_a_request(engine, FinishReason.RESCHEDULE, Bill(), PdFault(code, stage, "because"))
    assert ended is not None
    assert ended.reason is FinishReason.RESCHEDULE
    assert ended.fault == PdFault(code, stage, "because")
    assert ended.fault.message == f"PD Error {int(code)} ({stage.value}): because"


async def test_an_ordinary_end_has_no_fault_and_the_bill_names_attempts_and_transfer(engine: EngineClient) -> None:
    ended = await end_of_a_request(engine, FinishReason.STOP, Bill(transfer_us=1500, attempts=2), None)
    assert ended == StreamEnd(FinishReason.STOP, 0, Bill(transfer_us=1500, attempts=2))


async def test_block_states_and_hand_overs_arrive(engine: EngineClient) -> None:
    await end_of_a_request(engine, FinishReason.STOP, Bill(), None)
    assert engine.gauges.scheduler == GAUGES
    assert engine.gauges.scheduler.blocks == BlockGauges(3, 4, 5, 6, 7, 8)
    assert engine.gauges.drafts == DraftGauges(9, 8)


async def test_what_is_beyond_the_pool_arrives(engine: EngineClient) -> None:
    hear(engine, StoreTraffic(10, 20, 30, 40, 50, 60, {"torn": 1}))
    assert engine.gauges.scheduler.storage == StorageGauges(40, 9, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
    assert engine.gauges.store == StoreTraffic(10, 20, 30, 40, 50, 60, {"torn": 1})


async def test_it_is_idle_when_what_is_kept_of_kv_is_where_it_should_be(engine: EngineClient) -> None:
    at_work = replace(GAUGES, handovers=HandoverGauges(), storage=StorageGauges(transfers=1))
    hear(engine, StepOutput(b"", b"", b"", (), (), (), at_work))
    idle = asyncio.ensure_future(engine.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    hear(engine, StepOutput(b"", b"", b"", (), (), (), replace(at_work, storage=StorageGauges())))
    await asyncio.wait_for(idle, 20)


async def test_it_is_not_idle_by_gauges_that_are_older_than_the_order_to_drain(engine: EngineClient) -> None:
    at_rest = replace(GAUGES, handovers=HandoverGauges(), storage=StorageGauges())
    hear(engine, StepOutput(b"", b"", b"", (), (), (), at_rest))
    engine.drain()
    idle = asyncio.ensure_future(engine.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done(), "a hand-over may have begun meanwhile"
    hear(engine, DrainBegun(replace(at_rest, handovers=HandoverGauges(open=1))))
    await asyncio.sleep(0)
    assert not idle.done()
    hear(engine, StepOutput(b"", b"", b"", (), (), (), at_rest))
    await asyncio.wait_for(idle, 20)
