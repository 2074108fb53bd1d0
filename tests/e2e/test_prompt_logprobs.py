"""Log-probabilities of prompts from real processes: the bodies of an evaluator, one server and a router."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.server import ServerProcess, baton_router, baton_serve
from tests.support.waiting import wait_until

SCRIPTED = ("--executor", "scripted", "--cluster-key", "a cluster key of the tests")
SERVES = (*SCRIPTED, "--max-num-batched-tokens", "64", "--max-num-seqs", "8")
"""Prompts of these tests take several chunks."""
CONTEXTS = [list(range(40, 160)), [70, 71], list(range(90, 120))]
CONTINUATIONS = [[65, 66, 67], [72], [73, 74]]


def post(url: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with baton_serve(*SERVES) as running:
        yield running


@pytest.fixture(scope="module")
def router() -> Iterator[ServerProcess]:
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(baton_router(*SCRIPTED))
        stack.enter_context(baton_serve(*SERVES, "--router", made.join, wait=False))

        def serves() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return bool(post(made.url, {"prompt": "x", "max_tokens": 1}))
            return False

        wait_until(serves)
        yield made


def lm_eval_body(max_tokens: int = 1) -> dict[str, Any]:
    """As lm-eval's `local-completions` asks for a log-likelihood: context and continuation as token ids, one token more."""
    prompts = [context + rest for context, rest in zip(CONTEXTS, CONTINUATIONS, strict=True)]
    return {
        "model": "scripted", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip


def log_likelihoods(answer: Any) -> list[tuple[float, bool]]:
    """As lm-eval reads them."""
    found = []
    for choice, context in zip(sorted(answer["choices"], key=lambda one: one["index"]), CONTEXTS, strict=True):
        lists = choice["logprobs"]
        values, tops = (lists[name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return found


@pytest.mark.parametrize("entrance", ["server", "router"])
def test_an_evaluator_gets_log_likelihoods(entrance: str, request: pytest.FixtureRequest) -> None:
    process: ServerProcess = request.getfixturevalue(entrance)
    for _ in range(2):  # the second time everything is in the prefix cache
        answer = post(process.url, lm_eval_body())
        assert log_likelihoods(answer) == [(-float(sum(rest)), True) for rest in CONTINUATIONS]
        lists = answer["choices"][0]["logprobs"]
        assert lists["token_logprobs"][:-1] == [None, *(-float(token) for token in CONTEXTS[0][1:] + CONTINUATIONS[0])]


@pytest.mark.parametrize("entrance", ["server", "router"])
def test_the_prompt_alone_has_the_same(entrance: str, request: pytest.FixtureRequest) -> None:
    process: ServerProcess = request.getfixturevalue(entrance)
    alone = post(process.url, lm_eval_body(max_tokens=0) | {"prompt_logprobs": 2})
    for choice, context, rest in zip(alone["choices"], CONTEXTS, CONTINUATIONS, strict=True):
        ids = context + rest
        assert choice["logprobs"]["token_logprobs"] == [None, *(-float(token) for token in ids[1:])]
        assert [len(line or ()) for line in choice["prompt_logprobs"]] == [0, *[2] * (len(ids) - 1)]
        first = choice["prompt_logprobs"][1][str(ids[1])]
        assert (first["logprob"], first["rank"]) == (-float(ids[1]), 1)
    assert alone["usage"]["completion_tokens"] == 0
