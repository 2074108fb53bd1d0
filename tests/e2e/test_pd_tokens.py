"""Prefill here, decode there, as real processes: exactly the tokens of one instance that does both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema_rs
import pytest

from baton.kv.transfer_contract import available
from tests.support.cluster import (
    Body,
    Cluster,
    all_at_once,
    cluster,
    complete,
    handed_over,
    tokens,
    tokens_of,
    wait_until,
)
from tests.support.server import ServerProcess, baton_serve

CHUNKED = ("--max-num-batched-tokens", "48", "--max-num-seqs", "16", "--max-model-len", "512")
SCRIPTED = ("--executor", "scripted", "--served-model-name", "m", *CHUNKED)
ATTEMPTS_MAX = 10
TIGHT = ("--kv-blocks", "34", "--reserve", "none", "--step-ms", "8")
"""Room for one request of the longest kind, and for the beginnings of several, which are at it long enough to meet."""


def draw(seed: int, length: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(256) for _ in range(length)]


SHARED = draw(0, 100)
BODIES: list[Body] = [
    *({"prompt": draw(length, length)} for length in (17, 64, 150, 333)),
    *({"prompt": draw(length, length), "temperature": 1.0, "seed": length} for length in (18, 65, 151, 200)),
    *({"prompt": [*SHARED, *draw(more, more)]} for more in (3, 30)),
    {"prompt": draw(5, 90), "n": 2, "temperature": 0.8, "seed": 3},
    {"prompt": [draw(6, 40), draw(7, 70)]},
    {"prompt": [draw(8, 40), draw(9, 70)], "n": 2, "temperature": 1.0, "seed": 4, "top_p": 0.9, "presence_penalty": 0.5},
]
"""Greedy and seeded, one to many chunks, shared beginnings, several choices, several prompts."""
PROMPTS = sum(len(body["prompt"]) if isinstance(body["prompt"][0], list) else 1 for body in BODIES)
"""Of several choices the first one is handed over, and the others share its KV."""

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green"]},
        "old": {"type": "boolean"},
    },
    "required": ["name", "colour", "old"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["scripted", pytest.param("tiny", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tiny_options: tuple[str, ...]) -> tuple[str, ...]:
    return SCRIPTED if request.param == "scripted" else (*tiny_options, "--kv-memory", "64M", *CHUNKED)


@pytest.fixture(scope="module")
def mixed(request: pytest.FixtureRequest, model: tuple[str, ...]) -> Iterator[ServerProcess]:
    if model is SCRIPTED:
        with baton_serve(*model) as server:
            yield server
    else:
        yield request.getfixturevalue("plain_tiny")


@pytest.fixture(scope="module")
def expected(mixed: ServerProcess) -> list[list[list[int]]]:
    return [tokens(mixed.url, **body) for body in BODIES]


@pytest.fixture(scope="module")
def three(model: tuple[str, ...]) -> Iterator[Cluster]:
    """One that prefills for three: by shared memory, by TCP, and into a pool too small for what it is asked.

    And for a fourth, which ends what it preempts.
    """
    decodes = (("--transfer", "shm"), ("--transfer", "tcp"), TIGHT, (*TIGHT, "--on-preempt", "reschedule"))
    with cluster(*model, decodes=decodes) as running:
        yield running


@pytest.mark.parametrize("taker", [0, 1, 2], ids=["shm", "tcp", "tight"])
def test_one_request_after_the_other_gets_the_tokens_of_a_mixed_instance(
    three: Cluster, expected: list[list[list[int]]], taker: int
) -> None:
    server, before = three.decodes[taker], handed_over(three.decodes[taker])
    assert [tokens(server.url, **body) for body in BODIES] == expected
    assert handed_over(server) > before
    three.settle()


@pytest.mark.slow
@pytest.mark.skipif(available("mooncake") is not None, reason=f"mooncake: {available('mooncake')}")
def test_kv_may_travel_by_mooncake(model: tuple[str, ...], expected: list[list[list[int]]]) -> None:
    with cluster(*model, "--transfer", "mooncake", "--trust-network") as running:
        (server,) = running.decodes
        assert all_at_once(server.url, BODIES) == expected
        assert handed_over(server) > 0
        running.settle()


@pytest.mark.parametrize("taker", [0, 1], ids=["shm", "tcp"])
def test_a_constrained_answer_that_is_handed_over_keeps_its_form_and_its_tokens(
    three: Cluster, mixed: ServerProcess, taker: int
) -> None:
    server, before = three.decodes[taker], handed_over(three.decodes[taker])
    for seed in range(4):
        body = {
            "prompt": draw(300 + 10 * taker + seed, 90), "guided_json": FORM, "ignore_eos": False, "temperature": 1.0,
            "seed": seed, "max_tokens": 400,
        }  # fmt: skip
        answer, wanted = complete(server.url, **body).json(), complete(mixed.url, **body).json()
        assert tokens_of(answer) == tokens_of(wanted)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(FORM, json.loads(choice["text"]))
    assert handed_over(server) - before == 4
    three.settle()


def test_three_that_decode_share_one_that_prefills(three: Cluster, expected: list[list[list[int]]]) -> None:
    steps = three.prefill.metric("baton_engine_steps_total")
    sides = three.decodes[:3]
    before = [handed_over(server) for server in sides]
    fresh: list[Body] = [{**body, "cache_salt": f"three {at}"} for at, body in enumerate(BODIES)]  # nobody has cached it
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda server: all_at_once(server.url, fresh), sides))
    assert answers == [expected] * 3
    assert [handed_over(server) - made for server, made in zip(sides, before, strict=True)][:2] == [PROMPTS, PROMPTS]
    assert three.prefill.metric("baton_engine_steps_total") - steps > PROMPTS
    three.settle()


def test_a_pool_too_small_makes_requests_yield_and_come_back_with_the_same_tokens(
    three: Cluster, mixed: ServerProcess
) -> None:
    server = three.decodes[2]
    body = {"prompt": [draw(100 + at, 40) for at in range(8)], "max_tokens": 80, "seed": 1, "temperature": 0.9}
    assert tokens(server.url, **body) == tokens(mixed.url, **body)
    assert sum(server.metric("baton_num_preemptions_total", cause=cause) for cause in ("growth", "self")) > 0
    three.settle()


def test_the_peer_did_the_prefill_and_the_bill_says_so(three: Cluster) -> None:
    answer = complete(three.decodes[0].url, prompt=draw(50, 200), baton_usage=True).json()
    bill = answer["usage"]["baton"]
    assert bill["attempts"] == 1
    assert bill["prefill_ms"] > 0
    arrived = "baton_kv_arrived_bytes_total"
    wait_until(lambda: three.decodes[0].metric(arrived) > 0 < three.decodes[1].metric(arrived), "the bytes in the metrics")


def test_what_the_taker_has_already_is_not_sent_and_what_the_giver_has_is_not_computed(
    three: Cluster, mixed: ServerProcess
) -> None:
    first, second = three.decodes[:2]
    prompt = draw(60, 160)
    wanted = tokens(mixed.url, prompt=prompt)

    def cached(server: ServerProcess, asked: list[int]) -> int:
        answer = complete(server.url, prompt=asked).json()
        assert tokens_of(answer) == (wanted if asked == prompt else tokens(mixed.url, prompt=asked))
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    hits = three.prefill.metric("baton_prefix_cache_hits_total")
    assert cached(first, prompt) == 0
    assert cached(second, prompt) == 144  # of its peer: it had all whole blocks, and computed the last one
    assert three.prefill.metric("baton_prefix_cache_hits_total") - hits == 144
    assert cached(first, [*prompt, *draw(61, 50)]) == 160  # its own, prompt and answer alike
    three.settle()


def test_who_may_not_resume_is_told_what_was_generated_and_a_client_can_go_on_from_there(
    three: Cluster, mixed: ServerProcess
) -> None:
    prompts = [draw(200 + at, 40) for at in range(8)]
    wanted = tokens(mixed.url, prompt=prompts, max_tokens=80)
    server = three.decodes[3]
    ends = ask_for(server, prompts, 80)
    assert any(reason == "pd_reschedule" for reason, _ in ends)
    for prompt, (reason, given), whole in zip(prompts, ends, wanted, strict=True):
        assert given == whole[: len(given)]
        assert (reason == "pd_reschedule") == (len(given) < 80)
        assert go_on(server, prompt, given, 80) == whole
    three.settle()


def ask_for(server: ServerProcess, prompts: list[list[int]], max_tokens: int) -> list[tuple[str, list[int]]]:
    """How each ended, and everything it generated."""
    choices = complete(server.url, prompt=prompts, max_tokens=max_tokens).json()["choices"]
    ends = {
        choice["index"]: (choice["finish_reason"], choice.get("completion_token_ids") or choice["token_ids"])
        for choice in choices
    }
    return [ends[index] for index in range(len(prompts))]


def go_on(server: ServerProcess, prompt: list[int], given: list[int], max_tokens: int) -> list[int]:
    """Ask for the rest, as often as it takes."""
    for _ in range(ATTEMPTS_MAX):
        if len(given) < max_tokens:
            ((_, more),) = ask_for(server, [[*prompt, *given]], max_tokens - len(given))
            given = given + more
    return given
