"""Sends streamed requests to an OpenAI-compatible server and times them.

Owns the HTTP of the load generator: payloads, the event stream, the kinds of failure, retries after a 429 or 503. A
failure of the server or the network is a value in the record, never an exception: a load generator that stops at the
first error measures nothing.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import perf_counter

import aiohttp
import msgspec

from baton.bench.sse import SseEvent, SseOverflow, SseParser
from baton.bench.workload import ChatMessageText, Endpoint, Reply

RETRY_AFTER_MAX_S = 60.0
RETRY_AFTER_DEFAULT_S = 1.0
RETRY_STATUSES = (429, 503)
MESSAGE_CHARS_MAX = 300


class ServerUnreachable(Exception):
    """No server at the address, or not an OpenAI-compatible one."""


class KeyWanted(ServerUnreachable):
    """The server wants another API key."""


class Untrusted(ServerUnreachable):
    """The server's certificate is not trusted, or is for another name."""


@dataclass(frozen=True, slots=True)
class TargetServer:
    url: str
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def path(self) -> str:
        return self.url.rstrip("/") + ("/v1/chat/completions" if self.endpoint is Endpoint.CHAT else "/v1/completions")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Options of every request."""

    temperature: float = 0.0
    ignore_eos: bool = True
    return_token_ids: bool = False
    retries_max: int = 0


NULL = msgspec.Raw(b"null")


# The fields of responses that are read. Others are skipped by the decoder.
class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class StreamChunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = NULL


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNKS = msgspec.json.Decoder(StreamChunk)
_ENCODER = msgspec.json.Encoder()


class StreamBroken(Exception):
    """The response failed; `kind` is the error's name in the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RequestRecord(msgspec.Struct):
    """The record of one request. Times are seconds after the start of the run."""

    session: int
    round: int
    due_s: float
    sent_s: float
    first_s: float | None = None
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    events: int = 0
    """Stream events with tokens; fewer than tokens when the server sends several at once."""
    retries: int = 0
    usage_missing: bool = False
    error: str | None = None
    error_message: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens after the first."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class Sinks:
    """Callbacks for measurements that are too many to keep per request."""

    gap: Callable[[float], None] = lambda _gap_s: None
    tokens: Callable[[float, int], None] = lambda _at_s, _count: None


@dataclass(slots=True)
class _Answer:
    """State of one streamed response."""

    endpoint: Endpoint
    keep_reply: bool
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: _Usage | None = None
    ids_seen: int = 0
    events: int = 0
    events_with_text: int = 0
    finished: bool = False
    done: bool = False

    def take(self, event: SseEvent) -> int:
        """Number of tokens in the event, estimated from its fields."""
        if event.data.strip() == b"[DONE]":
            self.done = True
            return 0
        chunk = self._decode(event)
        if chunk.usage is not None:
            self.usage = chunk.usage
        return self._take_choice(chunk.choices[0]) if chunk.choices else 0

    def _decode(self, event: SseEvent) -> StreamChunk:
        try:
            chunk = _CHUNKS.decode(event.data)
        except msgspec.DecodeError as error:
            shown = event.data[:MESSAGE_CHARS_MAX].decode(errors="replace")
            kind = "error_event" if event.name == "error" else "bad_event"
            raise StreamBroken(kind, f"{error}: {shown}") from error
        if chunk.error != NULL or event.name == "error":
            raise StreamBroken("error_event", event.data[:MESSAGE_CHARS_MAX].decode(errors="replace"))
        return chunk

    def _take_choice(self, choice: _Choice) -> int:
        if choice.finish_reason is not None:
            self.finished = True
        text = choice.text or ""
        if choice.delta is not None:
            text = (choice.delta.content or "") + (choice.delta.reasoning_content or "")
        ids = choice.token_ids or []
        self.ids_seen += len(ids)
        self.events_with_text += bool(text)
        if self.keep_reply:
            self.text.append(text)
            self.token_ids += ids
        # A chat stream opens with the role alone, which is no token. On the completions endpoint an event without text
        # is a token whose bytes are not yet a character, unless it only says that the answer ended.
        silent_token = self.endpoint is Endpoint.COMPLETIONS and choice.finish_reason is None
        if not (text or ids or silent_token):
            return 0
        self.events += 1
        return len(ids) or 1


class StreamingClient:
    """Sends requests and times them against one clock, which starts at `zero_s` (perf_counter) or when it is made."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        target: TargetServer,
        ask: BenchRequest,
        sinks: Sinks | None = None,
        zero_s: float | None = None,
    ) -> None:
        self._http = http
        self.target = target
        self._ask = ask
        self._sinks = sinks or Sinks()
        self._zero_s = perf_counter() if zero_s is None else zero_s

    def now_s(self) -> float:
        return perf_counter() - self._zero_s

    async def request(
        self, prompt: list[int] | list[ChatMessageText], output_tokens: int, record: RequestRecord, keep_reply: bool = False
    ) -> Reply | None:
        """Send and fill `record`. Returns the reply if `keep_reply` and the request succeeded."""
        body = self._body(prompt, output_tokens, with_ids=keep_reply)
        answer = _Answer(self.target.endpoint, keep_reply)
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._send(body, answer, record)
            self._conclude(answer, output_tokens, record)
        except StreamBroken as error:
            _fail(record, error.kind, str(error))
        except TimeoutError:
            _fail(record, "timeout", f"no end within {self.target.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            _fail(record, "connect", str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            _fail(record, "broken_stream", f"{type(error).__name__}: {error}")
        except SseOverflow as error:
            _fail(record, "bad_event", str(error))
        record.end_s = self.now_s()
        if record.error is not None or not keep_reply:
            return None
        return Reply("".join(answer.text), tuple(answer.token_ids))

    def _body(self, prompt: list[int] | list[ChatMessageText], output_tokens: int, with_ids: bool) -> bytes:
        body: dict[str, object] = {
            "model": self.target.model,
            "max_tokens": output_tokens,
            "temperature": self._ask.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages" if self.target.endpoint is Endpoint.CHAT else "prompt": prompt,
        }
        if self._ask.ignore_eos:
            body["ignore_eos"] = True
        if self._ask.return_token_ids or (with_ids and self.target.endpoint is Endpoint.COMPLETIONS):
            body["return_token_ids"] = True
        return _ENCODER.encode(body)

    async def _send(self, body: bytes, answer: _Answer, record: RequestRecord) -> None:
        headers = {"Content-Type": "application/json", **self.target.headers}
        for _attempt in range(self._ask.retries_max + 1):
            async with self._http.post(self.target.path, data=body, headers=headers) as response:
                if response.status == 200:
                    await self._read(response, answer, record)
                    return
                text = (await response.content.read(4096)).decode(errors="replace")[:MESSAGE_CHARS_MAX]
                if response.status not in RETRY_STATUSES or record.retries >= self._ask.retries_max:
                    raise StreamBroken(f"http_{response.status}", text)
                wait_s = retry_after_s(response.headers.get("Retry-After"), datetime.now(UTC))
            record.retries += 1
            await asyncio.sleep(wait_s)

    async def _read(self, response: aiohttp.ClientResponse, answer: _Answer, record: RequestRecord) -> None:
        parser = SseParser()
        previous_s: float | None = None
        async for piece in response.content.iter_any():
            events = parser.feed(piece)
            now_s = self.now_s()
            for event in events:
                if tokens := answer.take(event):
                    self._sinks.tokens(now_s, tokens)
                    if previous_s is None:
                        record.first_s = now_s
                    else:
                        self._sinks.gap(now_s - previous_s)
                    previous_s = now_s
        for event in parser.close():
            answer.take(event)

    def _conclude(self, answer: _Answer, asked_tokens: int, record: RequestRecord) -> None:
        """Check a finished stream for completeness and consistent counts."""
        record.events = answer.events
        if not answer.done and not answer.finished:
            raise StreamBroken("broken_stream", "the stream ended before the answer did")
        if record.first_s is None:
            # Only empty text came, as when the only token is an end token: its end counts as the first token.
            record.first_s = self.now_s()
        if answer.usage is None:
            record.usage_missing = True
            record.output_tokens = answer.events
            return
        record.prompt_tokens = answer.usage.prompt_tokens
        record.output_tokens = answer.usage.completion_tokens or 0
        details = answer.usage.prompt_tokens_details
        record.cached_tokens = details.cached_tokens if details is not None else None
        _check_count(answer, asked_tokens, record.output_tokens, exact=self._ask.ignore_eos)


def _check_count(answer: _Answer, asked: int, reported: int, exact: bool) -> None:
    if reported > asked or (exact and reported != asked):
        raise StreamBroken("token_count", f"asked for {asked} tokens, usage says {reported}")
    if answer.ids_seen and answer.ids_seen != reported:
        raise StreamBroken("token_count", f"{answer.ids_seen} token ids streamed, usage says {reported}")
    if answer.events_with_text > reported:
        raise StreamBroken("token_count", f"{answer.events_with_text} pieces of text streamed, usage says {reported}")


def _fail(record: RequestRecord, kind: str, message: str) -> None:
    record.error = kind
    record.error_message = message[:MESSAGE_CHARS_MAX]


def retry_after_s(header: str | None, now: datetime) -> float:
    """Seconds to wait: the header is a number of seconds or a date; nonsense counts as absent; bounded either way."""
    if header is None:
        return RETRY_AFTER_DEFAULT_S
    try:
        wait_s = float(header)
    except ValueError:
        try:
            moment = parsedate_to_datetime(header)
        except ValueError:
            return RETRY_AFTER_DEFAULT_S
        wait_s = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now).total_seconds()
    if wait_s != wait_s:  # NaN, which float() accepts
        return RETRY_AFTER_DEFAULT_S
    return min(max(wait_s, 0.0), RETRY_AFTER_MAX_S)


async def first_model(http: aiohttp.ClientSession, url: str, api_key: str | None = None, timeout_s: float = 10.0) -> str:
    """The first model that the server lists; raises ServerUnreachable with a message for people."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = url.rstrip("/") + "/v1/models"
    try:
        async with asyncio.timeout(timeout_s), http.get(address, headers=headers) as response:
            body = await response.read()
    except TimeoutError:
        raise ServerUnreachable(f"{address} did not answer within {timeout_s:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise Untrusted(f"the certificate of {url} is not trusted: {error.certificate_error}") from error
    except aiohttp.ClientSSLError as error:
        raise ServerUnreachable(f"no server speaks TLS at {url}: {error.os_error}") from error
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
        raise ServerUnreachable(f"no server answers at {url}: {reason}") from error
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        raise ServerUnreachable(f"no server answers at {url}: {error}") from error
    if response.status in (401, 403):
        raise KeyWanted(f"{url} wants {'an' if api_key is None else 'another'} API key")
    if response.status != 200:
        raise ServerUnreachable(f"{address} answered {response.status}: {body[:200].decode(errors='replace')}")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.DecodeError as error:
        raise ServerUnreachable(f"{address} is not an OpenAI-compatible model list: {error}") from error
    if not models:
        raise ServerUnreachable(f"{address} lists no model")
    return models[0].id


def open_http(connections_max: int, tls: ssl.SSLContext | bool | None = None) -> aiohttp.ClientSession:
    """A session with a connection limit. Timeouts are set per request. For https, `tls` is what is trusted: None what
    the system trusts, False everything."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections_max, force_close=False, ssl=True if tls is None else tls),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=30.0, sock_read=None),
        read_bufsize=2**18,
    )
