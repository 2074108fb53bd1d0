"""Every feature of the surface, seen by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from baton.api.model_text import ModelText
from tests.api.conftest import REPLY, Served
from tests.api.engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


def test_a_chat_answer_is_whole(client: openai.OpenAI, text: ModelText) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(text.encode(REPLY)) + 1, "the end-of-text token counts"
    assert answer.usage.prompt_tokens == len(text.encode("<|user|>hi<|end|><|assistant|>"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_a_chat_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, engine: ScriptedEngine, burst: int) -> None:
    engine.burst_tokens = burst
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_async_client_streams_several_choices_with_usage(served: Served, engine: ScriptedEngine) -> None:
    engine.cached_tokens = 3
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, n=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == dict.fromkeys(range(3), REPLY)
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.completion_tokens == 3 * 17


def test_choices_are_one_group_with_one_seed_and_a_leader(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.completions.create(model="tiny", prompt=["hi", "ho"], n=2, seed=42, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    (group,) = engine.groups
    assert [(s.sampling.seed, s.sampling.choice) for s in group] == [(42, 0), (42, 1), (42, 0), (42, 1)]
    ids = [s.request_id for s in group]
    assert len(set(ids)) == 4
    assert [s.leader for s in group] == [None, ids[0], None, ids[2]]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


def test_without_a_seed_each_request_draws_its_own(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for _ in range(2):
        client.completions.create(model="tiny", prompt="hi", n=2)
    seeds = [{s.sampling.seed for s in group} for group in engine.groups]
    assert [len(seed) for seed in seeds] == [1, 1]
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("burst", [1, 2, 100])
@pytest.mark.parametrize("stop", ["e end", ["nothing", "e end", "end."]])
def test_a_stop_string_ends_text_tokens_and_usage(
    client: openai.OpenAI, engine: ScriptedEngine, text: ModelText, burst: int, stop: str | list[str]
) -> None:
    engine.burst_tokens, engine.cached_tokens = burst, 2
    answer = client.chat.completions.create(
        model="tiny", messages=HI, stop=stop, logprobs=True, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    kept = len(text.encode("hello world, 你好 é! The end"))
    assert choice.message.content == "hello world, 你好 é! Th"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == kept
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == kept
    assert len(choice.model_extra["token_ids"]) == kept
    assert (engine.streams[0].kept, engine.streams[0].aborted) == (kept, False)


def test_a_stop_string_may_be_shown_and_waits_for_min_tokens(client: openai.OpenAI) -> None:
    shown = client.completions.create(
        model="tiny", prompt="hi", stop="world", extra_body={"include_stop_str_in_output": True}
    )
    assert shown.choices[0].text == "hello world"
    late = client.completions.create(model="tiny", prompt="hi", stop=["hello", "é"], extra_body={"min_tokens": 2})
    assert late.choices[0].text == "hello world, 你好 "


def test_chat_logprobs_have_bytes_and_alternatives(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [0xC3, 0xA9, 104]
    answer = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.bytes) for entry in content] == [
        ("bytes:\\xc3", [0xC3]),
        ("bytes:\\xa9", [0xA9]),
        ("h", [104]),
    ]
    assert [(alternative.token, alternative.logprob) for alternative in content[2].top_logprobs] == [
        ("h", -0.5),
        ("i", -1.5),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_need_no_alternatives(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        chunks = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True)
        entries = [
            entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
        ]
    else:
        answer = client.chat.completions.create(model="tiny", messages=HI, logprobs=True)
        assert answer.choices[0].logprobs is not None
        entries = list(answer.choices[0].logprobs.content or [])
    assert len(entries) == 17
    assert all(entry.top_logprobs == [] for entry in entries)


def test_completion_logprobs_say_where_each_token_begins(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hi", logprobs=2, max_tokens=4)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "hello world, "
    assert logprobs is not None
    assert logprobs.tokens == ["hello", " world", ",", " "]
    assert logprobs.text_offset == [0, 5, 11, 12]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[2] == {",": -0.5, "-": -1.5}
    assert answer.choices[0].finish_reason == "length"


def test_a_completion_streams(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="tiny", prompt="hi", stream=True, logprobs=0, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == REPLY
    offsets = [o for chunk in chunks[:-1] if chunk.choices[0].logprobs for o in chunk.choices[0].logprobs.text_offset or []]
    assert offsets == sorted(offsets)
    assert len(offsets) == 17
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 17


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[104, 105]]),
        (["hi", "ho"], [[104, 105], [104, 111]]),
        ([104, 0], [[104, 0]]),
        ([[104], [105, 0]], [[104], [105, 0]]),
    ],
)
def test_prompts_come_in_four_forms(
    client: openai.OpenAI,
    engine: ScriptedEngine,
    prompt: str | list[str] | list[int] | list[list[int]],
    ids: list[list[int]],
) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt)
    assert [choice.text for choice in answer.choices] == [REPLY] * len(ids)
    assert [submission.prompt.tolist() for submission in engine.groups[0]] == ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["say: ", [115, 97, 121, 58, 32]])
def test_echo_gives_the_prompt_first(client: openai.OpenAI, stream: bool, prompt: str | list[int]) -> None:
    if stream:
        chunks = client.completions.create(model="tiny", prompt=prompt, echo=True, stream=True)
        shown = "".join(chunk.choices[0].text for chunk in chunks)
    else:
        shown = client.completions.create(model="tiny", prompt=prompt, echo=True).choices[0].text
    assert shown == "say: " + REPLY


def test_content_parts_are_joined_and_developer_is_the_system(
    client: openai.OpenAI, engine: ScriptedEngine, text: ModelText
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(
        model="tiny", messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    )
    rendered = text.decode(engine.groups[0][0].prompt.tolist())
    assert rendered == "<|system|>be kind<|end|><|user|>one\ntwo<|end|><|assistant|>"


def test_every_sampling_field_arrives(client: openai.OpenAI, engine: ScriptedEngine, text: ModelText) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=HI,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"5": -100, "0": 3},
        max_completion_tokens=7,
        seed=-1,
        user="somebody",
        metadata={"any": "thing"},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "stop_token_ids": [7],
            "min_tokens": 2,
            "cache_salt": "mine",
            "unheard_of": 1,
        },
    )
    submission = engine.groups[0][0]
    sampling = submission.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1.5, 1.1)
    assert sampling.logit_bias == ((0, 3.0), (5, -100.0))
    assert sampling.stop_token_ids == (7, min(text.eos_ids))
    assert (sampling.min_tokens, sampling.logprobs, submission.max_tokens) == (2, None, 7)
    assert 0 <= sampling.seed < 2**63
    assert len(submission.salt) == 16


def test_the_model_s_defaults_hold_where_the_request_does_not_say(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(model="tiny-alias", prompt="hi")
    client.completions.create(model="tiny", prompt="hi", temperature=0, extra_body={"top_k": -1, "ignore_eos": True})
    said, overridden = (group[0].sampling for group in engine.groups)
    assert (said.temperature, said.top_k, said.top_p, said.min_p) == (0.6, 20, 1.0, 0.0)
    assert (overridden.temperature, overridden.top_k, overridden.stop_token_ids) == (0.0, 0, ())


def test_a_client_s_own_stop_token_is_not_shown_and_is_counted(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hi", extra_body={"stop_token_ids": [ord(",")]})
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_token_ids_are_returned_as_vllm_does(client: openai.OpenAI, text: ModelText) -> None:
    ids = [*text.encode(REPLY), min(text.eos_ids)]
    asked = {"return_token_ids": True}
    whole = client.chat.completions.create(model="tiny", messages=HI, extra_body=asked)
    assert whole.choices[0].model_extra["token_ids"] == ids
    prompt_ids = whole.model_extra["prompt_token_ids"]
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True, extra_body=asked))
    assert chunks[0].model_extra["prompt_token_ids"] == prompt_ids
    assert [i for chunk in chunks for i in chunk.choices[0].model_extra["token_ids"]] == ids
    completion = client.completions.create(model="tiny", prompt="hi", extra_body=asked)
    assert completion.choices[0].model_extra["token_ids"] == ids
    assert completion.choices[0].model_extra["prompt_token_ids"] == [104, 105]
    first, *_ = client.completions.create(model="tiny", prompt="hi", stream=True, extra_body=asked)
    assert first.choices[0].model_extra["prompt_token_ids"] == [104, 105]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-alias"]
    assert client.models.retrieve("tiny-alias").owned_by == "baton"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_template_arguments_reach_the_template(client: openai.OpenAI, engine: ScriptedEngine, text: ModelText) -> None:
    asked = {"add_generation_prompt": False, "chat_template_kwargs": {"mood": "gaily"}}
    client.chat.completions.create(model="tiny", messages=HI, extra_body=asked)
    assert text.decode(engine.groups[0][0].prompt.tolist()) == "<|user|>hi<|end|>gaily"


def test_a_request_id_comes_back_and_errors_have_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, extra_headers={"X-Request-Id": "mine-1"})
    assert answer._request_id == "mine-1"
    assert answer.id == "chatcmpl-mine-1"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[])
    assert caught.value.request_id
    assert caught.value.param == "messages"


def test_an_answer_continues_the_last_message(client: openai.OpenAI, engine: ScriptedEngine, text: ModelText) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, <|end|> "}]
    client.chat.completions.create(model="tiny", messages=messages, extra_body={"continue_final_message": True})
    continued = list(engine.groups[-1][0].prompt)
    client.chat.completions.create(model="tiny", messages=messages, extra_body={"add_generation_prompt": False})
    ended = list(engine.groups[-1][0].prompt)
    assert text.decode(continued).endswith("Well, <|end|> ")
    assert ended[: len(continued)] == continued
    assert len(ended) > len(continued)


@pytest.mark.parametrize(
    ("last", "further"),
    [
        ({"role": "user", "content": "hi"}, {}),
        ({"role": "assistant", "content": ""}, {}),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}),
    ],
)
def test_only_a_message_of_the_assistant_is_continued(client: openai.OpenAI, last: Any, further: dict[str, bool]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[last], extra_body={"continue_final_message": True, **further})
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize("n", [1, 2])
def test_every_chunk_may_have_the_usage_so_far(client: openai.OpenAI, n: int) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(model="tiny", prompt="hello", n=n, stream=True, stream_options=options))
    chunks_of_chat = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=n, stream=True, stream_options=options
        )
    )
    for stream in (chunks, chunks_of_chat):
        counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
        assert len(counts) == len(stream)
        assert counts == sorted(counts)
        assert counts[-2] == counts[-1]
        assert len({chunk.usage.prompt_tokens for chunk in stream if chunk.usage is not None}) == 1
