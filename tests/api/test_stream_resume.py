"""Event ids, and what follows them, without any router."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.engine import Sink, StreamEnd, TokenBurst
from baton.api.errors import ApiError
from baton.api.original_request import BadOrigin, OriginalRequest, decode_origin
from baton.api.stream_resume import CutStream, StreamPosition, StreamPositions, parse_marks
from baton.core.engine.request import FinishReason

ORIGIN = OriginalRequest("/v1/completions", b'{"prompt":"x"}', "tenant", "id", 7, 1_700_000_000)


def test_an_origin_comes_back_as_it_went() -> None:
    assert decode_origin(ORIGIN.encode()) == ORIGIN


@given(st.binary(max_size=200))
def test_any_other_bytes_are_no_origin_and_nothing_worse(data: bytes) -> None:
    with contextlib.suppress(BadOrigin):
        decode_origin(data)


@given(st.integers(0, len(ORIGIN.encode()) - 1), st.integers(0, 255))
def test_a_spoilt_origin_is_another_or_none(at: int, byte: int) -> None:
    data = bytearray(ORIGIN.encode())
    data[at] = byte
    with contextlib.suppress(BadOrigin):
        decode_origin(bytes(data))


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("", StreamPositions((StreamPosition(), StreamPosition()))),
        ("-,-", StreamPositions((StreamPosition(), StreamPosition()))),
        ("0,-", StreamPositions((StreamPosition(True), StreamPosition()))),
        ("12!,7", StreamPositions((StreamPosition(True, 12, True), StreamPosition(True, 7)))),
        (" 12!,7! ", StreamPositions((StreamPosition(True, 12, True), StreamPosition(True, 7, True)))),
        ("12!,7!.", StreamPositions((StreamPosition(True, 12, True), StreamPosition(True, 7, True)), usage_sent=True)),
    ],
)
def test_an_event_id_says_how_far_each_choice_has_come(text: str, marks: StreamPositions) -> None:
    assert parse_marks(text, 2) == marks


@given(st.text(max_size=40), st.integers(1, 3))
def test_any_other_text_is_refused_and_nothing_worse(text: str, choices: int) -> None:
    with contextlib.suppress(ApiError):
        assert len(parse_marks(text, choices).choices) == choices


def as_burst(item: TokenBurst | Exception) -> TokenBurst:
    assert isinstance(item, TokenBurst)
    return item


class Played:
    def __init__(self, bursts: list[TokenBurst]) -> None:
        self._bursts = bursts

    def pour(self, sink: Sink) -> None:
        for burst in self._bursts:
            sink(burst)

    def stop(self, keep: int) -> None:
        raise AssertionError(keep)

    def abort(self) -> None:
        raise AssertionError


@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 12), st.booleans())
def test_no_burst_is_in_part_known(sizes: list[int], known: int, finished: bool) -> None:
    bursts, count = [], 0
    for size in sizes:
        bursts.append(TokenBurst(tuple(range(count, count + size)), (), None))
        count += size
    end = StreamEnd(FinishReason.LENGTH, 0)
    bursts.append(TokenBurst((count,), (), end))
    cut: list[TokenBurst] = []
    CutStream(Played(bursts), StreamPosition(True, known, finished)).pour(lambda burst: cut.append(as_burst(burst)))
    at = 0
    for burst in cut:
        assert not at < known < at + len(burst.tokens)
        at += len(burst.tokens)
    assert [token for burst in cut for token in burst.tokens] == list(range(count + 1))
    assert [burst.ended for burst in cut if burst.ended] == [end]
    if known == count + 1 and not finished:
        assert cut[-1].tokens == ()  # its client has every token, and has not heard of the end
