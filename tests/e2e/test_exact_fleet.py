"""The demo on a CPU, with the quantised weights of its file (the default) and in bfloat16: its first answers are right and
soon, and an instance that is killed in mid-answer changes not a letter."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2 as httpx
import pytest

from tests.support.fleet import FleetProcess, baton_up
from tests.support.readme import first_request

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]

KILLS = int(os.environ.get("BATON_TEST_KILLS", "3"))
TOKENS = 90
FIRST_ANSWERS = 3
FIRST_ANSWER_S_MAX = 20.0
QUESTIONS = (
    {"prompt": "The history of the lighthouse begins", "temperature": 0},
    {"prompt": "Once upon a time a fox", "temperature": 0.8, "seed": 7},
)
COMPANY = {"prompt": "A list of animals:", "max_tokens": 60, "temperature": 1}


@pytest.fixture(scope="module", params=["auto", "none"])
def demo(request: pytest.FixtureRequest) -> Iterator[FleetProcess]:
    with baton_up("--demo", "--quantization", request.param) as fleet:
        yield fleet


@pytest.mark.timed
def test_the_first_request_of_the_readme_is_answered_with_paris_and_soon(demo: FleetProcess) -> None:
    """Where this test is chosen alone, the fleet has just started."""
    seconds = []
    for _ in range(FIRST_ANSWERS):
        began_s = time.monotonic()
        assert "Paris" in answer_to_first_request(demo)
        seconds.append(round(time.monotonic() - began_s, 2))
    assert max(seconds) < FIRST_ANSWER_S_MAX, seconds


def answer_to_first_request(fleet: FleetProcess) -> str:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{fleet.url}/v1/chat/completions", content=first_request(), headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def streamed(fleet: FleetProcess, body: dict[str, object], on_event: Callable[[int], None] = lambda _: None) -> str:
    asked = {"model": "smollm2", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **body}
    text, count = "", 0
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=asked, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                count += 1
                on_event(count)
    assert line == "data: [DONE]" or not line
    return text


@pytest.mark.parametrize("body", QUESTIONS, ids=["greedy", "sampled"])
def test_a_kill_in_mid_answer_changes_no_letter(demo: FleetProcess, body: dict[str, object]) -> None:
    undisturbed = streamed(demo, body)
    for kill in range(KILLS):
        demo.until(lambda: ready(demo) == {"prefill-1", "decode-1", "decode-2"}, "the whole fleet")
        assert streamed(demo, body, partial(kill_who_serves, demo, 10 + 7 * kill % TOKENS // 2)) == undisturbed
        assert streamed(demo, body) == undisturbed


def kill_who_serves(fleet: FleetProcess, at: int, count: int) -> None:
    if count == at:
        (victim,) = [one for name, one in fleet.instances().items() if one["open"] and name.startswith("decode")]
        os.kill(victim["pid"], signal.SIGKILL)


def ready(fleet: FleetProcess) -> set[str]:
    return {name for name, one in fleet.instances().items() if one["state"] == "ready"}


@pytest.mark.parametrize("others", [1, 7])
def test_company_changes_no_letter(demo: FleetProcess, others: int) -> None:
    undisturbed = [streamed(demo, body) for body in QUESTIONS]
    with ThreadPoolExecutor(others) as clients:
        company = [clients.submit(streamed, demo, COMPANY | {"seed": seed}) for seed in range(others)]
        assert [streamed(demo, body) for body in QUESTIONS] == undisturbed
        assert all(one.result(300) for one in company)
