"""`baton serve --speculate` with a real model in float64: exactly the answers of an instance that never guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.support.cluster import Body, all_at_once, cluster, complete, handed_over, tokens
from tests.support.server import ServerProcess, baton_serve

GUESSING = ("--speculate", "ngram", "--ngram-min", "1", "--draft-tokens", "5")
TIGHT = ("--kv-blocks", "28", "--reserve", "none")
"""Not enough for what is asked at once."""


def draw(seed: int, length: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(256) for _ in range(length)]


BODIES: list[Body] = [
    *({"prompt": draw(length, length)} for length in (17, 90)),
    *({"prompt": draw(seed, 20) * 4, "temperature": 0.4, "seed": seed, "top_p": 0.7} for seed in (1, 2)),
    {"prompt": draw(3, 40) * 2, "n": 2, "temperature": 0.8, "seed": 3, "frequency_penalty": 0.6, "logit_bias": {"65": 3}},
    {"prompt": [draw(4, 30), draw(5, 70)], "temperature": 0.5, "seed": 4, "top_p": 0.9, "presence_penalty": 0.5},
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tiny_options: tuple[str, ...]) -> tuple[str, ...]:
    own = ("--kv-memory", "64M", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "256")
    return (*tiny_options, *own)


@pytest.fixture(scope="module")
def plain(plain_tiny: ServerProcess) -> ServerProcess:
    return plain_tiny


@pytest.fixture(scope="module")
def guessing(model: tuple[str, ...]) -> Iterator[ServerProcess]:
    with baton_serve(*model, *GUESSING) as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain: ServerProcess) -> list[list[list[int]]]:
    return [tokens(plain.url, **body) for body in BODIES]


def drafts(server: ServerProcess) -> tuple[float, float]:
    return server.metric("baton_draft_tokens_total"), server.metric("baton_accepted_draft_tokens_total")


def test_guessing_gives_the_same_tokens_and_counts_what_it_guessed(
    guessing: ServerProcess, expected: list[list[list[int]]]
) -> None:
    assert all_at_once(guessing.url, BODIES) == expected
    made, accepted = drafts(guessing)
    assert 0 < accepted < made
    assert "up to 5 drafts by n-grams of 1 to 5" in guessing.output()


def test_log_probabilities_and_usage_are_those_of_each_token(plain: ServerProcess, guessing: ServerProcess) -> None:
    body = {"prompt": draw(9, 12) * 5, "logprobs": 2, "max_tokens": 30}
    one, other = (complete(server.url, **body).json() for server in (plain, guessing))
    assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"] == 30
    told, wanted = other["choices"][0]["logprobs"], one["choices"][0]["logprobs"]
    assert (told["tokens"], told["text_offset"]) == (wanted["tokens"], wanted["text_offset"])
    assert told["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-4)
    assert [list(line) for line in told["top_logprobs"]] == [list(line) for line in wanted["top_logprobs"]]


def test_a_stop_string_in_the_middle_of_an_accepted_run_ends_the_answer_there(
    plain: ServerProcess, guessing: ServerProcess
) -> None:
    body = {"prompt": draw(9, 12) * 5, "max_tokens": 40}
    text = complete(plain.url, **body).json()["choices"][0]["text"]
    for begin in range(4, 20, 5):
        one, other = (complete(url, stop=text[begin : begin + 2], **body).json() for url in (plain.url, guessing.url))
        assert one["choices"] == other["choices"]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]


def test_under_kv_pressure_too(model: tuple[str, ...], plain: ServerProcess) -> None:
    longer = [{**body, "max_tokens": 100} for body in BODIES]
    expected = [tokens(plain.url, **body) for body in longer]
    with baton_serve(*model, *GUESSING, *TIGHT) as server:
        assert all_at_once(server.url, longer) == expected
        assert sum(server.metric("baton_num_preemptions_total", cause=cause) for cause in ("growth", "self")) > 0
        assert drafts(server)[1] > 0


def test_naive_goes_the_same_way_and_guesses_nothing(model: tuple[str, ...], expected: list[list[list[int]]]) -> None:
    with baton_serve(*model, "--speculate", "naive") as server:
        assert all_at_once(server.url, BODIES) == expected
        assert drafts(server) == (0, 0)


def test_an_instance_that_decodes_what_another_prefilled_may_guess(
    model: tuple[str, ...], expected: list[list[list[int]]]
) -> None:
    with cluster(*model, decodes=(GUESSING,)) as both:
        (decode,) = both.decodes
        assert all_at_once(decode.url, BODIES) == expected
        assert handed_over(decode) > 0
        assert drafts(decode)[1] > 0
