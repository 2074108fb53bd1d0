"""Questions for real servers whose KV goes beyond the pool, what the right answers are, and what the servers count."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
from typer.testing import CliRunner, Result

from baton.cli.main import app
from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.cluster import tokens_of
from tests.support.waiting import wait_until

Body = dict[str, Any]
Texts = list[list[int]]
"""Token ids, of each choice."""

TIGHT = (
    "--executor", "scripted", "--served-model-name", "m", "--step-ms", "1", "--kv-blocks", "24", "--max-num-seqs", "8",
    "--reserve", "none", "--bring-back", "always", "--log-level", "warning", "--no-access-log",
)  # fmt: skip
"""No two requests of full length fit, and nothing keeps the instance from taking on more."""
PROMPT_TOKENS, ANSWER_TOKENS = 100, 110
ROUNDS_MAX = 100
SMALL_HOST = ("--host-memory", "6K")
"""48 blocks of 128 bytes: enough for what is on its way, and not for what comes back later."""


def prompt_of(number: int, size: int = PROMPT_TOKENS) -> list[int]:
    return [(number * 37 + at * (number + 3)) % 256 for at in range(size)]


def question(number: int, **fields: object) -> Body:
    greedy: Body = {"model": "m", "prompt": prompt_of(number), "max_tokens": ANSWER_TOKENS, "temperature": 0, "seed": 0}
    return greedy | {"ignore_eos": True, "return_token_ids": True, "baton_usage": True} | fields


def mixture(first: int = 0) -> list[Body]:
    """Greedy and seeded, one choice and two."""
    return [
        *(question(first + at) for at in range(3)),
        *(question(first + at, temperature=1.0, seed=at) for at in range(3, 5)),
        question(first + 5, temperature=0.8, seed=5, n=2, max_tokens=60),
    ]


def right(body: Body) -> Texts:
    """What the scripted executor says when nothing disturbs it."""
    return [
        undisturbed(
            body["prompt"],
            Sampling(seed=body["seed"], choice=choice, temperature=body["temperature"]),
            body["max_tokens"],
            BYTE_VOCABULARY,
        )
        for choice in range(body.get("n", 1))
    ]


def post(url: str, body: Body, key: str | None = None) -> Body:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    answer: Body = response.json()
    return answer


def bills(url: str, bodies: list[Body], answers: list[Texts] | None = None) -> list[Body]:
    """Ask all at once. Each answer is as it must be; the bills are told in order."""
    wanted = [right(body) for body in bodies] if answers is None else answers
    with ThreadPoolExecutor(len(bodies)) as clients:
        given = list(clients.map(lambda body: post(url, body), bodies))
    for answer, tokens in zip(given, wanted, strict=True):
        assert tokens_of(answer) == tokens
    return [answer["usage"]["baton"] for answer in given]


def ask_until(url: str, holds: Callable[[], bool], bodies: Sequence[list[Body]], answers: list[Texts] | None = None) -> None:
    """Ask for one list after the other, over and over; every answer on the way there is right."""
    for number in range(ROUNDS_MAX):
        bills(url, bodies[number % len(bodies)], answers)
        if holds():
            return
    raise AssertionError(f"it did not happen in {ROUNDS_MAX} rounds: {counts(url)}")


def restored(told: Iterable[Body]) -> int:
    return sum(bill["restored_tokens"] for bill in told)


def preempted(told: Iterable[Body]) -> int:
    return sum(bill["preemptions"] for bill in told)


def counts(url: str, key: str | None = None) -> Mapping[str, float]:
    """Everything of `/metrics` by its name without what all have, summed over labels; bad blocks also as `bad:<flaw>`."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", headers=headers).text.splitlines():
        match = re.fullmatch(r"baton_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)", line)
        if match is None:
            continue
        found[match[1]] = found.get(match[1], 0.0) + float(match[3])
        if match[1] == "store_bad_blocks" and (reason := re.search(r'reason="([^"]+)"', match[2] or "")):
            found[f"bad:{reason[1]}"] = float(match[3])
    return found


def until_stored(url: str) -> None:
    """Something was written to the store, and nothing is on its way there."""

    def is_still() -> bool:
        now = counts(url)
        return now["store_stored_blocks"] > 0 and now["kv_transfers_open"] == 0

    wait_until(is_still, "all is stored")


@contextmanager
def asking(url: str, first: int = 0) -> Iterator[None]:
    """One question after the other, and nobody waits for the answers: for servers that are killed meanwhile."""
    over = False

    def ask(number: int) -> None:
        while not over:
            try:
                httpx.post(f"{url}/v1/completions", json=question(number), timeout=30)
            except httpx.HTTPError:
                return
            number += 8

    with ThreadPoolExecutor(8) as clients:
        for number in range(first, first + 8):
            clients.submit(ask, number)
        try:
            yield
        finally:
            over = True


def baton_store(*arguments: str) -> Result:
    """In this process: to start another one takes longer than what it does."""
    return CliRunner().invoke(app, ["store", *arguments])
