"""One request of a chaos run: sent, read to its end, compared with the undisturbed answer.

Owns what "the same answer" means: tokens, text, finish reason and log-probabilities of every choice, and the counts of the
usage; a stream ends with exactly one [DONE] and nothing after it. No answer ends for want of blocks, and none was preempted
more often than protects it, over all instances. Tool calls are compared by name and arguments; their ids are of a request.
Errors of the network or the server are values here, never exceptions: each
is reported as a difference.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

import aiohttp
import msgspec

from baton.bench.chaos_cases import ChaosCase
from baton.bench.chaos_constraints import ConstraintJudgement, SeenCall, judged
from baton.bench.sse import SseEvent, SseOverflow, SseParser
from baton.core.config import SchedulerSettings
from baton.core.handover.faults import PdCode

SHOWN_CHARS = 300
WANT_OF_ROOM = (PdCode.REFUSED, PdCode.PREEMPTED, PdCode.TIMEOUT)
PREEMPTIONS_MAX = SchedulerSettings().max_preemptions
LOGPROB_SLACK = 1e-6
"""Tolerance of log-probabilities: another batch size sums in another order. float64 errors are far smaller."""


# The part of the answers that is compared; both endpoints, streamed and whole.
class _Entry(msgspec.Struct):
    token: str
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None
    tokens: list[str] = []
    token_logprobs: list[float] = []
    text_offset: list[int] = []


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    """Of a piece in a stream; calls of a whole answer come in order."""
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Bill(msgspec.Struct):
    attempts: int = 0
    preemptions: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    baton: _Bill | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_CHUNKS = msgspec.json.Decoder(_Chunk)
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class StreamedParts:
    """The received parts of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    pieces: list[str] = field(default_factory=list)
    """Token texts from the log-probabilities."""
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    calls: list[SeenCall] = field(default_factory=list)
    last_tokens_s: float | None = None
    """Time of the last event with tokens."""


@dataclass(slots=True)
class SeenAnswer:
    """One answer as received by a client."""

    status: int = 0
    parts: dict[int, StreamedParts] = field(default_factory=dict)
    usage: _Usage | None = None
    dones: int = 0
    fault: str | None = None
    """Why the answer is incomplete or invalid."""
    longest_gap_s: float = 0.0
    """Longest time between two events with tokens of one choice; streams only."""
    took_s: float = 0.0

    @property
    def moved(self) -> int:
        """How often its choices moved to another instance."""
        if self.usage is None or self.usage.baton is None:
            return 0
        return max(0, self.usage.baton.attempts - len(self.parts))

    @property
    def tokens(self) -> int:
        return sum(len(part.tokens) for part in self.parts.values())

    def judgements(self, case: ChaosCase) -> list[ConstraintJudgement]:
        """Whether each choice satisfies the constraint of its case; empty where there is none."""
        if case.constraint is None or self.fault is not None:
            return []
        parts = [part for _, part in sorted(self.parts.items())]
        return [judged(case.constraint, part.finish, part.text, part.calls) for part in parts]

    def take(self, chunk: _Chunk, now_s: float) -> None:
        if chunk.error != msgspec.Raw(b"null"):
            self.fault = self.fault or _error(bytes(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self._take_choice(choice, now_s)

    def _take_choice(self, choice: _Choice, now_s: float) -> None:
        part = self.parts.setdefault(choice.index, StreamedParts())
        if part.finish is not None:
            self.fault = self.fault or f"choice {choice.index} went on after its end"
        message = choice.delta or choice.message
        part.text += (message.content if message is not None else choice.text) or ""
        for number, piece in enumerate((message.tool_calls if message is not None else None) or []):
            self._take_call(part, number if piece.index is None else piece.index, piece)
        part.tokens += choice.token_ids or []
        if choice.token_ids:
            if part.last_tokens_s is not None:
                self.longest_gap_s = max(self.longest_gap_s, now_s - part.last_tokens_s)
            part.last_tokens_s = now_s
        part.finish = choice.finish_reason
        if choice.logprobs is not None:
            entries = choice.logprobs.content or []
            part.pieces += [entry.token for entry in entries] + choice.logprobs.tokens
            part.logprobs += [entry.logprob for entry in entries] + choice.logprobs.token_logprobs
            part.offsets += choice.logprobs.text_offset

    def _take_call(self, part: StreamedParts, index: int, piece: _Call) -> None:
        if index == len(part.calls):
            part.calls.append(SeenCall())
        if index >= len(part.calls):
            self.fault = self.fault or f"call {index} came before call {len(part.calls)}"
            return
        call = part.calls[index]
        call.name += piece.function.name or ""
        call.arguments += piece.function.arguments or ""


async def ask(http: aiohttp.ClientSession, url: str, case: ChaosCase, limit_s: float) -> SeenAnswer:
    answer, begin_s = SeenAnswer(), perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            await _send(http, url, case, answer)
    except TimeoutError:
        answer.fault = f"no end within {limit_s:g} s"
    except (aiohttp.ClientError, ConnectionError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    except (msgspec.DecodeError, SseOverflow) as error:
        answer.fault = f"not what was agreed on: {error}"
    answer.took_s = perf_counter() - begin_s
    if answer.fault is None:
        answer.fault = _incomplete(case, answer)
    return answer


async def _send(http: aiohttp.ClientSession, url: str, case: ChaosCase, answer: SeenAnswer) -> None:
    headers = {"Content-Type": "application/json"}
    async with http.post(url + case.path, data=_encode(case.body), headers=headers) as response:
        answer.status = response.status
        if response.status != 200:
            answer.fault = f"{response.status}: {_error(await response.content.read(SHOWN_CHARS))}"
        elif case.is_streamed:
            await _read_stream(response, answer)
        else:
            answer.take(_CHUNKS.decode(await response.read()), perf_counter())


async def _read_stream(response: aiohttp.ClientResponse, answer: SeenAnswer) -> None:
    parser = SseParser()
    async for piece in response.content.iter_any():
        for event in parser.feed(piece):
            _take_event(answer, event)
    for event in parser.close():
        _take_event(answer, event)


def _take_event(answer: SeenAnswer, event: SseEvent) -> None:
    if answer.dones:
        answer.fault = answer.fault or "something came after [DONE]"
    if event.data.strip() == b"[DONE]":
        answer.dones += 1
    else:
        answer.take(_CHUNKS.decode(event.data), perf_counter())


def _incomplete(case: ChaosCase, answer: SeenAnswer) -> str | None:
    """What a finished answer lacks; None when complete."""
    if case.is_streamed and answer.dones != 1:
        return f"{answer.dones} times [DONE]"
    if len(answer.parts) != case.choices:
        return f"{len(answer.parts)} choices of {case.choices}"
    if open_ones := [index for index, part in answer.parts.items() if part.finish is None]:
        return f"choices without an end: {open_ones}"
    if answer.usage is None:
        return "no usage"
    if answer.usage.completion_tokens != answer.tokens:
        return f"usage says {answer.usage.completion_tokens} tokens, {answer.tokens} came"
    bill = answer.usage.baton
    if bill is not None and bill.preemptions > PREEMPTIONS_MAX * case.choices:
        return f"{bill.preemptions} preemptions, and {PREEMPTIONS_MAX} of a choice anywhere protect it everywhere"
    return None


def _error(body: bytes) -> str:
    """The error as text; it says so where a request was ended for want of blocks, which nothing excuses."""
    text = body[:SHOWN_CHARS].decode(errors="replace")
    ended = next((code for code in WANT_OF_ROOM if f'"code":{int(code)},"stage"' in text.replace(" ", "")), None)
    return f"error: {text}" if ended is None else f"ended for want of blocks: {text}"


def differences(undisturbed: SeenAnswer, answer: SeenAnswer) -> list[str]:
    """Differences from the undisturbed answer; empty when equal."""
    if answer.fault is not None:
        return [answer.fault]
    found: list[str] = []
    for index, expected in sorted(undisturbed.parts.items()):
        if index not in answer.parts:
            found.append(f"choice {index} is missing")
        else:
            found += [f"choice {index}: {what}" for what in _differ(expected, answer.parts[index])]
    before, after = _counts(undisturbed.usage), _counts(answer.usage)
    if before != after:
        found.append(f"usage {after}, undisturbed {before}")
    return found


def _differ(expected: StreamedParts, part: StreamedParts) -> list[str]:
    found: list[str] = []
    if part.tokens != expected.tokens:
        found.append(f"tokens differ from number {_first_difference(expected.tokens, part.tokens)} on")
    if part.text != expected.text:
        at = _first_difference(expected.text, part.text)
        window = slice(max(0, at - 10), at + 10)
        found.append(f"text differs at character {at}: {part.text[window]!r}, undisturbed {expected.text[window]!r}")
    if part.calls != expected.calls:
        found.append(f"tool calls {part.calls}, undisturbed {expected.calls}"[:SHOWN_CHARS])
    if part.finish != expected.finish:
        found.append(f"finish reason {part.finish}, undisturbed {expected.finish}")
    aligned = part.pieces == expected.pieces and part.offsets == expected.offsets
    if not aligned or not _close(expected.logprobs, part.logprobs):
        found.append("log-probabilities differ" if aligned else "log-probabilities are not aligned")
    return found


def _first_difference(expected: list[int] | str, found: list[int] | str) -> int:
    pairs = enumerate(zip(expected, found, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(expected), len(found)))


def _close(expected: list[float], found: list[float]) -> bool:
    same = len(expected) == len(found)
    return same and all(
        math.isclose(one, other, rel_tol=LOGPROB_SLACK, abs_tol=LOGPROB_SLACK)
        for one, other in zip(expected, found, strict=True)
    )


def _counts(usage: _Usage | None) -> Mapping[str, int] | None:
    if usage is None:
        return None
    return {"prompt": usage.prompt_tokens, "completion": usage.completion_tokens, "total": usage.total_tokens}
