"""`baton router` and its instances as real processes: the official client, kills in mid-stream, a router that comes back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.server import ServerProcess, baton_process, baton_router, baton_serve
from tests.support.waiting import wait_until

KEY = ("--cluster-key", "a cluster key of the tests")
SCRIPTED = ("--executor", "scripted", *KEY)
GRACE = ("--orphan-grace", "120")
"""A router may take its time to start where many things run."""
PROMPT = list(range(40, 50))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200, "temperature": 1, "seed": 3, "ignore_eos": True}
HI: list[Any] = [{"role": "user", "content": "hi"}]


class Fleet:
    """A router, and as many instances as a test asks for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._made = 0
        self.router = stack.enter_context(baton_router(*SCRIPTED, *GRACE))
        self.instances: dict[str, ServerProcess] = {}

    def ensure(self, number: int) -> None:
        """At least so many are there; those that are missing start at the same time."""
        there = self.views()
        while len(there) + len(missing := [name for name in self.instances if name not in there]) < number:
            self._made += 1
            name = f"i{self._made}"
            options = (*SCRIPTED, "--step-ms", "4", "--router", self.router.join, "--name", name)
            self.instances[name] = self._stack.enter_context(baton_serve(*options, wait=False))
        wait_until(lambda: set(missing) <= set(self.views()))

    def views(self) -> dict[str, Any]:
        return {one["name"]: one for one in json.loads(self.call("GET", "/v1/instances").read())["data"]}

    def serving(self) -> str:
        (name,) = [name for name, one in self.views().items() if one["open"]]
        return name

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        at = urlsplit(self.router.url)
        connection = self._stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, 60))
        )
        sent = {key.replace("_", "-"): value for key, value in headers.items()} | {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        return connection.getresponse()

    def stream(self, body: Any, **headers: str) -> Iterator[tuple[str, Any]]:
        yield from events(self.call("POST", "/v1/completions", body | {"stream": True}, **headers))

    def restart_router(self) -> None:
        ports = ("--port", self.router.url.rpartition(":")[2], "--join-port", self.router.join.rpartition(":")[2])
        self.router = self._stack.enter_context(baton_process("router", *ports, *SCRIPTED, *GRACE))

    def metric(self, name: str, **labels: str) -> float:
        for line in self.call("GET", "/metrics").read().decode().splitlines():
            if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """(id, data) as they come."""
    at = ""
    for line in response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            at = value
        elif name == "data":
            yield at, value if value == "[DONE]" else json.loads(value)


def gathered(heard: list[tuple[str, Any]]) -> tuple[dict[int, str], dict[int, list[int]], int]:
    """Text and tokens by choice, and how many tokens the usage says."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    usage = 0
    for _, event in heard:
        if event == "[DONE]":
            continue
        usage = (event.get("usage") or {}).get("completion_tokens", usage)
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return texts, tokens, usage


def expected(tokens: int, choice: int = 0) -> list[int]:
    return undisturbed(PROMPT, Sampling(seed=3, choice=choice), tokens, BYTE_VOCABULARY)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        made = Fleet(stack)
        made.ensure(2)
        yield made


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    fleet.ensure(1)
    with openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_the_official_client_gets_whole_answers(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="scripted", messages=HI, max_tokens=12, n=2, logprobs=True, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 24
    assert [len(choice.logprobs.content or []) for choice in chat.choices if choice.logprobs] == [12, 12]
    again = client.chat.completions.create(
        model="scripted", messages=HI, max_tokens=12, n=2, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.message for choice in again.choices] == [choice.message for choice in chat.choices]
    text = client.completions.create(model="scripted", prompt=["one", "two"], max_tokens=5, extra_body={"ignore_eos": True})
    assert [choice.finish_reason for choice in text.choices] == ["length", "length"]


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "scripted", "seed": 1, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(prompt="x", **asked)
    chunks = list(client.completions.create(prompt="x", stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 30
    roles = list(client.chat.completions.create(messages=HI, n=2, stream=True, **asked))
    assert [choice.delta.role for chunk in roles for choice in chunk.choices].count("assistant") == 2


def test_a_stop_string_with_characters_of_several_bytes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "scripted",
        "prompt": PROMPT,
        "seed": 3,
        "max_tokens": 400,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**asked).choices[0].text
    at = next(i for i, char in enumerate(whole) if ord(char) > 0x7F and char != "\ufffd" and i > 20)
    stop = whole[at - 1 : at + 2]
    cut = client.completions.create(stop=stop, **asked).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_kill_9_of_the_serving_instance_in_mid_stream_is_not_noticed(fleet: Fleet) -> None:
    fleet.ensure(2)
    heard, victim = [], ""
    asked = BODY | {"n": 2, "return_token_ids": True, "stream_options": {"include_usage": True}}
    for event in fleet.stream(asked):
        heard.append(event)
        if len(heard) == 40:
            victim = fleet.serving()
            os.kill(fleet.views()[victim]["pid"], signal.SIGKILL)
    texts, tokens, usage = gathered(heard)
    assert tokens == {choice: expected(200, choice) for choice in (0, 1)}
    assert usage == 400
    assert heard[-1][1] == "[DONE]"
    assert victim not in fleet.views()
    assert fleet.metric("baton_retries_total", cause="lost") >= 2
    fleet.instances.pop(victim)
    undisturbed_texts, _, _ = gathered(list(fleet.stream(asked)))
    assert texts == undisturbed_texts


SEEDED: dict[str, Any] = {"temperature": 1, "seed": 3, "ignore_eos": True}


def messages_text(fleet: Fleet, at_delta: Callable[[int], None]) -> str:
    """What Anthropic's client makes of a stream. `at_delta` is called with the number of each delta of text."""
    with (
        anthropic.Anthropic(base_url=fleet.router.url, api_key="none", max_retries=0, timeout=60) as client,
        client.messages.stream(model="scripted", max_tokens=300, messages=HI, extra_body=SEEDED) as stream,
    ):
        for number, _ in enumerate(stream.text_stream):
            at_delta(number)
        message = stream.get_final_message()
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 300)
    (block,) = message.content
    assert block.type == "text"
    return block.text


def responses_text(fleet: Fleet, at_delta: Callable[[int], None]) -> str:
    """The same of the openai client with the Responses API."""
    with openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        events = client.responses.create(model="scripted", input="hi", max_output_tokens=300, stream=True, extra_body=SEEDED)
        pieces = []
        for event in events:
            if event.type == "response.output_text.delta":
                at_delta(len(pieces))
                pieces.append(event.delta)
    assert event.type == "response.incomplete"
    assert event.response.usage is not None
    assert event.response.usage.output_tokens == 300
    assert event.response.output_text == "".join(pieces)
    return event.response.output_text


@pytest.mark.parametrize("read", [messages_text, responses_text])
def test_kill_9_in_mid_stream_is_not_noticed_in_the_other_dialects(
    fleet: Fleet, read: Callable[[Fleet, Callable[[int], None]], str]
) -> None:
    fleet.ensure(2)
    victims = []

    def kill(number: int) -> None:
        if number == 30:
            victims.append(fleet.serving())
            os.kill(fleet.views()[victims[0]]["pid"], signal.SIGKILL)

    text = read(fleet, kill)
    (victim,) = victims
    fleet.instances.pop(victim)
    assert text == read(fleet, lambda _: None)


def test_a_stream_of_another_dialect_begins_again_after_the_loss_of_its_router(fleet: Fleet) -> None:
    """Its events have no ids; nothing is lost, and the client gets all of it from the beginning."""
    fleet.ensure(1)
    body = SEEDED | {"model": "scripted", "max_tokens": 400, "messages": HI, "stream": True}
    whole = fleet.call("POST", "/v1/messages", body).read()
    with contextlib.suppress(OSError, http.client.HTTPException):
        for number, _ in enumerate(fleet.call("POST", "/v1/messages", body, X_Request_Id="ours")):
            if number == 60:
                fleet.router.process.kill()
    fleet.restart_router()
    wait_until(lambda: len(fleet.views()) > 0)
    again = fleet.call("GET", "/v1/requests/ours/stream", Last_Event_ID="17").read()
    assert text_of(again) == text_of(whole)
    assert again.count(b"event: message_start") == again.count(b"event: message_stop") == 1


def text_of(stream: bytes) -> str:
    found = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: ")]
    return "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")


def test_a_router_that_is_killed_and_comes_back_goes_on_after_the_last_event(fleet: Fleet) -> None:
    fleet.ensure(1)
    heard = []
    with contextlib.suppress(OSError, http.client.HTTPException):
        for event in fleet.stream(BODY | {"return_token_ids": True, "max_tokens": 400}, X_Request_Id="mine"):
            heard.append(event)
            if len(heard) == 20:
                fleet.router.process.kill()
    assert 20 <= len(heard) < 400
    fleet.restart_router()
    wait_until(lambda: len(fleet.views()) > 0)
    rest = fleet.call("GET", "/v1/requests/mine/stream", Last_Event_ID=heard[-1][0])
    assert rest.status == 200
    heard += list(events(rest))
    assert gathered(heard)[1] == {0: expected(400)}
    assert [event for _, event in heard].count("[DONE]") == 1
    assert fleet.call("GET", "/v1/requests/mine/stream").status == 404


def test_drain_waits_until_the_instance_is_gone_and_its_request_is_whole(fleet: Fleet) -> None:
    fleet.ensure(1)
    stream = fleet.stream(BODY)
    next(stream)
    name = fleet.serving()
    command = [sys.executable, "-m", "baton", "drain", name, "--url", fleet.router.url]
    drained = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (drained.returncode, f"{name} is gone" in drained.stderr) == (0, True)
    assert [event for _, event in stream][-1] == "[DONE]"
    assert fleet.instances.pop(name).process.wait(30) == 0
    assert fleet.call("POST", f"/v1/instances/{name}/drain").status == 404


def test_who_does_not_hold_the_key_is_refused_and_counted(fleet: Fleet) -> None:
    host, _, port = fleet.router.join.rpartition(":")
    with socket.create_connection((host, int(port))) as forger:
        forger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
        assert forger.recv(100) == b""
    assert fleet.metric("baton_refused_connections_total", reason="malformed") == 1
    wrong = ("--executor", "scripted", "--cluster-key", "another cluster key, alas")
    with baton_serve(*wrong, "--router", fleet.router.join, "--name", "stranger", wait=False):
        wait_until(lambda: fleet.metric("baton_refused_connections_total", reason="wrong_key") >= 1)
        assert "stranger" not in fleet.views()
