"""`kill -9` of instances that prefill or decode, at random moments under load: survivors hold nothing, nobody waits on.

A few kills by default; BATON_TEST_KILLS=100 for many. BATON_TEST_SEED changes the moments and the victims.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import pytest

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.cluster import complete, handed_over, in_session, is_at_rest, peer_address
from tests.support.server import ServerProcess, baton_serve
from tests.support.waiting import wait_until

KILLS = int(os.environ.get("BATON_TEST_KILLS", "2"))
SEED = int(os.environ.get("BATON_TEST_SEED", "1"))
OPTIONS = (
    "--executor", "scripted", "--served-model-name", "m", "--step-ms", "4", "--max-num-batched-tokens", "48",
    "--max-num-seqs", "12", "--kv-blocks", "160", "--reserve", "none", "--log-level", "warning",
)  # fmt: skip
REQUESTS = 10
"""A round, for each instance that decodes."""
ANSWER_S_MAX = 60
REST_S_MAX = 15
KILL_WITHIN_S = 0.4


@dataclass
class Seat:
    """A place in the cluster, and who sits there now."""

    options: tuple[str, ...]
    server: ServerProcess | None = None
    life: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self) -> None:
        self.server = self.life.enter_context(baton_serve(*OPTIONS, *self.options))

    @property
    def running(self) -> ServerProcess:
        assert self.server is not None
        return self.server

    def kill(self, engine_only: bool) -> None:
        engine = self.running.engine_pid()
        os.kill(engine if engine_only else self.running.process.pid, signal.SIGKILL)
        self.running.process.wait(30)
        wait_until(lambda: not _lives(engine), "the engine to end with its front end")
        self.life.close()
        self.life = contextlib.ExitStack()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def seats() -> Iterator[tuple[Seat, list[Seat]]]:
    prefill = Seat(("--role", "prefill", "--peer-port", "0"))
    decodes: list[Seat] = []
    try:
        prefill.start()
        address = peer_address(prefill.running)
        prefill.options = ("--role", "prefill", "--peer-port", address.rpartition(":")[2])  # the next one is found there too
        for own in (("--transfer", "shm"), ("--transfer", "tcp", "--on-preempt", "reschedule")):
            decodes.append(Seat(("--role", "decode", "--peer", address, *own)))
            decodes[-1].start()
        yield prefill, decodes
    finally:
        for seat in (prefill, *decodes):
            seat.life.close()


def ask(server: ServerProcess, prompt: list[int], tokens: int, may_die: bool) -> str:
    """What became of it; anything that is neither an answer nor an excuse fails the test."""
    try:
        response = complete(server.url, prompt=prompt, max_tokens=tokens)
    except httpx.TransportError:
        assert may_die, "a connection broke whose instance lives"
        return "connection lost"
    body = response.json()
    if response.status_code == 200:
        (choice,) = body["choices"]
        whole = undisturbed(prompt, Sampling(seed=0, temperature=0.0), tokens, BYTE_VOCABULARY)
        if choice["finish_reason"] == "pd_reschedule":
            given = choice["completion_token_ids"]
            assert given == whole[: len(given)]
            assert choice["error"]["retryable"] is True
            return "to be tried again"
        assert choice["finish_reason"] == "length", choice
        assert choice["token_ids"] == whole
        return "answered"
    assert may_die, response.text
    assert response.status_code in (500, 503), response.text
    assert body["error"]["message"]
    return "told"


def one_round(draws: random.Random, seats: tuple[Seat, list[Seat]]) -> Counter[str]:
    prefill, decodes = seats
    victim = draws.choice((prefill, prefill, *decodes))
    ends: Counter[str] = Counter()
    with ThreadPoolExecutor(REQUESTS * len(decodes)) as clients:
        asked: list[Future[str]] = []
        for seat in decodes:
            for _ in range(REQUESTS):
                prompt = [draws.randrange(256) for _ in range(draws.randrange(20, 300))]
                asked.append(clients.submit(ask, seat.running, prompt, draws.randrange(2, 40), seat is victim))
        time.sleep(draws.random() * KILL_WITHIN_S)
        victim.kill(engine_only=draws.random() < 0.5)
        for answer in asked:
            ends[answer.result(ANSWER_S_MAX)] += 1
    for seat in (prefill, *decodes):
        if seat is not victim:
            wait_until(lambda server=seat.running: is_at_rest(server), f"nothing held:\n{seat.running.output()}", REST_S_MAX)
    victim.start()
    for seat in decodes:
        in_session(seat.running)
    in_session(prefill.running, len(decodes))
    return ends


def test_no_kill_leaves_a_block_held_or_a_client_waiting(seats: tuple[Seat, list[Seat]]) -> None:
    _, decodes = seats
    for seat in decodes:
        in_session(seat.running)
    ends: Counter[str] = Counter()
    for number in range(KILLS):
        draws = random.Random(SEED * 1000 + number)
        found = one_round(draws, seats)
        ends += found
        print(f"kill {number}: {dict(found)}")
    assert ends["answered"] > 0
    made = sum(handed_over(seat.running) for seat in decodes)
    print(f"{KILLS} kills: {dict(ends)}, {made:.0f} hand-overs in the last lives")
