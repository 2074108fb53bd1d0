"""`prompt_logprobs`, and `echo` with `logprobs`, as evaluators ask for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import openai
import pytest
from starlette.types import Message

from baton.api.generate import GenerationService
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText
from baton.api.original_request import OriginalRequest
from baton.api.paths import CHAT_PATH, COMPLETION_PATH
from baton.api.prepare import PreparedRequest, RequestPreparer
from baton.api.request_costs import RequestCosts, cost_of
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.settings import ApiSettings
from baton.api.slot_shares import SlotShares
from baton.api.submissions import RequestRules
from baton.api.whole_answer import PART_BYTES, QUICK_BYTES, next_part
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.support.unconstrained import unconstrained

PROMPT = "hello é"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as made:
        yield made


def values(count: int) -> list[float | None]:
    """As the engine of these tests gives them: the first three again, of which the first coming counts."""
    return [None, *[pytest.approx(-0.25)] * min(count - 1, 3), *[pytest.approx(-0.26)] * max(0, count - 4)]


def prepared(engine: ScriptedEngine, text: ModelText, path: str, body: dict[str, object]) -> PreparedRequest:
    preparer = RequestPreparer(text, lambda: RequestRules(engine.info, frozenset(), SamplingDefaults()), ("tiny",))
    return preparer.prepare(OriginalRequest(path, json.dumps(body).encode(), "", "id", 1, 1))


def cost(engine: ScriptedEngine, text: ModelText, path: str, body: dict[str, object]) -> int:
    request = prepared(engine, text, path, body)
    return cost_of(request.group, engine.info, request.prompt_units)


def test_prompt_logprobs_of_a_completion_are_those_of_vllm(client: openai.OpenAI, text: ModelText) -> None:
    ids = text.encode(PROMPT)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, extra_body={"prompt_logprobs": 2})
    lines: list[Any] = answer.model_dump()["choices"][0]["prompt_logprobs"]
    assert lines[0] is None
    assert [list(line) for line in lines[1:]] == [[str(token), str(token + 1)] for token in ids[1:]]
    assert [line[str(token)]["logprob"] for line, token in zip(lines[1:], ids[1:], strict=True)] == values(len(ids))[1:]
    assert lines[1][str(ids[1])] == {"logprob": -0.25, "rank": 1, "decoded_token": text.piece(ids[1]).decode()}
    assert lines[1][str(ids[1] + 1)]["rank"] == 2
    assert answer.choices[0].logprobs is None


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices_and_are_computed_once(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, n=2, max_tokens=2, extra_body={"prompt_logprobs": 0})
    lines: list[Any] = answer.model_dump()["prompt_logprobs"]
    assert [len(line or ()) for line in lines] == [0, *[1] * (len(engine.groups[0][0].prompt) - 1)]
    assert [one.sampling.prompt_logprobs for one in engine.groups[0]] == [0, None]


def test_an_echo_has_log_probabilities_of_prompt_and_answer(client: openai.OpenAI, text: ModelText) -> None:
    ids = text.encode(PROMPT)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, n=2)
    for choice in answer.choices:
        assert choice.text.startswith(PROMPT)
        lists = choice.logprobs
        assert lists is not None
        assert lists.token_logprobs == [*values(len(ids)), -0.5, -0.5, -0.5]
        assert lists.tokens is not None
        assert len(lists.tokens) == len(lists.text_offset or ()) == len(lists.top_logprobs or ()) == len(ids) + 3
        assert lists.tokens[:2] == ["hello", " "]
        assert lists.text_offset is not None
        assert lists.text_offset[:3] == [0, 5, 6]
        assert lists.text_offset[len(ids)] == len(PROMPT)
        assert lists.top_logprobs is not None
        assert lists.top_logprobs[0] is None
        assert [list(top) for top in lists.top_logprobs[1:]] == [[token] for token in lists.tokens[1:]]


def test_without_an_answer_the_prompt_stands_alone(client: openai.OpenAI, text: ModelText) -> None:
    prompts: list[Any] = [text.encode(PROMPT), text.encode("other")]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=0, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == [PROMPT, "other"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    for choice, ids in zip(answer.choices, prompts, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == values(len(ids))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_a_stream_begins_with_the_prompt_and_its_log_probabilities(client: openai.OpenAI, text: ModelText) -> None:
    ids = text.encode(PROMPT)
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, echo=True, logprobs=0, stream=True))
    found = [chunk.choices[0] for chunk in chunks]
    assert found[0].text.startswith(PROMPT)
    told = [value for choice in found if choice.logprobs for value in choice.logprobs.token_logprobs or ()]
    assert told == [*values(len(ids)), -0.5, -0.5]


def test_what_cannot_be_given_is_refused_by_name(served: Served) -> None:
    refusals: list[tuple[dict[str, object], str]] = [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n"),
    ]
    for fields, field in refusals:
        reply = served.complete(**fields)
        assert (reply.status, reply.error["param"]) == (400, field)
    assert served.chat(max_tokens=0).status == 400
    assert served.chat(prompt_logprobs=1, stream=True).error["param"] == "prompt_logprobs"


def test_prompt_tokens_count_towards_what_a_request_may_cost(engine: ScriptedEngine, text: ModelText) -> None:
    with serving(engine, text, ApiSettings(served_model_names=("tiny",), request_cost_max=100)) as served:
        assert served.complete(prompt=[5] * 45, max_tokens=9, prompt_logprobs=1).status == 200
        reply = served.complete(prompt=[5] * 46, max_tokens=9, prompt_logprobs=1)
    assert (reply.status, reply.error["code"]) == (400, "request_too_costly")


@pytest.mark.parametrize(
    ("fields", "units"),
    [
        ({}, 0),
        ({"prompt_logprobs": 4}, 5),
        ({"echo": True}, 1),
        ({"logprobs": 2}, 0),
        ({"echo": True, "logprobs": 2}, 4),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 4}, 9),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 4, "return_token_ids": True}, 10),
        ({"return_token_ids": True}, 1),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_completion_costs_what_each_choice_repeats_of_its_prompt(
    engine: ScriptedEngine, text: ModelText, fields: dict[str, object], units: int, n: int
) -> None:
    answer_units = 2 * n * 10 * (3 if "logprobs" in fields else 1)
    body = {"prompt": [[5] * 20, [6] * 30], "max_tokens": 10, "n": n} | fields
    assert cost(engine, text, COMPLETION_PATH, body) == answer_units + n * 50 * units


def test_a_chat_repeats_its_prompt_once(engine: ScriptedEngine, text: ModelText) -> None:
    body: dict[str, object] = {"messages": HI, "max_tokens": 10, "n": 3}
    plain = cost(engine, text, CHAT_PATH, body)
    assert plain == 30
    one_copy = cost(engine, text, CHAT_PATH, body | {"return_token_ids": True}) - plain
    assert one_copy > 0
    assert cost(engine, text, CHAT_PATH, body | {"prompt_logprobs": 4}) == plain + 5 * one_copy


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 0}, {"echo": True}, {"echo": True, "stream": True}, {"return_token_ids": True}]
)
def test_a_prompt_repeated_by_many_choices_is_refused_beyond_the_budget(
    engine: ScriptedEngine, text: ModelText, fields: dict[str, object]
) -> None:
    settings = ApiSettings(served_model_names=("tiny",), request_cost_max=400)
    with serving(engine, text, settings) as served:
        assert served.complete(prompt=[5] * 99, max_tokens=1, n=4, **fields).status == 200
        reply = served.complete(prompt=[5] * 100, max_tokens=1, n=4, **fields)
        assert served.complete(prompt=[5] * 100, max_tokens=1, n=4).status == 200
    assert (reply.status, reply.error["code"]) == (400, "request_too_costly")


def test_a_prompt_repeated_by_an_open_answer_counts_towards_its_key(engine: ScriptedEngine, text: ModelText) -> None:
    engine.hangs_after = 0
    settings = ApiSettings(served_model_names=("tiny",), key_cost_max=400)
    with serving(engine, text, settings) as served, ThreadPoolExecutor(1) as threads:
        ask = partial(served.complete, prompt=[5] * 60, max_tokens=1, n=4, echo=True)
        first = threads.submit(ask, {"X-Request-Id": "first"})
        while not engine.groups:
            time.sleep(0.005)
        reply = ask()
        assert served.call("DELETE", "/v1/requests/first").status == 200
        assert first.result(20).status == 200
    assert (reply.status, reply.error["code"]) == (429, "rate_limited")


LONG = {"prompt": [[97 + i % 7 for i in range(9000)]], "max_tokens": 2}


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_prompt_is_repeated_whole(engine: ScriptedEngine, text: ModelText, stream: bool) -> None:
    engine.info = replace(engine.info, context_tokens=16384)
    (ids,) = LONG["prompt"]
    fields = {"echo": True, "logprobs": 3, "return_token_ids": True, "stream": stream}
    with serving(engine, text, ApiSettings(served_model_names=("tiny",))) as served:
        reply = served.complete(**LONG, **fields)
        chat = served.chat(messages=[{"role": "user", "content": "abcdefg" * 1500}], return_token_ids=True, stream=stream)
    first: Any = reply.events()[0]["choices"][0] if stream else reply.json()["choices"][0]
    assert first["prompt_token_ids"] == ids
    assert first["text"].startswith(text.decode(ids))
    lists = first["logprobs"]
    assert lists["tokens"][: len(ids)] == [text.piece(token).decode() for token in ids]
    assert lists["token_logprobs"][: len(ids)] == values(len(ids))
    assert [len(top or ()) for top in lists["top_logprobs"][: len(ids)]] == [0, *[3] * (len(ids) - 1)]
    assert len(lists["text_offset"]) == len(lists["tokens"])
    top: Any = chat.events()[0] if stream else chat.json()
    assert top["prompt_token_ids"] == engine.groups[-1][0].prompt.tolist()


@pytest.mark.parametrize("fields", [{"n": 8}, {"stream": True, "n": 8}, {"stream": True, "logprobs": 5}])
def test_health_is_answered_while_a_long_prompt_is_repeated(
    engine: ScriptedEngine, text: ModelText, fields: dict[str, object]
) -> None:
    engine.info = replace(engine.info, context_tokens=1 << 17)
    body = {"prompt": [97] * 100_000, "max_tokens": 1, "echo": True, "return_token_ids": True}
    with serving(engine, text, ApiSettings(served_model_names=("tiny",))) as served, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(served.complete, **body, **fields)
        asked = 0
        while not answer.done():
            assert served.call("GET", "/health").status == 200
            asked += 1
        assert answer.result().status == 200
    assert asked > 3


async def test_pieces_of_a_large_answer_leave_others_their_turn() -> None:
    pieces, made, seen = 100, 0, list[int]()

    def small_pieces() -> Iterator[bytes]:
        nonlocal made
        for _ in range(pieces):
            made += 1
            yield b"x" * (QUICK_BYTES // 4)

    async def other() -> None:
        while True:
            seen.append(made)
            await asyncio.sleep(0)

    task, source, is_last = asyncio.create_task(other()), small_pieces(), False
    while not is_last:
        _, is_last = await next_part(source, asyncio.Lock())
    task.cancel()
    assert max(later - earlier for earlier, later in pairwise([*seen, made])) <= 10


async def test_a_stream_that_nobody_reads_any_more_is_not_encoded_on(engine: ScriptedEngine, text: ModelText) -> None:
    engine.info = replace(engine.info, context_tokens=1 << 17)
    server = GenerationService(
        engine, Metrics(engine, "tiny"), RequestCosts(1 << 30, 1 << 30), SlotShares(lambda: 0, 1.0, 0)
    )
    left, sizes = asyncio.Event(), list[int]()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sizes.append(len(message.get("body", b"")))
        if sizes[-1]:
            left.set()

    body: dict[str, object] = {"prompt": [97] * 100_000, "max_tokens": 1, "return_token_ids": True, "stream": True}
    run = await server.accept(prepared(engine, text, COMPLETION_PATH, body), receive, unconstrained)
    await (await server.respond(run))({"type": "http"}, receive, send)
    assert sum(sizes) < 3 * PART_BYTES


def test_an_answer_whose_prompt_was_lost_fails_rather_than_lack_it(engine: ScriptedEngine, served: Served) -> None:
    engine.loses_prompts = True
    reply = served.complete(prompt_logprobs=0)
    assert (reply.status, reply.error["code"]) == (503, "request_failed")
