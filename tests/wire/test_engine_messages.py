"""Bytes in, the same values out; anything else is a WireError."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine.ended import Bill, EndedRequest, StartedRequest
from baton.core.engine.gauges import DraftGauges, HandoverGauges, SchedulerGauges, StorageGauges
from baton.core.engine.plan import Logprobs
from baton.core.engine.records import Settled
from baton.core.engine.request import FinishReason, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.handover.messages import (
    Handover,
    PeerId,
)
from baton.wire import engine_messages as messages
from baton.wire.engine_messages import WireError

GAUGES = SchedulerGauges(1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9, 10, 11, 12, 13, 0.5)
NO_DRAFTS = DraftGauges()

samplings = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 15),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 1000), st.floats(-100, 100)), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 1000), max_size=4).map(tuple),
    min_tokens=st.integers(0, 100),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
)


@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    sampling=samplings,
    max_tokens=st.one_of(st.none(), st.integers(1, 2**40)),
    salt=st.binary(max_size=40),
    generated=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    prefill_at=st.text(max_size=40),
)
def test_a_submission_survives_the_wire(
    prompt: list[int], sampling: Sampling, max_tokens: int | None, salt: bytes, generated: list[int], prefill_at: str
) -> None:
    leader = Submission(
        RequestId("r"), frozen_tokens(prompt), sampling, max_tokens, salt, 3, None, frozen_tokens(generated), prefill_at
    )
    follower = Submission(RequestId("s"), leader.prompt, sampling, max_tokens, salt, 3, RequestId("r"))
    decoded = messages.decode_to_engine(messages.encode_to_engine(messages.Submit(7, (leader, follower))))
    assert isinstance(decoded, messages.Submit)
    assert decoded.ticket == 7
    for item, back in zip((leader, follower), decoded.group, strict=True):
        assert back.prompt.tolist() == prompt
        assert (back.request_id, back.leader) == (item.request_id, item.leader)
        assert (back.sampling, back.max_tokens, back.salt, back.priority) == (sampling, max_tokens, salt, 3)
        assert (back.generated.tolist(), back.prefill_at) == (item.generated.tolist(), item.prefill_at)


def test_the_prompt_of_many_choices_travels_once() -> None:
    leader = Submission(RequestId("0"), frozen_tokens(range(10_000)), Sampling(seed=0))
    group = [leader] + [
        Submission(RequestId(f"{i}"), leader.prompt, Sampling(0, i), leader=RequestId("0")) for i in range(1, 16)
    ]
    assert len(messages.encode_to_engine(messages.Submit(0, tuple(group)))) < 2 * leader.prompt.nbytes


def test_a_follower_without_its_leader_is_refused() -> None:
    lost = Submission(RequestId("1"), frozen_tokens([1]), Sampling(seed=0), leader=RequestId("0"))
    with pytest.raises(WireError, match="no prompt"):
        messages.decode_to_engine(messages.encode_to_engine(messages.Submit(0, (lost,))))


def _settled() -> Settled:
    logprobs = Logprobs(
        1,
        np.array([-0.5, -1.5], dtype=np.float32),
        np.array([[3, 4], [5, 6]], dtype=np.int32),
        np.array([[-0.5, -1], [-1.5, -2]], dtype=np.float32),
    )
    return Settled(
        serials=np.array([10, 11], dtype=np.int64),
        counts=np.array([1, 2], dtype=np.int32),
        tokens=np.array([0, 3, 5], dtype=np.int32),
        logprobs=(logprobs,),
        started=(StartedRequest(Serial(10), 16),),
        ended=(EndedRequest(Serial(11), FinishReason.LENGTH, 9, Bill(preemptions=2)),),
    )


def test_a_step_survives_the_wire() -> None:
    frame = messages.encode_from_engine(messages.step_output(_settled(), GAUGES, DraftGauges()))
    output = messages.decode_from_engine(frame)
    assert isinstance(output, messages.StepOutput)
    rows = messages.DecodedRows(output)
    assert (rows.serials, rows.counts, rows.tokens) == ([10, 11], [1, 2], [0, 3, 5])
    assert rows.logprobs == {1: [(-0.5, ((3, -0.5), (4, -1.0))), (-1.5, ((5, -1.5), (6, -2.0)))]}
    assert output.started == (StartedRequest(Serial(10), 16),)
    assert output.ended[0].reason is FinishReason.LENGTH
    assert (output.gauges.free_blocks, output.gauges.steps) == (3, 9)


def test_log_probabilities_are_the_same_on_the_wire_whatever_numbers_an_executor_counts_in() -> None:
    narrow = _settled().logprobs[0]
    wide = Logprobs(narrow.row, narrow.chosen.astype(np.float64), narrow.top_ids.astype(np.int64), narrow.top.astype(">f8"))
    frames = [
        messages.encode_from_engine(
            messages.step_output(msgspec.structs.replace(_settled(), logprobs=(line,)), GAUGES, DraftGauges())
        )
        for line in (narrow, wide)
    ]
    assert frames[0] == frames[1]


def _said_again(ended: EndedRequest, gauges: SchedulerGauges, drafts: DraftGauges = NO_DRAFTS) -> messages.StepOutput:
    message = messages.decode_from_engine(messages.encode_from_engine(messages.ended_output(ended, gauges, drafts)))
    assert isinstance(message, messages.StepOutput)
    return message


@pytest.mark.parametrize("code", PdCode)
def test_the_fault_of_an_attempt_survives_the_wire(code: PdCode) -> None:
    fault = PdFault(code, PdStage.TRANSFER, "the checks differ")
    bill = Bill(1, 2, 3, 10, 4, queue_us=5, prefill_us=6, transfer_us=7, decode_us=8, attempts=9)
    (ended,) = _said_again(EndedRequest(Serial(1), FinishReason.RESCHEDULE, 3, bill, fault), GAUGES).ended
    assert ended.fault == fault
    assert ended.reason is FinishReason.RESCHEDULE
    assert ended.bill == bill


def test_an_end_without_a_fault_has_none_on_the_wire() -> None:
    (ended,) = _said_again(EndedRequest(Serial(1), FinishReason.STOP, 3, Bill()), GAUGES).ended
    assert ended.fault is None


def test_what_is_beyond_the_pool_survives_the_wire() -> None:
    storage = StorageGauges(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
    gauges = msgspec.structs.replace(GAUGES, leaving_blocks=6, storage=storage)
    said = _said_again(EndedRequest(Serial(1), FinishReason.STOP, 3, Bill()), gauges).gauges
    assert said.leaving_blocks == 6
    assert said.storage == storage


def test_drafts_survive_the_wire_and_weigh_nothing_where_there_are_none() -> None:
    ended = EndedRequest(Serial(1), FinishReason.STOP, 3, Bill())
    said = _said_again(ended, GAUGES, DraftGauges(300, 200))
    assert (said.draft_tokens, said.accepted_draft_tokens) == (300, 200)
    none = messages.encode_from_engine(messages.ended_output(ended, GAUGES, NO_DRAFTS))
    assert b"draft" not in none
    back = messages.decode_from_engine(none)
    assert isinstance(back, messages.StepOutput)
    assert (back.draft_tokens, back.accepted_draft_tokens) == (0, 0)


def test_leased_and_receiving_blocks_and_hand_overs_survive_the_wire() -> None:
    gauges = SchedulerGauges(
        1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0.5, HandoverGauges(21, 22, 23, 24, 25, 26, 27)
    )
    back = _said_again(EndedRequest(Serial(1), FinishReason.STOP, 3, Bill()), gauges).gauges
    assert (back.running_blocks, back.leased_blocks, back.receiving_blocks, back.prefix_queries) == (5, 6, 7, 8)
    assert back.handovers == HandoverGauges(
        peers=21, open=22, made=23, refused=24, not_delivered=25, preempted=26, timed_out=27
    )


HANDOVER = Handover(PeerId("p"), 1, 1)


@pytest.mark.parametrize(
    "followers",
    [
        [("1", "0"), ("2", "1")],
        [("1", "2"), ("2", None)],
    ],
    ids=["leads in turn", "comes first"],
)
def test_only_one_with_a_prompt_of_its_own_that_came_before_is_a_leader(followers: list[tuple[str, str | None]]) -> None:
    group = [("0", None), *followers]
    asked = tuple(
        Submission(RequestId(name), frozen_tokens([1]), Sampling(seed=0), leader=None if of is None else RequestId(of))
        for name, of in group
    )
    with pytest.raises(WireError, match="no prompt"):
        messages.decode_to_engine(messages.encode_to_engine(messages.Submit(0, asked)))


def test_a_follower_with_a_prompt_of_its_own_is_refused() -> None:
    leader = Submission(RequestId("0"), frozen_tokens([1]), Sampling(seed=0))
    follower = Submission(RequestId("1"), frozen_tokens([2]), Sampling(seed=0), leader=RequestId("0"))
    frame = messages._encoder.encode(messages.Submit(0, (leader, follower)))
    with pytest.raises(WireError):
        messages.decode_to_engine(frame)
