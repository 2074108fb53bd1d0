"""Instances that have too few blocks for what they took on: requests move, or resume where they are, and complete."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.fleet import FleetProcess, baton_up

SHORT = (
    "--executor", "scripted", "--step-ms", "2", "--decode", "2", "--kv-blocks", "24", "--reserve", "none",
    "--max-num-seqs", "8", "--no-prefix-cache",
)  # fmt: skip
"""Two requests at full length fill an instance; nothing keeps it from taking on more."""
PROMPTS = [[number] * 60 for number in range(8)]
TOKENS = 110


def whole(prompt: list[int]) -> list[int]:
    return undisturbed(prompt, Sampling(seed=0, temperature=0.0), TOKENS, BYTE_VOCABULARY)


def ask_all(fleet: FleetProcess, **fields: object) -> list[tuple[list[int], httpx.Response]]:
    def ask(prompt: list[int]) -> tuple[list[int], httpx.Response]:
        return prompt, fleet.complete(prompt=prompt, max_tokens=TOKENS, ignore_eos=True, baton_usage=True, **fields)

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return list(clients.map(ask, PROMPTS))


def test_preempted_requests_move_and_complete() -> None:
    with baton_up(*SHORT, "--preempt-retry-count", "50") as fleet:
        moved = 0
        for prompt, response in ask_all(fleet):
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["choices"][0]["token_ids"] == whole(prompt)
            assert answer["usage"]["prompt_tokens"] == len(prompt)
            assert answer["usage"]["completion_tokens"] == TOKENS
            moved += answer["usage"]["baton"]["attempts"] > 1
        assert moved > 0, fleet.output()


def test_requests_that_may_not_move_resume_where_they_are() -> None:
    with baton_up(*SHORT, "--preempt-retry-count", "0") as fleet:
        preempted = 0
        for prompt, response in ask_all(fleet):
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["choices"][0]["token_ids"] == whole(prompt)
            assert answer["usage"]["baton"]["attempts"] == 1
            preempted += answer["usage"]["baton"]["preemptions"]
        assert preempted > 0, fleet.output()
