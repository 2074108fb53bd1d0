"""`baton router` and its instances as real processes: the official client, kills in mid-stream, a router that comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

from baton.core.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.server import ServerProcess, baton_process, baton_router, baton_serve

KEY = ("--cluster-key", "a cluster key of the tests")
SCRIPTED = ("--executor", "scripted", *KEY)
PACE = ("--step-ms", "4")
PROMPT = list(range(40, 50))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 200, "temperature": 1, "seed": 3, "ignore_eos": True}


def instance(join: str, name: str, *options: str) -> contextlib.AbstractContextManager[ServerProcess]:
    return baton_serve(*SCRIPTED, *PACE, "--router", join, "--name", name, *options)


def names(url: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in httpx.get(f"{url}/v1/instances").json()["data"]}


def wait_for(url: str, *wanted: str) -> None:
    pause = threading.Event()
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if set(wanted) <= set(names(url)):
                return
        pause.wait(0.02)
    raise AssertionError(f"{wanted} did not join")


@pytest.fixture(scope="module")
def router() -> Iterator[ServerProcess]:
    with baton_router(*SCRIPTED) as running:
        yield running


@pytest.fixture(scope="module")
def pair(router: ServerProcess) -> Iterator[ServerProcess]:
    with instance(router.join, "a"), instance(router.join, "b"):
        wait_for(router.url, "a", "b")
        yield router


@pytest.fixture
def client(pair: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


HI: list[Any] = [{"role": "user", "content": "hi"}]


def test_the_official_client_gets_whole_answers(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="scripted", messages=HI, max_tokens=12, n=2, logprobs=True, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 24
    again = client.chat.completions.create(
        model="scripted", messages=HI, max_tokens=12, n=2, seed=1, extra_body={"ignore_eos": True}
    )
    assert [choice.message for choice in again.choices] == [choice.message for choice in chat.choices]
    text = client.completions.create(model="scripted", prompt=["one", "two"], max_tokens=5, extra_body={"ignore_eos": True})
    assert [choice.finish_reason for choice in text.choices] == ["length", "length"]


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="scripted", seed=1, prompt="x", max_tokens=30, extra_body={"ignore_eos": True})
    chunks = list(
        client.completions.create(
            model="scripted", seed=1, prompt="x", max_tokens=30, stream=True, stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    roles = list(client.chat.completions.create(model="scripted", messages=HI, n=2, max_tokens=3, stream=True))
    assert [choice.delta.role for chunk in roles for choice in chunk.choices].count("assistant") == 2


def test_a_stop_string_of_several_bytes_a_character(client: openai.OpenAI, pair: ServerProcess) -> None:
    """Found by its text: some stretch of the answer that has a character of more than one byte."""
    body = BODY | {"max_tokens": 2000}
    whole = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    at = next(i for i, char in enumerate(whole) if ord(char) > 0x7F and char != "\ufffd" and i > 20)
    stop = whole[at - 1 : at + 2]
    cut = client.completions.create(model="scripted", prompt=PROMPT, seed=3, max_tokens=2000, stop=stop, temperature=1,
                                    extra_body={"ignore_eos": True})  # fmt: skip
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """(id, data) as they come."""
    at = ""
    for line in lines:
        if line.startswith("id: "):
            at = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield at, data if data == "[DONE]" else json.loads(data)


def expected(tokens: int) -> list[int]:
    return undisturbed(PROMPT, Sampling(seed=3), tokens, BYTE_VOCABULARY)


def test_kill_9_of_the_serving_instance_in_mid_stream_is_not_noticed(pair: ServerProcess) -> None:
    asked = BODY | {"stream": True, "n": 2, "return_token_ids": True, "stream_options": {"include_usage": True}}
    quiet = list(_stream(pair, asked))
    with instance(pair.join, "c") as third:
        wait_for(pair.url, "c")
        heard = []
        for at, event in _stream(pair, asked):
            heard.append((at, event))
            if len(heard) == 40:
                serving = [one for one in names(pair.url).values() if one["open"]]
                # A fresh one that takes its place keeps the pair for the tests after this one.
                assert len(serving) == 1
                victim = serving[0]["name"]
                os.kill(serving[0]["pid"], signal.SIGKILL)
        assert _gathered(heard) == _gathered(quiet)
        assert _gathered(heard)[1][0] == expected(200)
        assert heard[-1][1] == "[DONE]"
        assert victim not in names(pair.url)
        assert pair.metric("baton_retries_total", cause="lost") >= 2
        del third


def _stream(at: ServerProcess, body: dict[str, Any], **headers: str) -> Iterator[tuple[str, Any]]:
    with httpx.stream("POST", f"{at.url}/v1/completions", json=body, timeout=60, headers=headers) as response:
        yield from events(response.iter_lines())


def _gathered(heard: list[tuple[str, Any]]) -> tuple[dict[int, str], dict[int, list[int]], int]:
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


def test_a_router_that_is_killed_and_comes_back_goes_on_after_the_last_event() -> None:
    asked = BODY | {"stream": True, "return_token_ids": True, "max_tokens": 400}
    with baton_router(*SCRIPTED) as first, instance(first.join, "a"):
        wait_for(first.url, "a")
        heard = []
        with contextlib.suppress(httpx.TransportError):
            for at, event in _stream(first, asked, **{"X-Request-Id": "mine"}):
                heard.append((at, event))
                if len(heard) == 20:
                    first.process.kill()
        assert len(heard) < 400
        ports = ("--port", first.url.rpartition(":")[2], "--join-port", first.join.rpartition(":")[2])
        with baton_process("router", *ports, *SCRIPTED) as second:
            url = f"{second.url}/v1/requests/mine/stream"
            with httpx.stream("GET", url, headers={"Last-Event-ID": heard[-1][0]}, timeout=30) as response:
                assert response.status_code == 200
                heard += list(events(response.iter_lines()))
            assert httpx.get(url, timeout=30).status_code == 404
    assert _gathered(heard)[1][0] == expected(400)
    assert [event for _, event in heard].count("[DONE]") == 1


def test_drain_waits_until_the_instance_is_gone_and_its_request_is_whole() -> None:
    with baton_router(*SCRIPTED) as router, instance(router.join, "a") as only:
        wait_for(router.url, "a")
        stream = _stream(router, BODY | {"stream": True})
        next(stream)
        command = [sys.executable, "-m", "baton", "drain", "a", "--url", router.url]
        drained = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (drained.returncode, "a is gone" in drained.stderr) == (0, True)
        assert [event for _, event in stream][-1] == "[DONE]"
        assert only.process.wait(30) == 0
        assert httpx.get(f"{router.url}/ready").status_code == 503
        again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (again.returncode, "No instance is called 'a'" in again.stderr) == (1, True)
        assert router.stop() == 0


def test_who_does_not_hold_the_key_is_refused_and_counted(router: ServerProcess) -> None:
    wrong = ("--executor", "scripted", "--cluster-key", "another cluster key, alas")
    with baton_serve(*wrong, "--router", router.join, "--name", "stranger"):
        host, _, port = router.join.rpartition(":")
        with socket.create_connection((host, int(port))) as forger:
            forger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
            assert forger.recv(100) == b""
        pause = threading.Event()
        for _ in range(300):
            with contextlib.suppress(KeyError):
                if router.metric("baton_refused_connections_total", reason="wrong_key") >= 1:
                    break
            pause.wait(0.02)
        assert router.metric("baton_refused_connections_total", reason="wrong_key") >= 1
        assert router.metric("baton_refused_connections_total", reason="malformed") >= 1
        assert "stranger" not in names(router.url)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "0.0.0.0"), "--api-key"),  # noqa: S104
        (("--join-host", "0.0.0.0"), "cluster key"),  # noqa: S104
        (("--suspect-after", "0.4", "--policy", "whim"), "whim"),
    ],
)
def test_a_bad_option_is_told_clearly(options: tuple[str, ...], named: str) -> None:
    with baton_router("--executor", "scripted", *options, wait=False) as server:
        assert server.process.wait(60) != 0
        assert named in server.output()
        assert "Traceback" not in server.output()
