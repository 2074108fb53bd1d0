"""One key asks for as much as it can: the front end's memory and the wait of another key stay bounded, seen from outside."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2 as httpx
import pytest

from benchmarks.hostile_schemas import KINDS
from tests.support.raw_http import PeakMemory
from tests.support.server import ServerProcess, baton_serve

pytestmark = [pytest.mark.slow, pytest.mark.timed]

CONTEXT = 2912
OPTIONS = ("--executor", "scripted", "--max-model-len", str(CONTEXT), "--no-access-log")
KEYS = ("--api-key", "greedy", "--api-key", "modest")
GREEDY, MODEST = {"Authorization": "Bearer greedy"}, {"Authorization": "Bearer modest"}
MIB = 1 << 20
LONG_TOKENS = 1500


class Watch:
    """Asks for /health and a small answer of the other key all the time, and looks at the memory of the front end."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._memory = PeakMemory(server.process.pid)
        self.health_s: list[float] = []
        self.answer_s: list[float] = []
        self._over = threading.Event()

    @property
    def grown_mb(self) -> float:
        """At its peak, which the system notes, also while the server answers nobody."""
        return self._memory.grown_mb()

    def run(self) -> None:
        body = {"prompt": "hi", "max_tokens": 1}
        with httpx.Client(base_url=self._server.url, timeout=200) as client:
            while not self._over.is_set():
                begun = time.perf_counter()
                assert client.get("/health").status_code == 200
                self.health_s.append(time.perf_counter() - begun)
                begun = time.perf_counter()
                assert client.post("/v1/completions", json=body, headers=MODEST).status_code == 200
                self.answer_s.append(time.perf_counter() - begun)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as threads:
            watching = threads.submit(self.run)
            try:
                yield
            finally:
                self._over.set()
                watching.result()
        print(
            f"\nhealth at most {max(self.health_s):.3f} s, answers of the other key {max(self.answer_s):.3f} s"
            f" (median {statistics.median(self.answer_s):.3f} s of {len(self.answer_s)}),"
            f" front end grew by {self.grown_mb:.0f} MiB"
        )


def _posted(server: ServerProcess, path: str, bodies: list[dict[str, object]]) -> list[httpx.Response]:
    def post(body: dict[str, object]) -> httpx.Response:
        return httpx.post(f"{server.url}{path}", json=body, headers=GREEDY, timeout=200)

    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(post, bodies))


@pytest.mark.parametrize("kind", ["prompt", "messages", "tokenize"])
def test_prompts_that_cannot_fit_cost_little(kind: str) -> None:
    text = "a b" * 1_390_000
    body: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if kind == "messages" else {"prompt": text}
    path = {"prompt": "/v1/completions", "messages": "/v1/chat/completions", "tokenize": "/tokenize"}[kind]
    with baton_serve(*OPTIONS, *KEYS) as server:
        watch, begun = Watch(server), time.monotonic()
        with watch.watching():
            replies = _posted(server, path, [body] * 8)
        took_s = time.monotonic() - begun
        print(f"{kind}: {took_s:.1f} s")
        code = "request_too_large" if kind == "tokenize" else "context_length_exceeded"
        outcomes = [(reply.status_code, reply.json()["error"]["code"]) for reply in replies]
        assert set(outcomes) <= {(400, code), (429, "rate_limited")}, "what waits is bounded too"
        assert outcomes.count((400, code)) >= 4
        assert took_s < 15
        assert watch.grown_mb < 300
        assert max(watch.answer_s) < 3
        assert max(watch.health_s) < 3


def test_the_dearest_request_that_is_taken_leaves_others_their_turn() -> None:
    """An answer of sixteen megabytes, while which another key asks for one of a token."""
    too_much = {"prompt": ["x"] * 48, "max_tokens": 2900, "logprobs": 20, "ignore_eos": True}
    most = too_much | {"max_tokens": 1000}  # and fits the KV pool, which keys do not share by rule
    with baton_serve(*OPTIONS, *KEYS, "--step-ms", "10") as server:
        watch = Watch(server)
        with watch.watching():
            (refused,) = _posted(server, "/v1/completions", [too_much])
            (taken,) = _posted(server, "/v1/completions", [most])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_too_costly")
        assert taken.status_code == 200
        choices = taken.json()["choices"]
        assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [1000] * 48
        print(f"{len(taken.content) / MIB:.0f} MiB")
        assert watch.grown_mb < 300
        assert statistics.median(watch.answer_s) < 1
        assert max(watch.answer_s) < 8
        assert max(watch.health_s) < 2


def test_hostile_schemas_leave_others_their_turn() -> None:
    """Each is refused soon, in bounded memory of the front end; the other key has small answers and constrained ones."""
    doubled: dict[str, object] = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    deep: dict[str, object] = {}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    hostile: list[dict[str, object]] = [
        {"guided_regex": "(a{1000}){1000}"},
        {"guided_regex": "((a{100}){100}){100}"},
        {"guided_json": {"$defs": {**doubled, "d60": {}}, "$ref": "#/$defs/d0"}},
        {"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
        {"guided_json": {"enum": list(range(500_000))}},
        {"guided_json": {"type": "array", "minItems": 10**9}},
        {"guided_json": {"type": "string", "maxLength": 10**12, "minLength": 10**12}},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": deep},
    ]
    bodies: list[dict[str, object]] = [{"prompt": "hi", "max_tokens": 1, **fields} for fields in hostile]
    with baton_serve(*OPTIONS, *KEYS) as server:
        watch = Watch(server)
        modest = {"prompt": "hi", "guided_choice": ["yes"], "max_tokens": 9}
        with watch.watching():
            replies = _posted(server, "/v1/completions", bodies)
            served = httpx.post(f"{server.url}/v1/completions", json=modest, headers=MODEST, timeout=200)
            for reply, body in zip(replies, bodies, strict=True):
                assert reply.status_code in (400, 429), (str(body)[:100], reply.text)
                if reply.status_code == 429:  # turned away, and not judged yet
                    (reply,) = _posted(server, "/v1/completions", [body])  # noqa: PLW2901
                assert reply.status_code == 400, (str(body)[:100], reply.text)
        assert served.json()["choices"][0]["text"] == "yes"
        assert watch.grown_mb < 300
        assert statistics.median(watch.answer_s) < 1
        assert max(watch.answer_s) < 3
        assert max(watch.health_s) < 3


def test_long_answers_under_patterns_that_grow_leave_others_their_turn() -> None:
    """Such patterns are accepted: their automata are built while an answer is written. One letter of each never comes."""
    endless = {"exponential automaton": "c", "catastrophic regex": "b", "exponential pattern in a schema": "c"}
    bodies: list[dict[str, object]] = [
        {"prompt": "hi", "max_tokens": LONG_TOKENS, "bad_words": [letter], "seed": number, **KINDS[kind](number)}
        for number in range(2)
        for kind, letter in endless.items()
    ]
    with baton_serve(*OPTIONS, *KEYS) as server:
        watch, engine = Watch(server), PeakMemory(server.engine_pid())
        with watch.watching():
            replies = _posted(server, "/v1/completions", bodies)
        assert [reply.status_code for reply in replies] == [200] * len(bodies)
        answers = [(reply.json()["usage"]["completion_tokens"], reply.json()["choices"][0]) for reply in replies]
        assert [(tokens, choice["finish_reason"]) for tokens, choice in answers] == [(LONG_TOKENS, "length")] * len(bodies)
        print(f"engine grew by {engine.grown_mb():.0f} MiB")
        assert engine.grown_mb() < 300
        assert watch.grown_mb < 300
        assert statistics.median(watch.answer_s) < 1
        assert max(watch.answer_s) < 3
        assert max(watch.health_s) < 3
