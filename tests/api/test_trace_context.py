"""The trace context of the W3C, and the decision to sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api.original_request import OriginalRequest, decode_origin
from baton.api.tracing.request_trace import RequestTrace
from baton.api.tracing.trace_context import CarriedTrace, TraceContext, is_sampled, parse_carried, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_header_is_read_and_written() -> None:
    found = parse_traceparent([VALID])
    assert found == TraceContext(TRACE, SPAN, True)
    assert found.header == VALID
    assert parse_traceparent([f" {VALID}\t"]) == found
    assert parse_traceparent([f"00-{TRACE}-{SPAN}-02"]) == TraceContext(TRACE, SPAN, False)


def test_a_later_version_may_have_more_fields() -> None:
    assert parse_traceparent([f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like"]) == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "values",
    [
        [], [VALID, VALID], [""], ["00"], [VALID.upper()], [VALID + "-more"], [VALID[:-1]], [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"], [f"00-{TRACE}-{'0' * 16}-01"], [f"cc-{TRACE}-{SPAN}-01-" + "x" * 600],
    ],
)  # fmt: skip
def test_whatever_is_invalid_is_as_if_it_had_not_come(values: list[str]) -> None:
    assert parse_traceparent(values) is None


@given(st.text())
def test_no_text_is_too_strange_to_be_ignored(text: str) -> None:
    parse_traceparent([text])
    parse_carried(text)


@pytest.mark.parametrize("parent", ["", SPAN])
def test_what_an_origin_carries_is_read_back(parent: str) -> None:
    carried = CarriedTrace(TraceContext(TRACE, "1" * 16, True), parent)
    assert parse_carried(carried.encode()) == carried


def test_an_origin_without_a_trace_has_the_bytes_that_it_had_before_there_were_traces() -> None:
    origin = OriginalRequest("/v1/completions", b"{}", "tenant", "id", 1, 2)
    assert origin.encode() == b"\x96" + b"".join(
        (b"\xaf/v1/completions", b"\xc4\x02{}", b"\xa6tenant", b"\xa2id", b"\x01", b"\x02")
    )
    assert decode_origin(origin.encode()) == origin
    traced = OriginalRequest("/v1/completions", b"{}", "tenant", "id", 1, 2, f"{VALID}-{SPAN}")
    assert decode_origin(traced.encode()) == traced


def test_who_resumes_joins_the_trace_and_names_its_own() -> None:
    lost = CarriedTrace(TraceContext(TRACE, "1" * 16, True), SPAN)
    trace = RequestTrace(TraceContext("a" * 32, "b" * 16, False), "c" * 16, "GET", "/", 0)
    trace.join(lost)
    assert (trace.context, trace.parent_id) == (TraceContext(TRACE, "b" * 16, True), SPAN)
    assert trace.links == [TraceContext("a" * 32, "c" * 16, False), lost.server]


def test_the_share_of_traces_that_are_kept_is_decided_by_their_ids() -> None:
    ids = [f"{'f' * 16}{i * 2**64 // 1000:016x}" for i in range(1000)]
    assert sum(is_sampled(one, 0.25) for one in ids) == 250
    assert not any(is_sampled(one, 0.0) for one in ids)
    assert is_sampled("f" * 32, 1.0)
