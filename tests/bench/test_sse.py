from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.sse import SseEvent, SseOverflow, SseParser

# (what a server may send, what it means), written with every freedom that the format gives
PIECES = [
    (b'data: {"a": 1}\n\n', [SseEvent("message", b'{"a": 1}')]),
    (b"data:no space\r\n\r\n", [SseEvent("message", b"no space")]),
    (b": a comment\n\n", []),
    (b"event: error\rdata: bad\r\r", [SseEvent("error", b"bad")]),
    (b"data: one\ndata: two\n\n", [SseEvent("message", b"one\ntwo")]),
    (b"id: 7\nretry: 100\ndata:  two spaces\n\n", [SseEvent("message", b" two spaces")]),
    ("data: né\u2028\u0085x\n\n".encode(), [SseEvent("message", "né\u2028\u0085x".encode())]),
    (b"data\n\n", [SseEvent("message", b"")]),
    (b"event: lonely\n\n", []),
    (b"data: [DONE]\n\n", [SseEvent("message", b"[DONE]")]),
]


def parse(pieces: list[bytes]) -> list[SseEvent]:
    parser = SseParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close()


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.data())
def test_any_split_gives_the_same_events(sent: list[tuple[bytes, list[SseEvent]]], data: st.DataObject) -> None:
    stream = b"".join(text for text, _ in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert parse(pieces) == [event for _, events in sent for event in events]


@pytest.mark.parametrize(("text", "events"), PIECES)
def test_byte_by_byte_is_no_different(text: bytes, events: list[SseEvent]) -> None:
    assert parse([text[i : i + 1] for i in range(len(text))]) == events


def test_a_last_event_without_its_empty_line_counts() -> None:
    assert parse([b"data: [DONE]"]) == [SseEvent("message", b"[DONE]")]


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse([b"\xef\xbb", b"\xbfdata: x\n\n"]) == [SseEvent("message", b"x")]


def test_an_endless_event_is_refused() -> None:
    parser = SseParser(event_bytes_max=100)
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(SseOverflow):
        parser.feed(b"x" * 10)
