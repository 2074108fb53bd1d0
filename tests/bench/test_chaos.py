"""What chaos asks, what it takes for the same answer, whom it hurts, and what it takes for a false suspicion."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from aiohttp import web

from baton.bench.chaos_cases import ChaosCase, draw_cases
from baton.bench.chaos_faults import FaultChooser, FaultKind, SeenInstance, SeenSuspicion
from baton.bench.chaos_request import SeenAnswer, ask, differences
from baton.bench.client import open_http


def chunk(index: int = 0, text: str = "", ids: tuple[int, ...] = (), finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "token_ids": list(ids), "finish_reason": finish, **more}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


def usage(tokens: int, attempts: int = 1) -> bytes:
    counts = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens, "baton": {"attempts": attempts}}
    return b"data: " + msgspec.json.encode({"choices": [], "usage": counts}) + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = (chunk(text="a", ids=(1,)), chunk(text="b", ids=(2,), finish="length"), usage(2), DONE)
STREAMED = ChaosCase(0, "/v1/completions", {"stream": True})


async def answered(*parts: bytes, status: int = 200, case: ChaosCase = STREAMED) -> SeenAnswer:
    """What a client makes of a server that says exactly this."""

    async def say(_request: web.Request) -> web.Response:
        return web.Response(body=b"".join(parts), status=status)

    app = web.Application()
    app.router.add_post(case.path, say)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with open_http(1) as http:
            return await ask(http, f"http://127.0.0.1:{runner.addresses[0][1]}", case, limit_s=30)
    finally:
        await runner.cleanup()


async def test_the_same_answer_is_no_difference() -> None:
    assert differences(await answered(*WHOLE), await answered(*WHOLE)) == []


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ((WHOLE[0], chunk(text="b", ids=(3,), finish="length"), usage(2), DONE), "tokens differ from number 1"),
        ((chunk(text="a", ids=(1,)), chunk(text="ab", ids=(2,), finish="length"), usage(2), DONE), "text differs at char"),
        ((chunk(text="a", ids=(1,)), chunk(text="b", ids=(2,), finish="stop"), usage(2), DONE), "finish reason stop"),
        ((*WHOLE[:2], usage(1), DONE), "usage says 1 tokens, 2 came"),
        ((*WHOLE[:2], DONE), "no usage"),
        (WHOLE[:3], "0 times [DONE]"),
        ((*WHOLE, DONE), "something came after [DONE]"),
        ((*WHOLE[:2], chunk(text="b"), usage(2), DONE), "went on after its end"),
        ((WHOLE[0], usage(1), DONE), "without an end"),
        ((WHOLE[0], b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
        ((WHOLE[0], b"data: {nonsense\n\n"), "not what was agreed on"),
        ((usage(0), DONE), "0 choices of 1"),
    ],
)  # fmt: skip
async def test_whatever_is_wrong_with_an_answer_is_a_difference(parts: tuple[bytes, ...], what: str) -> None:
    found = differences(await answered(*WHOLE), await answered(*parts))
    assert any(what in line for line in found), found


async def test_an_error_status_is_a_difference() -> None:
    found = differences(await answered(*WHOLE), await answered(b"too many", status=429))
    assert found == ["429: error: too many"]


async def test_a_request_moved_where_it_took_more_legs_than_it_has_choices() -> None:
    assert (await answered(*WHOLE[:2], usage(2, attempts=1), DONE)).moved == 0
    assert (await answered(*WHOLE[:2], usage(2, attempts=3), DONE)).moved == 2


async def test_log_probabilities_may_round_otherwise_but_not_shift() -> None:
    def with_logprobs(tokens: list[str], values: list[float]) -> tuple[bytes, ...]:
        lists = {"tokens": tokens, "token_logprobs": values, "text_offset": [0, 1]}
        return chunk(text="ab", ids=(1, 2), finish="length", logprobs=lists), usage(2), DONE

    before = await answered(*with_logprobs(["a", "b"], [-1.0, -2.0]))
    assert differences(before, await answered(*with_logprobs(["a", "b"], [-1.0, -2.0 + 1e-12]))) == []
    assert differences(before, await answered(*with_logprobs(["a", "b"], [-1.0, -2.1])))
    assert differences(before, await answered(*with_logprobs(["b", "a"], [-1.0, -2.0])))


def test_cases_are_of_every_kind_and_the_same_for_a_seed() -> None:
    cases = draw_cases(200, 7, "m")
    assert cases == draw_cases(200, 7, "m")
    kinds = {(case.path, case.is_streamed, case.choices, case.body["temperature"] == 0) for case in cases}
    assert len(kinds) == 16
    assert any(case.wants_stop for case in cases)
    assert any("logprobs" in case.body for case in cases)


def test_a_stop_string_is_taken_out_of_the_answer_where_it_is_whole() -> None:
    case = ChaosCase(0, "/v1/completions", {}, wants_stop=True)
    assert case.stopped_at("abcdef").body["stop"] == ["de", "never said"]
    assert "stop" not in case.stopped_at("ab\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}").body
    assert "stop" not in case.stopped_at("").body


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def seen(name: str, state: str = "ready", incarnation: int = 1) -> SeenInstance:
    return SeenInstance(name, name.partition("-")[0], state, pid=1, incarnation=incarnation)


FLEET = [seen("prefill-1"), seen("decode-1"), seen("decode-2")]


def faults(*kinds: FaultKind) -> FaultChooser:
    return FaultChooser(random.Random(1), kinds or tuple(FaultKind), {"prefill": 1, "decode": 2})


def test_nobody_is_hurt_while_a_role_has_no_spare() -> None:
    assert faults().draw(FLEET[:2], 0) is None
    assert faults().draw([*FLEET[:2], seen("decode-2", "draining")], 0) is None
    drawn = faults().draw(FLEET, 0)
    assert drawn is not None
    assert drawn.victim.role == "decode"  # there is only one of the other role


def test_every_kind_comes_once_before_one_comes_again() -> None:
    chooser = faults()
    drawn = [chooser.draw(FLEET, 0) for _ in range(2 * len(FaultKind))]
    kinds = [fault.kind for fault in drawn if fault is not None]
    assert set(kinds[: len(FaultKind)]) == set(kinds[len(FaultKind) :]) == set(FaultKind)


def test_who_is_hurt_is_no_spare_until_it_is_back() -> None:
    chooser = faults(FaultKind.KILL)
    first = chooser.draw(FLEET, 0)
    assert first is not None
    first.over_s = 0.0
    chooser.done.append(first)
    chooser.close_recovered(FLEET, 0, now_s=100.0)  # the router has not noticed yet: the same life
    assert chooser.draw(FLEET, 0) is None
    again = [seen(one.name, incarnation=2) if one.name == first.victim.name else one for one in FLEET]
    chooser.close_recovered(again, 5, now_s=100.0)
    assert chooser.draw(again, 5) is not None


def test_a_stop_is_over_some_time_after_the_instance_goes_on() -> None:
    chooser = faults(FaultKind.STOP)
    stop = chooser.draw(FLEET, 0)
    assert stop is not None
    chooser.done.append(stop)
    chooser.close_recovered(FLEET, 0, now_s=100.0)
    assert chooser.open == [stop]
    stop.over_s = 100.0
    chooser.close_recovered(FLEET, 0, now_s=100.1)
    assert chooser.open == [stop]
    chooser.close_recovered(FLEET, 0, now_s=102.0)
    assert chooser.open == []


def test_a_suspicion_is_explained_only_by_a_fault_of_that_instance_that_was_open() -> None:
    chooser = faults(FaultKind.KILL)
    fault = chooser.draw(FLEET, 10)
    assert fault is not None
    chooser.done.append(fault)
    faulty = fault.victim.name
    other = next(one.name for one in FLEET if one.name != faulty)
    assert not chooser.explain(SeenSuspicion(10, faulty, "suspected", ""))
    assert chooser.explain(SeenSuspicion(11, faulty, "suspected", ""))
    assert not chooser.explain(SeenSuspicion(11, other, "suspected", ""))
    fault.until = 12
    assert not chooser.explain(SeenSuspicion(13, faulty, "suspected", ""))
