"""What routers and instances say to each other: the same when it is read back, and nothing else is ever understood.

BATON_TEST_FUZZ_INPUTS sets how many bad inputs go into each decoder (few by default; a million takes minutes).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from baton.api.schema import PROMPTS_MAX
from baton.core.bounds import INCARNATION_MAX
from baton.core.engine.ended import Bill, EndedRequest, StartedRequest
from baton.core.engine.gauges import DraftGauges, SchedulerGauges
from baton.core.engine.orders import Accepted, Cancel, Drain, StopAt
from baton.core.engine.plan import Logprobs
from baton.core.engine.records import Settled as StepSettled
from baton.core.engine.request import FinishReason, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.events import MEMBERSHIP_VERSION, Instance, Join
from baton.wire import router_messages as membership
from baton.wire.engine_messages import StepOutput, WireError, refused, step_output
from baton.wire.membership_decoding import heartbeat_of, held_of
from baton.wire.router_messages import (
    AllHeldSaid,
    ForgetSerials,
    FromInstance,
    FromRouter,
    HeartbeatMessage,
    HeldChoiceMessage,
    HeldGroup,
    Leaving,
    PlaceAttempt,
    PrefillPeersChanged,
    TurnedAway,
    Welcome,
    check_group,
    decode_from_instance,
    decode_from_router,
    encode_membership,
    held_bytes,
)
from tests.wire.harms import changed, mutated

INPUTS = int(os.environ.get("BATON_TEST_FUZZ_INPUTS", "20000"))
VOCABULARY = 64
GAUGES = SchedulerGauges(1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9, 10, 11, 12, 13, 0.5)
JOIN = Join(Instance("d0"), 7, "decode", b"f" * 16, "http://d0:8000", "d0:4711", 4, 64, 16, 512, VOCABULARY, 99, False)


def _group() -> list[Submission]:
    sampling = Sampling(7, 0, 0.5, 3, 0.9, 0.1, 1.1, 0.2, 0.3, ((5, 1.5), (6, -2.0)), (1, 2), 4, 2)
    first = Submission(
        RequestId("tenant:request:0"),
        frozen_tokens(range(40)),
        sampling,
        100,
        b"s" * 16,
        1,
        None,
        frozen_tokens([3, 4]),
        "p0:4711",
    )
    return [first, Submission(RequestId("tenant:request:1"), first.prompt, sampling, 100, leader=first.request_id)]


def _step() -> StepOutput:
    lines = Logprobs(0, np.array([-0.5], "<f4"), np.array([[1, 2]], "<i4"), np.array([[-0.5, -1.0]], "<f4"))
    fault = PdFault(PdCode.PREEMPTED, PdStage.DECODE, "no room")
    settled = StepSettled(
        np.array([8, 9], "<i8"), np.array([1, 2], "<i4"), np.array([5, 6, 7], "<i4"), (lines,),
        (StartedRequest(Serial(8), 16),), (EndedRequest(Serial(9), FinishReason.RESCHEDULE, 2, Bill(1, 2, 3), fault),),
    )  # fmt: skip
    return step_output(settled, GAUGES, DraftGauges())


def _held() -> HeldGroup:
    group = tuple(_group())
    rows = [Logprobs(at, np.full(count, -0.5, "<f4"), np.full((count, 1), 5, "<i4"), np.full((count, 1), -0.5, "<f4"))
            for at, count in enumerate((1, 2))]  # fmt: skip
    first = HeldChoiceMessage(
        0,
        8,
        np.array([1, 2], "<i4").tobytes(),
        np.array([5, 6, 7], "<i4").tobytes(),
        tuple(rows),
        16,
        None,
    )
    second = HeldChoiceMessage(1, 9, b"", b"", (), None, msgspec.structs.replace(_step().ended[0], serial=9))
    return HeldGroup(group, (2, 0), 3, b"origin", (first, second))


FROM_INSTANCE: list[FromInstance] = [
    JOIN,
    _held(),
    AllHeldSaid(),
    HeartbeatMessage(GAUGES, 100, True, True, b"k" * 32, b"l" * 16, ((8, "running", 5),)),
    Leaving(),
    Accepted(3, (8, 9)),
    refused(3, Refusal(RefusalCode.QUEUE_FULL, "full", 1)),
    _step(),
]
FROM_ROUTER: list[FromRouter] = [
    Welcome("router", 200_000, 10_000_000),
    TurnedAway("another model", True),
    PlaceAttempt(3, tuple(_group()), (2, 0), 3, b"origin"),
    Cancel(8),
    StopAt(8, 3),
    ForgetSerials((8, 9)),
    PrefillPeersChanged(("p0:4711", "p1:4711")),
    Drain(),
]


@pytest.mark.parametrize("message", FROM_INSTANCE, ids=lambda message: type(message).__name__)
def test_what_an_instance_says_is_read_back_as_it_was(message: FromInstance) -> None:
    frame = encode_membership(message)
    back = decode_from_instance(frame)
    assert (type(back), encode_membership(back)) == (type(message), frame)


@pytest.mark.parametrize("message", FROM_ROUTER, ids=lambda message: type(message).__name__)
def test_what_a_router_says_is_read_back_as_it_was(message: FromRouter) -> None:
    frame = encode_membership(message)
    back = decode_from_router(frame)
    assert (type(back), encode_membership(back)) == (type(message), frame)


def test_all_kinds_of_messages_are_tried_here() -> None:
    for union, tried in ((FromInstance, FROM_INSTANCE), (FromRouter, FROM_ROUTER)):
        assert set(union.__args__) == {type(message) for message in tried}


def test_no_side_understands_what_the_other_should_hear() -> None:
    for message in FROM_INSTANCE:
        with pytest.raises(WireError):
            decode_from_router(encode_membership(message))
    for message in FROM_ROUTER:
        with pytest.raises(WireError):
            decode_from_instance(encode_membership(message))


def test_a_submission_survives_the_way() -> None:
    place = decode_from_router(encode_membership(PlaceAttempt(3, tuple(_group()), (2, 0), 3, b"origin")))
    assert isinstance(place, PlaceAttempt)
    check_group(place.group, VOCABULARY)
    (first, second) = place.group
    was = _group()[0]
    assert (first.request_id, first.sampling, first.prefill_at) == (was.request_id, was.sampling, was.prefill_at)
    assert first.generated.tolist() == [3, 4]
    assert second.prompt.tolist() == first.prompt.tolist()


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

_replace = msgspec.structs.replace
_BEAT = FROM_INSTANCE[3]
_PLACE = FROM_ROUTER[2]


@pytest.mark.parametrize(
    "message",
    [
        _replace(JOIN, name=""),
        _replace(JOIN, incarnation=0),
        _replace(JOIN, incarnation=INCARNATION_MAX + 1),
        *(_replace(JOIN, **{field: "a\n2026 forged"}) for field in ("name", "role", "url", "peer_address")),
        *(_replace(JOIN, name=name) for name in ("\x1b[2J", "a\0", "a\u202eb", "\u2028", "\x7f", "d\u00fcne", "a\tb")),
        _replace(JOIN, slots=0),
        _replace(JOIN, url="u" * 513),
        _replace(JOIN, version=membership.MEMBERSHIP_VERSION + 1),
        _replace(_BEAT, named=b"k" * 17),
        _replace(_BEAT, forgotten=b"k" * 16 * (membership.KEYS_A_BEAT_MAX + 1)),
        _replace(_BEAT, engine_silent_us=-1),
        _replace(_BEAT, notes=((1, "running", 1),) * (membership.NOTES_A_BEAT_MAX + 1)),
        _replace(_held(), choices=(0,)),
        _replace(_held(), choices=(1, 1)),
        _replace(_held(), choices=(0, 3)),
        _replace(_held(), group=()),
        _replace(_held(), body_choices=membership.GROUP_MAX + 1),
        _replace(_held(), origin=b"o" * (membership.ORIGIN_BYTES_MAX + 1)),
        Accepted(-1, (1,)),
        Accepted(1, (-1,)),
        Accepted(1, (2**63,)),
        Accepted(1, (1,) * (membership.GROUP_MAX + 1)),
    ],
)
def test_what_is_out_of_bounds_is_refused_from_an_instance(message: FromInstance) -> None:
    with pytest.raises(WireError):
        decode_from_instance(encode_membership(message))


@pytest.mark.parametrize(
    "message",
    [
        Welcome("", 200_000, 1),
        Welcome("r", 0, 1),
        Welcome("r", 1, -1),
        TurnedAway("x" * 513, True),
        TurnedAway("x", True, -1),
        TurnedAway("x", True, INCARNATION_MAX + 1),
        _replace(_PLACE, ticket=-1),
        _replace(_PLACE, choices=(0,)),
        _replace(_PLACE, choices=(0, 0)),
        _replace(_PLACE, choices=(0, 3)),
        _replace(_PLACE, body_choices=0),
        _replace(_PLACE, body_choices=membership.GROUP_MAX + 1),
        ForgetSerials((-1,)),
        Cancel(2**64),
        StopAt(1, -1),
        Cancel(-1),
        PrefillPeersChanged(("a",) * (membership.ADDRESSES_MAX + 1)),
    ],
)
def test_what_is_out_of_bounds_is_refused_from_a_router(message: FromRouter) -> None:
    try:
        frame = encode_membership(message)
    except OverflowError:
        return  # it cannot even be said
    with pytest.raises(WireError):
        decode_from_router(frame)


def test_a_join_of_another_version_is_named_whatever_else_is_in_it() -> None:
    strange = {"type": "join", "version": MEMBERSHIP_VERSION + 1, "shoe_size": 44}
    with pytest.raises(WireError, match=rf"version {MEMBERSHIP_VERSION + 1} .* router {MEMBERSHIP_VERSION}"):
        decode_from_instance(msgspec.msgpack.encode(strange))


# ── what held groups and beats mean ──────────────────────────────────────────────────────────────────────────────────────


def test_a_held_group_is_what_was_asked_for_and_what_came_of_it() -> None:
    first, second = held_of(_held(), JOIN)
    assert (first.serial, first.choice, first.body_choices, first.origin) == (8, 2, 3, b"origin")
    assert (first.tokens, first.cached_tokens, first.end) == ((5, 6, 7), 16, None)
    assert first.extras == ((-0.5, ((5, -0.5),)),) * 3
    assert first.submission.generated.tolist() == [3, 4]
    assert (second.serial, second.choice, second.tokens) == (9, 0, ())
    assert second.end is not None
    assert second.end.fault == PdFault(PdCode.PREEMPTED, PdStage.DECODE, "no room")


def _with_line(**changes: object) -> HeldGroup:
    held = _held()
    return _replace(held, lines=(_replace(held.lines[0], **changes), *held.lines[1:]))


_LOGPROBS = _held().lines[0].logprobs


def _large() -> HeldGroup:
    """Many of whatever there may be many of, each as small as it may be, and numbers and texts that take most bytes."""
    text, huge = "\U0001f600" * 100, 2**62
    sampling = _replace(_held().group[0].sampling, logit_bias=((2**31 - 1, 0.1),) * 99, stop_token_ids=(2**31 - 1,) * 99)
    item = _replace(_held().group[0], request_id=text, leader=text, prefill_at=text, sampling=sampling, prompt=None)
    end = _held().lines[1].ended
    assert end is not None
    assert end.fault is not None
    bill = type(end.bill)(*[huge] * len(msgspec.structs.astuple(end.bill)))
    end = _replace(end, serial=huge, generated_tokens=huge, bill=bill, fault=_replace(end.fault, reason=text))
    rows = (_replace(_LOGPROBS[0], row=2**31 - 1, top_ids=np.empty(0, "<i4"), top=np.empty(0, "<f4")),) * 999
    line = HeldChoiceMessage(2**31 - 1, huge, b"", b"", rows, 2**31 - 1, end)
    return HeldGroup((item,) * 256, (2**31 - 1,) * 256, 1, b"", (line,) * 256)


@pytest.mark.parametrize("held", [_held(), _large(), _replace(_held(), origin=b"o" * 100_000, lines=())])
def test_a_held_group_weighs_no_less_than_its_frame(held: HeldGroup) -> None:
    assert len(encode_membership(held)) <= held_bytes(_replace(held, body_choices=0))


def test_choices_that_a_router_has_to_make_records_for_weigh_too() -> None:
    assert membership.GROUP_MAX == PROMPTS_MAX, "as many as the API makes of a body"
    few, many = (held_bytes(_replace(_held(), body_choices=count)) for count in (1, membership.GROUP_MAX))
    assert many - few == (membership.GROUP_MAX - 1) * membership.CHOICE_BYTES


def test_a_held_choice_may_be_without_the_log_probabilities_that_it_asked_for() -> None:
    assert held_of(_with_line(logprobs=()), JOIN)[0].extras == ()


def _over_the_wire(held: HeldGroup) -> HeldGroup:
    back = decode_from_instance(encode_membership(held))
    assert isinstance(back, HeldGroup)
    return back


def _int32s(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


@pytest.mark.parametrize(
    "held",
    [
        _with_line(place=1),
        _with_line(place=2),
        _with_line(counts=_int32s(1, 1)),
        _with_line(counts=_int32s(-1, 4)),
        _with_line(counts=b"\0"),
        _with_line(tokens=_int32s(5, 6, VOCABULARY)),
        _with_line(tokens=_int32s(5, 6, -1)),
        _with_line(tokens=_int32s(*[1] * 99), counts=_int32s(99), logprobs=()),
        _with_line(logprobs=_LOGPROBS[:1]),
        _with_line(logprobs=_LOGPROBS[:1] * 2),
        _with_line(logprobs=tuple(reversed([_replace(item, row=1 - item.row) for item in _LOGPROBS]))),
        _with_line(logprobs=tuple(_replace(row, top_ids=np.full((row.row + 1, 1), 99, "<i4")) for row in _LOGPROBS)),
        _with_line(cached_tokens=-1),
        _with_line(ended=_held().lines[1].ended),
        _with_line(ended=_replace(_step().ended[0], serial=8, generated_tokens=-1)),
        _with_line(ended=_replace(_step().ended[0], serial=8, bill=_replace(_step().ended[0].bill, queue_us=-1))),
    ],
)  # fmt: skip
def test_a_held_group_that_contradicts_itself_is_refused(held: HeldGroup) -> None:
    with pytest.raises(WireError):
        held_of(_over_the_wire(held), JOIN)


@pytest.mark.parametrize("changes", [{"running": -1}, {"steps": 2**63}, {"reserve_ratio": float("nan")}])
def test_gauges_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    assert isinstance(_BEAT, HeartbeatMessage)
    assert heartbeat_of(_BEAT, {}).ledger.running == 1
    with pytest.raises(WireError):
        decode_from_instance(encode_membership(_replace(_BEAT, gauges=_replace(_BEAT.gauges, **changes))))


# ── anything ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(messages: Sequence[FromInstance | FromRouter], draw: random.Random) -> Callable[[], bytes]:
    frames = [encode_membership(message) for message in messages]
    trees: list[object] = [msgspec.msgpack.decode(frame) for frame in frames]

    def drawn() -> bytes:
        match draw.randrange(10):
            case 0:
                return draw.randbytes(draw.randrange(120))
            case 1 | 2 | 3 | 4:
                return mutated(draw.choice(frames), draw.choice(frames), draw)
            case _:
                return msgspec.msgpack.encode(changed(draw.choice(trees), draw))

    return drawn


def _means(message: FromInstance | FromRouter) -> None:
    """What a reader makes of it beyond its shape; that may be refused, too."""
    match message:
        case HeldGroup():
            held_of(message, JOIN)
        case HeartbeatMessage():
            heartbeat_of(message, {})
        case PlaceAttempt():
            check_group(message.group, VOCABULARY)


@pytest.mark.parametrize(
    ("decode", "messages", "seed"), [(decode_from_instance, FROM_INSTANCE, 30), (decode_from_router, FROM_ROUTER, 31)]
)
def test_whatever_comes_is_a_message_or_a_wire_error(
    decode: Callable[[bytes], FromInstance | FromRouter], messages: Sequence[FromInstance | FromRouter], seed: int
) -> None:
    drawn = _inputs(messages, random.Random(seed))
    understood = Counter[str | None]()
    for _ in range(INPUTS):
        frame = drawn()
        try:
            message = decode(frame)
            again = encode_membership(decode(encode_membership(message)))
            assert again == encode_membership(message), frame.hex()
            understood[type(message).__name__] += 1
            _means(message)
        except WireError:
            understood[None] += 1
    assert set(understood) == {type(message).__name__ for message in messages} | {None}
    assert understood[None] > INPUTS // 3
