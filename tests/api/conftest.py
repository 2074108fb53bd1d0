from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from baton.api.app import create_app
from baton.api.constraint_compiler import ConstraintCompiler
from baton.api.continuation import RequestProofs
from baton.api.model_text import ModelText
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.settings import ApiSettings
from tests.api.compiler import GrammarsOnly
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import TEMPLATE, byte_level

REPLY = "hello world, 你好 é! The end."


@pytest.fixture(scope="session")
def text() -> ModelText:
    tokenizer = byte_level()
    return ModelText(
        tokenizer,
        chat_template=TEMPLATE,
        eos_ids=[tokenizer.token_to_id("<|end|>")],
        defaults=SamplingDefaults(temperature=0.6, top_k=20),
    )


@pytest.fixture
def engine(text: ModelText) -> ScriptedEngine:
    """Says REPLY and ends, whatever it is asked."""
    eos = min(text.eos_ids)
    return ScriptedEngine(lambda _: [*text.encode(REPLY), eos, *text.encode("beyond the end")], vocabulary=320)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        error = self.json()["error"]
        assert set(error) - {"retryable"} == {"message", "type", "param", "code"}
        return error

    def events(self) -> list[Any]:
        """The data of each server-sent event; `[DONE]` as itself."""
        assert self.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Served:
    """A running server, and a plain client for what the official one would not send."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, raw: bytes | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with closing(connection):
            payload = raw if raw is not None else None if body is None else json.dumps(body).encode()
            sent = ({"Content-Type": "application/json"} if payload is not None else {}) | dict(headers or {})
            connection.request(method, path, payload, sent)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def chat(self, headers: Mapping[str, str] | None = None, **fields: object) -> Reply:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
        return self.call("POST", "/v1/chat/completions", body, headers)

    def complete(self, headers: Mapping[str, str] | None = None, **fields: object) -> Reply:
        return self.call("POST", "/v1/completions", {"model": "tiny", "prompt": "hi"} | fields, headers)


_ending: list[threading.Thread] = []


@pytest.fixture(scope="session", autouse=True)
def every_server_ends() -> Iterator[None]:
    """Uvicorn takes a tenth of a second to stop; the next test need not wait for that, but it must happen."""
    yield
    for thread in _ending:
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def serving(
    engine: ScriptedEngine,
    text: ModelText,
    settings: ApiSettings,
    proofs: RequestProofs | None = None,
    compiler: ConstraintCompiler | None = None,
) -> Iterator[Served]:
    """A real uvicorn on a free loopback port, in a thread of its own."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    app = create_app(engine, text, settings, proofs=proofs, compiler=compiler or GrammarsOnly())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))

    def run() -> None:
        with closing(sock):
            asyncio.run(server.serve([sock]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.005)
    try:
        yield Served(port)
    finally:
        server.should_exit = True
        _ending.append(thread)


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(served_model_names=("tiny", "tiny-alias"))


@pytest.fixture
def served(engine: ScriptedEngine, text: ModelText, settings: ApiSettings) -> Iterator[Served]:
    with serving(engine, text, settings) as running:
        yield running
