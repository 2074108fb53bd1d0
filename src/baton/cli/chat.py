"""`baton chat`: talk to a server from the terminal.

Owns the conversation with the user: prompt, commands, streaming, what Ctrl-C and Ctrl-D do. The server is any
OpenAI-compatible one. Piped input is answered once; only the answer goes to stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import signal
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from time import perf_counter
from typing import Annotated

import aiohttp
import msgspec
import typer
from rich.console import Console

from baton.bench.client import (
    MESSAGE_CHARS_MAX,
    NULL,
    KeyWanted,
    ServerUnreachable,
    StreamChunk,
    Untrusted,
    first_model,
    open_http,
)
from baton.bench.sse import SseOverflow, SseParser
from baton.bench.workload import ChatMessageText
from baton.cli.server_trust import CaCert, trusting

PIPED_CHARS_MAX = 4_000_000
ANSWER_LIMIT_S = 3600.0
HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · /exit or Ctrl-D leaves · Ctrl-C stops an answer"
)

# Control characters of the model's text are removed, so that it cannot control the terminal; newline and tab stay.
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class _ErrorBody(msgspec.Struct):
    message: str


class _ErrorReply(msgspec.Struct):
    error: _ErrorBody


class AnswerFailed(Exception):
    """The server refused or the connection broke; the message is for the user."""


@dataclass(frozen=True, slots=True)
class ChatServer:
    """The server and the sampling options of a conversation."""

    url: str
    model: str
    api_key: str | None
    temperature: float | None
    max_tokens: int | None
    tls: ssl.SSLContext | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, messages: list[ChatMessageText]) -> bytes:
        body: dict[str, object] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return msgspec.json.encode(body)


@dataclass(slots=True)
class ChatAnswer:
    """An answer, filled while it streams, so that a stopped one is kept."""

    began_s: float = field(default_factory=perf_counter)
    first_s: float | None = None
    pieces: list[str] = field(default_factory=list)
    tokens: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def figures(self) -> str:
        """Tokens, rate and time to first token, as far as known."""
        if self.first_s is None:
            return "no text"
        tokens = self.tokens if self.tokens is not None else len(self.pieces)
        spent_s = perf_counter() - self.first_s
        rate = f" · {(tokens - 1) / spent_s:,.1f} tokens/s" if tokens > 1 and spent_s > 0 else ""
        return f"{tokens} tokens{rate} · first after {(self.first_s - self.began_s) * 1000:,.0f} ms"


Show = Callable[[str], None]


async def stream_answer(server: ChatServer, messages: list[ChatMessageText], answer: ChatAnswer, show: Show) -> None:
    """Send the messages and show each piece of text as it arrives. Raises AnswerFailed."""
    address = server.url.rstrip("/") + "/v1/chat/completions"
    headers = {"Content-Type": "application/json", **server.headers}
    try:
        async with (
            asyncio.timeout(ANSWER_LIMIT_S),
            open_http(1, server.tls) as http,
            http.post(address, data=server.body(messages), headers=headers) as response,
        ):
            if response.status != 200:
                raise AnswerFailed(_refusal(response.status, await response.content.read(65536)))
            parser = SseParser()
            async for piece in response.content.iter_any():
                for event in parser.feed(piece):
                    _take(event.data, answer, show)
    except TimeoutError:
        raise AnswerFailed(f"the answer took more than {ANSWER_LIMIT_S:g} s") from None
    except (aiohttp.ClientError, ConnectionError, SseOverflow) as error:
        raise AnswerFailed(f"the connection broke: {error}") from error


def _take(data: bytes, answer: ChatAnswer, show: Show) -> None:
    if data.strip() == b"[DONE]":
        return
    try:
        chunk = msgspec.json.decode(data, type=StreamChunk)
    except msgspec.DecodeError as error:
        raise AnswerFailed(f"the server sent something unreadable: {error}") from error
    if chunk.error != NULL:
        raise AnswerFailed(bytes(chunk.error)[:MESSAGE_CHARS_MAX].decode(errors="replace"))
    if chunk.usage is not None:
        answer.tokens = chunk.usage.completion_tokens
    for choice in chunk.choices:
        if choice.delta is not None and choice.delta.content:
            if answer.first_s is None:
                answer.first_s = perf_counter()
            answer.pieces.append(choice.delta.content)
            show(choice.delta.content.translate(_HARMLESS))


def _refusal(status: int, body: bytes) -> str:
    try:
        message = msgspec.json.decode(body, type=_ErrorReply).error.message
    except msgspec.DecodeError:
        message = body[:MESSAGE_CHARS_MAX].decode(errors="replace")
    return f"the server answered {status}: {message}"


class NextInput(Enum):
    GO_ON = auto()
    LEAVE = auto()


class ChatSession:
    """History and commands of one session at the terminal."""

    def __init__(self, console: Console, server: ChatServer, system: str | None) -> None:
        self._console = console
        self._server = server
        self._system = system
        self._turns: list[ChatMessageText] = []

    def handle_line(self, line: str) -> NextInput:
        """Handle one line of input: a command or a message."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "":
                return NextInput.GO_ON
            case "/exit" | "/quit":
                return NextInput.LEAVE
            case "/reset":
                self._turns.clear()
                self._say("forgotten")
            case "/system":
                self._system = rest.strip() or None
                self._say("system prompt set" if self._system else "no system prompt now")
            case _ if word.startswith("/"):
                self._say(HELP)
            case _:
                self.ask(line.strip())
        return NextInput.GO_ON

    def ask(self, text: str) -> bool:
        """Stream the answer; Ctrl-C keeps the text so far. False when the request failed."""
        question = ChatMessageText("user", text)
        system = [ChatMessageText("system", self._system)] if self._system else []
        answer = ChatAnswer()
        try:
            asyncio.run(stream_answer(self._server, [*system, *self._turns, question], answer, self._show))
        except KeyboardInterrupt:
            self._say("\nstopped")
        except AnswerFailed as error:
            self._console.print(f"\n{error}", style="red", markup=False, highlight=False)
            return False  # the question is not kept: asking again must not send it twice
        self._console.print()
        self._say(answer.figures())
        self._turns += [question, ChatMessageText("assistant", answer.text)]
        return True

    def _show(self, text: str) -> None:
        self._console.print(text, end="", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


def _converse(console: Console, server: ChatServer, system: str | None) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() its line editing and history
    console.print(f"{server.model} at {server.url}", style="bold", markup=False, highlight=False)
    console.print(HELP, style="dim", markup=False, highlight=False)
    conversation = ChatSession(console, server, system)
    while True:
        try:
            line = console.input("[bold green]›[/] ")
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit leaves", style="dim")
            continue
        except EOFError:
            console.print()
            return
        if conversation.handle_line(line) is NextInput.LEAVE:
            return


def _answer_once(server: ChatServer, system: str | None, question: str) -> None:
    """Print the answer on stdout and its figures on stderr."""

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    errors = Console(stderr=True)
    messages = [ChatMessageText("system", system)] if system else []
    answer = ChatAnswer()
    try:
        asyncio.run(stream_answer(server, [*messages, ChatMessageText("user", question)], answer, show))
    except AnswerFailed as error:
        errors.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    show("\n")
    errors.print(answer.figures(), style="dim", markup=False, highlight=False)


async def _find_model(url: str, api_key: str | None, tls: ssl.SSLContext | None) -> str:
    async with open_http(1, tls) as http:
        return await first_model(http, url, api_key)


def _advice(error: ServerUnreachable) -> str:
    if isinstance(error, KeyWanted):
        return "Give it with --api-key or OPENAI_API_KEY"
    if isinstance(error, Untrusted):
        return "Give the CA that signed it with --cacert FILE or SSL_CERT_FILE, and the name it is for in --url"
    return "Start a server with: baton serve smollm2   (or say where one is with --url)"


def chat(
    url: Annotated[str, typer.Option(help="Base address of any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model. Default: the first that the server lists.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="Default: the server's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = 1024,
    cacert: CaCert = None,
) -> None:
    """Talk to a running server. Piped input is answered once: echo "What is a baton?" | baton chat"""
    console, tls = Console(), trusting(cacert)
    try:
        found = asyncio.run(_find_model(url, api_key, tls))
    except ServerUnreachable as error:
        errors = Console(stderr=True)
        errors.print(str(error), style="red", markup=False, highlight=False)
        errors.print(_advice(error), markup=False)
        raise typer.Exit(1) from error
    server = ChatServer(url, model or found, api_key, temperature, max_tokens, tls)
    if sys.stdin.isatty():
        # A shell that starts us in the background leaves Ctrl-C ignored; at a terminal it means "stop this answer".
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _converse(console, server, system)
        return
    question = sys.stdin.read(PIPED_CHARS_MAX).strip()
    if not question:
        raise typer.BadParameter("nothing was piped in")
    _answer_once(server, system, question)
