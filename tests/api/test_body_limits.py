"""Bodies that come in parts: what is held of them is bounded for a key and in all, and whole ones are served meanwhile."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from baton.api.body_limits import PartialBodies, read_body
from baton.api.choice_streams import ClientGone
from baton.api.errors import ApiError


def request_of(parts: list[bytes], leaves: bool = False, headers: dict[str, str] | None = None) -> Request:
    """`leaves`: the client goes after these parts."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1:] = [{"type": "http.disconnect"}] if leaves else [messages[-1] | {"more_body": False}]

    async def receive() -> Message:
        return messages.pop(0)

    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "headers": pairs}, receive)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=40))
def test_no_sequence_of_parts_gets_beyond_the_limits_and_all_is_given_back(parts: list[tuple[str, int]]) -> None:
    partial, held = PartialBodies(200, 100), Counter[str]()
    for tenant, count in parts:
        if held[tenant] + count <= 100 and held.total() + count <= 200:
            partial.add(tenant, count)
            held[tenant] += count
        else:
            with pytest.raises(ApiError) as refused:
                partial.add(tenant, count)
            assert refused.value.status == (429 if held[tenant] + count > 100 else 503)
            assert refused.value.headers == {"Retry-After": "1", "Connection": "close"}
        assert partial.bytes == held.total()
    for tenant, count in held.items():
        partial.remove(tenant, count)
    assert partial.bytes == 0
    partial.add("a", 100)


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=10), st.booleans(), st.integers(0, 100))
async def test_however_a_body_comes_and_ends_nothing_of_it_stays_counted(
    parts: list[bytes], leaves: bool, bytes_max: int
) -> None:
    partial, whole = PartialBodies(60, 60), b"".join(parts)
    refusals = (ApiError,) if len(whole) > min(bytes_max, 60) else ()
    with contextlib.suppress(*refusals, *((ClientGone,) if leaves else ())):
        assert await read_body(request_of(parts, leaves=leaves), "", bytes_max, partial) == whole
        assert len(whole) <= bytes_max
    assert partial.bytes == 0


async def test_a_body_that_comes_at_once_is_served_while_unfinished_ones_fill_the_limits() -> None:
    partial = PartialBodies(100, 100)
    partial.add("", 100)
    assert await read_body(request_of([b"x" * 90]), "", 100, partial) == b"x" * 90
    with pytest.raises(ApiError, match="unfinished bodies of this key"):
        await read_body(request_of([b"x", b"y"]), "", 100, partial)
    with pytest.raises(ApiError, match="101 bytes of unfinished bodies would"):
        await read_body(request_of([b"x", b"y"]), "another", 100, partial)


async def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    with pytest.raises(ApiError, match="larger than 5 bytes"):
        await read_body(request_of([b"x"], headers={"content-length": "6"}), "", 5, PartialBodies())


async def test_a_body_in_small_parts_takes_little_more_than_its_bytes() -> None:
    count = 100_000
    request = request_of([b"xy"] * count)
    tracemalloc.start()
    try:
        await read_body(request, "", 1 << 20, PartialBodies())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * 2 * count
