"""`baton serve` as real processes, with the scripted executor: life, death, drain, and exact tokens over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from baton.core.engine.request import Sampling
from baton.core.errors import EXIT_SETUP
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.server import ServerProcess, baton_serve, refused_by_serve

SCRIPTED = ("--executor", "scripted")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with baton_serve(*SCRIPTED) as running:
        yield running


def ask(url: str, **fields: object) -> httpx.Response:
    body = {"model": "scripted", "prompt": "hello", "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def lines_of(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line)


def test_tokens_over_http_are_exactly_the_undisturbed_ones(server: ServerProcess) -> None:
    prompt = list(range(100))
    sampling = Sampling(seed=5, stop_token_ids=(BYTE_VOCABULARY - 1,))
    answer = ask(server.url, prompt=prompt, max_tokens=64, seed=5, temperature=1, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == undisturbed(prompt, sampling, 64, BYTE_VOCABULARY)


def test_several_tokens_a_step_are_exactly_the_undisturbed_ones() -> None:
    prompt = list(range(100))
    sampling = Sampling(seed=5, stop_token_ids=(BYTE_VOCABULARY - 1,))
    with baton_serve(*SCRIPTED, "--speculate", "ngram", "--draft-tokens", "3") as server:
        answer = ask(server.url, prompt=prompt, max_tokens=64, seed=5, temperature=1, return_token_ids=True).json()
        assert answer["choices"][0]["token_ids"] == undisturbed(prompt, sampling, 64, BYTE_VOCABULARY)
        assert server.metric("baton_engine_steps_total") < 64


def test_the_official_client_streams_with_usage(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "hi"}], max_tokens=12, stream=True, n=2,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_second_turn_reports_cached_tokens(server: ServerProcess) -> None:
    prompt = [7] * 100
    assert ask(server.url, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ask(server.url, prompt=prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_what_never_fits_is_refused_with_the_limit(server: ServerProcess) -> None:
    response = ask(server.url, max_tokens=10**9)
    assert response.status_code == 400
    assert "8192" in response.json()["error"]["message"]


def test_a_full_queue_answers_429_with_retry_after_and_serves_on() -> None:
    with baton_serve(*SCRIPTED, "--max-waiting", "1", "--max-num-seqs", "1", "--step-ms", "20") as server:
        blocker = httpx.Client(timeout=60)
        body = {"model": "scripted", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with blocker.stream("POST", f"{server.url}/v1/completions", json=body) as running:
            lines = lines_of(running)
            next(lines)
            with httpx.Client(timeout=60).stream("POST", f"{server.url}/v1/completions", json=body):
                refused = ask(server.url)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
        # The two clients above have left; how soon their places are free again is not this test's business.
        assert any(ask(server.url).status_code == 200 for _ in range(200))


def test_a_killed_engine_gives_a_typed_error_then_503_then_a_non_zero_exit() -> None:
    with baton_serve(*SCRIPTED, "--step-ms", "10") as server:
        body = {"model": "scripted", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = lines_of(response)
            next(lines)
            os.kill(server.engine_pid(), signal.SIGKILL)
            rest = list(lines)
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert ask(server.url).status_code == 503
        assert server.process.wait(30) == 1
        assert "the engine died" in server.output()


def test_sigterm_lets_open_requests_finish_and_refuses_new_ones() -> None:
    with baton_serve(*SCRIPTED, "--step-ms", "10") as server:
        body = {"model": "scripted", "prompt": "x", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = lines_of(response)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            refused = _until_draining(server)
            rest = list(lines)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(30) == 0


def _until_draining(server: ServerProcess) -> httpx.Response:
    for _ in range(1000):
        if httpx.get(f"{server.url}/ready").status_code == 503:
            return ask(server.url)
    raise AssertionError("never drained")


def test_a_second_signal_stops_at_once() -> None:
    with baton_serve(*SCRIPTED, "--step-ms", "50") as server:
        body = {"model": "scripted", "prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = lines_of(response)
            next(lines)
            server.process.send_signal(signal.SIGINT)
            _until_draining(server)
            server.process.send_signal(signal.SIGINT)
            rest = list(lines)
            assert "this instance was stopped" in rest[-1]
            assert server.process.wait(30) == 0
        assert "Traceback" not in server.output()


def test_the_engine_goes_when_the_front_end_is_killed(server: ServerProcess) -> None:
    """The last to use `server`, which it kills."""
    engine = os.pidfd_open(server.engine_pid())
    server.process.kill()
    gone = threading.Event()
    threading.Thread(target=lambda: (_wait_readable(engine), gone.set()), daemon=True).start()
    assert gone.wait(30)


def _wait_readable(descriptor: int) -> None:
    import select

    select.select([descriptor], [], [])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "0.0.0.0"), "--api-key"),  # noqa: S104
        (("--kv-memory", "lots"), "not a size"),
        (("--max-num-batched-tokens", "8"), "step_tokens"),
        (("--block-size", "0"), "block-size"),
        (("--speculate", "ngram", "--draft-tokens", "16"), "must be less than --block-size (16)"),
        (
            ("--speculate", "naive", "--max-num-batched-tokens", "319"),
            "must be at least --max-num-seqs × (1 + --draft-tokens)",
        ),
        (("--speculate", "ngram", "--ngram-max", "1"), "ngram_min (2) and ngram_max (1)"),
        (("--no-such-option",), "No such option"),
        (("--api-key", ""), "API key is empty"),
        (("--chat-template", "/nowhere.jinja"), "nowhere.jinja"),
    ],
)
def test_a_bad_option_is_told_clearly(options: tuple[str, ...], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, said = refused_by_serve(*SCRIPTED, *options)
    assert status in (1, 2)
    assert named in said
    assert "Traceback" not in said + capfd.readouterr().err


def test_a_port_in_use_is_told_before_anything_slow_happens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "baton", "serve", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "cannot listen" in ended.stderr


def test_a_model_that_is_not_there_is_told_clearly(tmp_path: Path) -> None:
    with baton_serve(str(tmp_path / "nowhere"), wait=False) as server:
        assert server.process.wait(60) == EXIT_SETUP
        assert "nowhere" in server.output()
        assert "Traceback" not in server.output()
