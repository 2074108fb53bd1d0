"""The embedded default model, through the command and the official client: what a newcomer does first."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import openai
import pytest

from tests.support.readme import first_request
from tests.support.server import ServerProcess, baton_serve

pytestmark = pytest.mark.smollm2

QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with baton_serve("--max-num-seqs", "8") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    """README's first request, with the defaults of the model: greedy, so that no seed decides the answer."""
    for _ in range(3):
        answer = client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": QUESTION}])
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 256


def said(server: ServerProcess) -> str:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/chat/completions", content=first_request(), headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_the_first_request_of_the_readme_is_answered_with_paris(server: ServerProcess) -> None:
    assert "Paris" in said(server)


def test_streamed_text_is_the_same_as_whole_text(client: openai.OpenAI) -> None:
    ask = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Count to five — in words, with 🎉."}],
        "max_tokens": 48,
    }
    whole = client.chat.completions.create(**ask, seed=4)
    pieces = client.chat.completions.create(**ask, seed=4, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == whole.choices[0].message.content


def test_a_second_turn_reuses_the_first(client: openai.OpenAI) -> None:
    history = [{"role": "user", "content": QUESTION + " Please mention the river."}]
    first = client.chat.completions.create(model="smollm2", messages=history, max_tokens=24, temperature=0)
    history += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.chat.completions.create(model="smollm2", messages=history, max_tokens=8, temperature=0)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 32
