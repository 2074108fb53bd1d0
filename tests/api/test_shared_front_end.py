"""Budgets of requests and keys, the threads for text, the share of slots: over HTTP, with an engine in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.api.choice_streams import DELTAS_MAX, ChoiceStreams
from baton.api.engine import UNKNOWN_CONTEXT, EngineInfo, TokenBurst
from baton.api.errors import ApiError
from baton.api.logprob_columns import LogprobColumns, TokenLogprob
from baton.api.model_text import ModelText
from baton.api.request_costs import RequestCosts, cost_of
from baton.api.settings import ApiSettings
from baton.api.slot_shares import SlotShares
from baton.api.text_pool import LARGE_BYTES, TENANT_WAITING_BYTES_MAX, TextPool
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.errors import RefusalCode, Refused
from tests.api.conftest import Reply, serving
from tests.api.engine import ScriptedEngine

QUIET = settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
KEYS = ApiSettings(("tiny",), api_keys=("one", "two"))
LIMIT_S = 20


# ── what a request costs ─────────────────────────────────────────────────────────────────────────────────────────────────


def submission(prompt: int, max_tokens: int | None, logprobs: int | None) -> Submission:
    return Submission(RequestId("r"), frozen_tokens([1] * prompt), Sampling(seed=0, logprobs=logprobs), max_tokens, b"", 0)


@pytest.mark.parametrize(
    ("max_tokens", "logprobs", "context", "units"),
    [(10, None, 100, 10), (10, 0, 100, 10), (10, 20, 100, 210), (None, 1, 100, 190), (None, 20, UNKNOWN_CONTEXT, 21)],
)
def test_the_cost_of_a_choice(max_tokens: int | None, logprobs: int | None, context: int, units: int) -> None:
    info = EngineInfo(context, 320, slots=4, blocks=10, block_size=16)
    assert cost_of([submission(5, max_tokens, logprobs)] * 3, info) == 3 * units


@QUIET
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12)), max_size=40))
def test_a_tenant_never_has_more_open_than_it_may(asked: list[tuple[str, int]]) -> None:
    costs, open_units = RequestCosts(10, 20), {"a": [], "b": []}
    for tenant, units in asked:
        if units > 10 or sum(open_units[tenant]) + units > 20:
            with pytest.raises(ApiError) as refused:
                costs.open(tenant, units)
            assert refused.value.status == (400 if units > 10 else 429)
            if open_units[tenant]:
                costs.close(tenant, open_units[tenant].pop())
        else:
            costs.open(tenant, units)
            open_units[tenant].append(units)
        assert costs.held(tenant) == sum(open_units[tenant]) <= 20
    for tenant, units in open_units.items():
        for unit in units:
            costs.close(tenant, unit)
    assert not costs._open


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_beyond_the_budget_is_refused_and_one_within_it_gives_its_units_back(
    engine: ScriptedEngine, text: ModelText, stream: bool
) -> None:
    settings = ApiSettings(("tiny",), request_cost_max=1000, key_cost_max=1000)
    with serving(engine, text, settings) as served:
        refused = served.complete(prompt=["a", "b"], max_tokens=100, logprobs=5)
        assert (refused.status, refused.error["code"]) == (400, "request_too_costly")
        assert "1200 units" in refused.error["message"]
        assert served.complete().status == 200, "without a limit of its own: the context"
        assert served.complete(n=2).status == 400, "twice the context"
        for _ in range(3):
            assert served.complete(max_tokens=100, n=2, logprobs=4, stream=stream).status == 200
        assert served.complete(max_tokens=0).status == 400, "one that is refused gives them back too"
        assert served.complete(max_tokens=500, n=2).status == 200


@contextmanager
def in_background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def wait_for_groups(engine: ScriptedEngine, count: int) -> None:
    done = threading.Event()
    for _ in range(LIMIT_S * 200):
        if len(engine.groups) >= count:
            return
        done.wait(0.005)
    raise AssertionError(f"{len(engine.groups)} requests reached the engine")


def test_a_key_has_a_budget_for_all_its_open_requests(engine: ScriptedEngine, text: ModelText) -> None:
    engine.hangs_after = 0
    with serving(engine, text, replace(KEYS, key_cost_max=100)) as served, in_background() as threads:
        first = threads.submit(served.complete, ONE | {"X-Request-Id": "first"}, max_tokens=80)
        wait_for_groups(engine, 1)
        refused = served.complete(ONE, max_tokens=30)
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert int(refused.headers["retry-after"]) >= 1
        other = threads.submit(served.complete, TWO | {"X-Request-Id": "other"}, max_tokens=80)
        wait_for_groups(engine, 2)
        for headers, name in ((ONE, "first"), (TWO, "other")):
            assert served.call("DELETE", f"/v1/requests/{name}", headers=headers).status == 200
        assert first.result(LIMIT_S).status == other.result(LIMIT_S).status == 200
        engine.hangs_after = None
        assert served.complete(ONE, max_tokens=80).status == 200


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_key_cannot_hold_all_slots(engine: ScriptedEngine, text: ModelText) -> None:
    engine.info = replace(engine.info, slots=20)
    engine.hangs_after = 0
    with serving(engine, text, KEYS) as served, in_background() as threads:
        ask = [threads.submit(served.complete, ONE | {"X-Request-Id": f"r{i}"}, n=5) for i in range(4)]
        wait_for_groups(engine, 3)
        other = threads.submit(served.complete, TWO | {"X-Request-Id": "other"})
        wait_for_groups(engine, 4)
        assert [len(group) for group in engine.groups] == [5, 5, 5, 1], "the fourth of the first key waits"
        waiting = [f"r{i}" for i in range(4) if not any(f":r{i}:" in one.request_id for one in engine.groups[0])]
        running = next(f"r{i}" for i in range(4) if any(f":r{i}:" in one.request_id for one in engine.groups[0]))
        assert served.call("DELETE", f"/v1/requests/{running}", headers=ONE).status == 200
        wait_for_groups(engine, 5)
        for name in (*waiting, "other"):
            served.call("DELETE", f"/v1/requests/{name}", headers=TWO if name == "other" else ONE)
        assert {reply.result(LIMIT_S).status for reply in (*ask, other)} == {200}


def test_whoever_leaves_while_it_waits_takes_no_slot(engine: ScriptedEngine, text: ModelText) -> None:
    engine.info = replace(engine.info, slots=2)
    engine.hangs_after = 0
    with serving(engine, text, KEYS) as served, in_background() as threads:
        first = threads.submit(served.complete, ONE | {"X-Request-Id": "first"})
        wait_for_groups(engine, 1)
        waits = threads.submit(served.complete, ONE | {"X-Request-Id": "waits"})
        cancelled = 404
        while cancelled == 404:
            cancelled = served.call("DELETE", "/v1/requests/waits", headers=ONE).status
        assert waits.result(LIMIT_S).json()["choices"][0]["finish_reason"] == "abort"
        served.call("DELETE", "/v1/requests/first", headers=ONE)
        assert first.result(LIMIT_S).status == 200
        engine.hangs_after = None
        assert served.complete(ONE).status == 200
        assert len(engine.groups) == 2


def test_more_choices_than_the_share_are_refused_only_where_keys_share(engine: ScriptedEngine, text: ModelText) -> None:
    with serving(engine, text, KEYS) as served:
        refused = served.complete(ONE, prompt=["a"] * 49, max_tokens=1)
        assert (refused.status, refused.error["code"]) == (400, "too_many_choices")
        assert served.complete(ONE, prompt=["a"] * 48, max_tokens=1).status == 200
    engine.info = replace(engine.info, slots=4)
    with serving(engine, text, KEYS) as served:
        assert served.complete(ONE, n=16, max_tokens=1).status == 200, "n is never refused for want of slots"
    for unshared in (ApiSettings(("tiny",)), replace(KEYS, key_share=1.0)):
        with serving(engine, text, unshared) as served:
            assert served.complete(ONE, prompt=["a"] * 256, max_tokens=1).status == 200


async def test_what_waits_for_a_slot_is_bounded_and_goes_on_when_the_fleet_is_gone() -> None:
    slots = 4
    shares = SlotShares(lambda: slots, 0.75, 2)
    place = await shares.enter("a", 3)
    waiting = [asyncio.create_task(shares.enter("a", 16)) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(Refused) as refused:
        await shares.enter("a", 1)
    assert refused.value.refusal.code is RefusalCode.QUEUE_FULL
    slots = 0
    place.close()
    places = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
    for one in places:
        one.close()
    assert not shares._queue._lines


# ── threads for text ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_small_text_does_not_wait_behind_large_ones_of_another_tenant() -> None:
    pool, release = TextPool(threads=2), threading.Event()
    large = [asyncio.create_task(pool.run("a", 1 << 20, lambda: release.wait(LIMIT_S))) for _ in range(12)]
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(pool.run("b", 3000, lambda: "small"), LIMIT_S) == "small"
        assert not any(task.done() for task in large)
        assert pool._large.in_use_of("a") <= 4 << 20
    finally:
        release.set()
    assert all(await asyncio.gather(*large))
    assert not pool._large._lines
    assert not pool._small._lines


async def test_large_texts_of_two_tenants_take_turns() -> None:
    pool, order, release = TextPool(threads=2), [], threading.Event()

    def work(name: str) -> None:
        release.wait(LIMIT_S)
        order.append(name)

    first = [asyncio.create_task(pool.run("a", 3 << 20, lambda: work("a"))) for _ in range(4)]
    await asyncio.sleep(0)
    second = asyncio.create_task(pool.run("b", 3 << 20, lambda: work("b")))
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*first, second)
    assert "b" in order[:2]


async def test_texts_that_wait_are_bounded_and_a_client_that_left_does_not_count() -> None:
    pool, release = TextPool(threads=2), threading.Event()
    size = TENANT_WAITING_BYTES_MAX // 4
    running = asyncio.create_task(pool.run("a", size, lambda: release.wait(LIMIT_S)))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(pool.run("a", size, lambda: True)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await pool.run("a", LARGE_BYTES + 1, lambda: True)
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    last = asyncio.create_task(pool.run("a", LARGE_BYTES + 1, lambda: True))
    others = [asyncio.create_task(pool.run(f"t{i}", size, lambda: release.wait(LIMIT_S))) for i in range(12)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as busy:
        await pool.run("late", 4 << 20, lambda: True)
    assert (busy.value.status, busy.value.headers["Retry-After"]) == (503, "1")
    release.set()
    await asyncio.gather(running, *waiting[1:], last, *others)
    assert not pool._large._lines


async def test_an_error_in_a_thread_reaches_its_request_and_frees_its_place() -> None:
    pool = TextPool()

    def fails() -> None:
        raise ApiError(400, "bad")

    for _ in range(5):
        with pytest.raises(ApiError):
            await pool.run("a", 1 << 20, fails)
    assert await pool.run("a", 1 << 20, lambda: 1) == 1


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

LINE = st.builds(
    TokenLogprob,
    st.integers(0, 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False)), max_size=4).map(tuple),
)


@QUIET
@given(first=st.lists(LINE), second=st.lists(LINE), start=st.integers(-9, 9), stop=st.integers(-9, 9))
def test_columns_read_as_the_lines_they_were_made_of(
    first: list[TokenLogprob], second: list[TokenLogprob], start: int, stop: int
) -> None:
    columns, lines = LogprobColumns(first), first + second
    columns.extend(LogprobColumns(second))
    assert list(columns) == lines
    assert list(columns[start:stop]) == lines[start:stop]
    assert [columns[i] for i in range(len(columns))] == lines
    assert bool(columns) == bool(lines)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_a_large_answer_comes_in_parts_and_is_the_same_as_a_stream(
    engine: ScriptedEngine, text: ModelText, path: str
) -> None:
    engine.info = replace(engine.info, context_tokens=4096)
    engine.script = lambda one: [97 + (one.sampling.choice + i) % 7 for i in range(3000)]
    fields: dict[str, object] = {"max_tokens": 700, "n": 2, "ignore_eos": True, "return_token_ids": True}
    fields |= {"logprobs": True, "top_logprobs": 9} if path == "chat" else {"logprobs": 9}
    with serving(engine, text, ApiSettings(("tiny",))) as served:
        ask = served.chat if path == "chat" else served.complete
        reply, streamed = ask(**fields), ask(**fields, stream=True)
        small = ask(max_tokens=2)
    assert "content-length" not in reply.headers
    assert len(reply.body) > 1 << 16
    assert "content-length" in small.headers
    choices = reply.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    for choice in choices:
        assert choice["token_ids"] == [97 + (choice["index"] + i) % 7 for i in range(700)]
        parts = [
            event["choices"][0]["logprobs"]
            for event in streamed.events()[:-1]
            if event["choices"][0]["index"] == choice["index"]
        ]
        for name in ("content",) if path == "chat" else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert choice["logprobs"][name] == [item for part in parts if part for item in part[name]]


def test_health_is_answered_while_a_large_answer_is_sent(engine: ScriptedEngine, text: ModelText) -> None:
    engine.info = replace(engine.info, context_tokens=8192)
    engine.script = lambda _: [97] * 8000
    engine.burst_tokens = 100
    with serving(engine, text, ApiSettings(("tiny",))) as served, in_background() as threads:
        answer: Future[Reply] = threads.submit(served.complete, max_tokens=3000, n=6, logprobs=20, ignore_eos=True)
        asked = 0
        while not answer.done():
            assert served.call("GET", "/health").status == 200
            asked += 1
        assert answer.result().status == 200
    assert asked > 3


async def test_a_slow_client_gets_what_was_left_behind_in_bounded_portions(text: ModelText) -> None:
    reader = ChoiceReader(0, text.detokenizer(), None, ())
    streams = ChoiceStreams([reader])
    for _ in range(3 * DELTAS_MAX):
        streams._heard(0, TokenBurst((97,), (), None))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    sizes = [len(await anext(streams)) for _ in range(3)]
    task.cancel()
    assert sizes == [DELTAS_MAX] * 3
    assert turns >= 2, "other work had its turn in between"


def test_a_slow_template_of_a_short_chat_holds_nobody_up(
    engine: ScriptedEngine, text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, render, in_time = threading.Event(), threading.Event(), ModelText.render_chat, []

    def slow(*arguments: Any) -> str:
        begun.set()
        in_time.append(may_end.wait(LIMIT_S / 4))
        return render(*arguments)

    monkeypatch.setattr(ModelText, "render_chat", slow)
    with serving(engine, text, KEYS) as served, ThreadPoolExecutor(1) as clients:
        chat = clients.submit(served.chat, ONE)
        assert begun.wait(LIMIT_S)
        assert served.call("GET", "/health").status == 200
        assert served.complete(TWO).status == 200
        may_end.set()
        assert chat.result(LIMIT_S).status == 200
    assert in_time == [True], "the others were answered only when the template had ended"
