"""A router that is not ours: it speaks HTTP alone, holds the cluster key, and continues answers at other instances."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from baton.wire.keyfile import key_of_text
from baton.wire.request_proof import HEADER, NONCE_BYTES, proof_of

CLUSTER_KEY = "a cluster key for the tests, long enough"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


_client = httpx.Client(verify=False)
"""One for all requests: to make one takes longer than to be answered."""


@dataclass
class ChoiceSoFar:
    """What a client has of one choice."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    openings: int = 0
    logprobs: int = 0
    """Tokens with log-probabilities."""

    def add(self, choice: Mapping[str, Any]) -> None:
        part = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or part.get("content") or ""
        self.openings += "role" in part
        self.ids += choice.get("token_ids", ())
        self.finish = choice["finish_reason"] or self.finish
        if found := choice["logprobs"]:
            self.logprobs += len(found["content"] if "content" in found else found["tokens"])


@dataclass
class AnswerSoFar:
    choices: list[ChoiceSoFar]
    usage: dict[str, Any] | None = None
    done: bool = False

    def add(self, event: Mapping[str, Any]) -> None:
        for choice in event["choices"]:
            self.choices[choice["index"]].add(choice)
        self.usage = event.get("usage") or self.usage


def proof_headers(path: str, raw: bytes, key: str = CLUSTER_KEY) -> dict[str, str]:
    proof = proof_of(key_of_text(key), "POST", path, raw, time.time(), secrets.token_bytes(NONCE_BYTES))
    return {HEADER: proof, "Content-Type": "application/json"}


def post(url: str, path: str, body: Mapping[str, object], key: str = CLUSTER_KEY) -> httpx.Response:
    raw = json.dumps(body).encode()
    return _client.post(url + path, content=raw, headers=proof_headers(path, raw, key), timeout=60)


def read(response: httpx.Response, choices: int) -> AnswerSoFar:
    """Of a whole answer or of a stream."""
    assert response.status_code == 200, response.text
    answer = AnswerSoFar([ChoiceSoFar() for _ in range(choices)])
    for event in events_of(response):
        if event is None:
            answer.done = True
        else:
            answer.add(event)
    return answer


def events_of(response: httpx.Response) -> list[dict[str, Any] | None]:
    """None for `[DONE]`."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json(), None]
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [None if line == "[DONE]" else json.loads(line) for line in data]


def cut_at(response: httpx.Response, tokens: Sequence[int]) -> AnswerSoFar:
    """What a client has of a stream with token ids that breaks: of each choice, the events up to so many tokens."""
    answer = AnswerSoFar([ChoiceSoFar() for _ in tokens])
    for event in events_of(response):
        for choice in [] if event is None else event["choices"]:
            so_far, most = answer.choices[choice["index"]], tokens[choice["index"]]
            if most and len(so_far.ids) + len(choice["token_ids"]) <= most:
                so_far.add(choice)
    return answer


def continued(body: Mapping[str, object], answer: AnswerSoFar, with_sent: bool = True) -> dict[str, object]:
    """The body to send to another instance: the original, what was generated, and how much text of it the client has."""
    sent = {"sent_characters": [len(choice.text) for choice in answer.choices]} if with_sent else {}
    return {**body, "generated_token_ids": [choice.ids for choice in answer.choices], **sent}
