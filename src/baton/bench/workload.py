"""Sessions of the load generator: their rounds, and the exact prompt of each round.

Owns the shapes of the load. A single request is a session of one round. Prompts are a function of (seed, session,
round) alone, so two servers that get the same workload get the same work, and sending stays cheap: nothing is built
before it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from baton.bench.traces import HASH_BLOCK_TOKENS, TracedRequest

# Purpose of a random stream: the first number of its seed, so that no two uses share a stream.
_UNIQUE, _PREFIX, _TRACE_BLOCK, _ARRIVALS = range(4)

# Short common words: one token each, with the space before them, in nearly every BPE vocabulary.
_WORDS = (  # noqa: SIM905 - a list of one hundred literals would be a page long
    "the of and to in is that for it as with on be at by this have from or one had not but what all were when we there "
    "can an your which their said if do will each about how up out them then she many some so these would other into has "
    "more her two like him see time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know"
).split()


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token ids that prompts are drawn from: low ≤ id < high. Away from zero, where special tokens live."""

    low: int = 1000
    high: int = 20_000


@dataclass(frozen=True, slots=True)
class Round:
    input_tokens: int
    """New tokens of this round, without prefix and history."""
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """From a trace: ids of the leading prompt blocks; equal ids give equal tokens."""


@dataclass(frozen=True, slots=True)
class BenchSession:
    index: int
    rounds: tuple[Round, ...]
    due_s: float | None = None
    """Start time in an open loop, in seconds after the start of the run."""
    think_s: float = 0.0
    prefix_group: int | None = None
    prefix_tokens: int = 0


class ChatMessageText(msgspec.Struct, frozen=True):
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    token_ids: tuple[int, ...]
    """Empty when the server does not return them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Makes the tokens or words of any part of any prompt."""

    seed: int = 0
    tokens: TokenRange = field(default_factory=TokenRange)

    def draw(self, count: int, *what: int) -> list[int]:
        source = np.random.default_rng([self.seed, *what])
        drawn: list[int] = source.integers(self.tokens.low, self.tokens.high, size=count).tolist()
        return drawn

    def round_tokens(self, session: BenchSession, number: int) -> list[int]:
        this = session.rounds[number]
        prompt: list[int] = []
        for block in this.prefix_blocks:
            prompt += self.draw(HASH_BLOCK_TOKENS, _TRACE_BLOCK, block)
        del prompt[this.input_tokens :]
        return prompt + self.draw(this.input_tokens - len(prompt), _UNIQUE, session.index, number)

    def prefix_of(self, session: BenchSession) -> list[int]:
        if session.prefix_group is None:
            return []
        return self.draw(session.prefix_tokens, _PREFIX, session.prefix_group)

    @staticmethod
    def words(tokens: list[int]) -> str:
        """About as many tokens of text; equal ids give equal words, so shared prefixes stay shared."""
        return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)


class TokenConversation:
    """A session on the completions endpoint: the prompt is the list of all token ids so far."""

    def __init__(self, recipe: Recipe, session: BenchSession) -> None:
        self._recipe = recipe
        self._session = session
        self._history = recipe.prefix_of(session)

    def ask(self, number: int) -> list[int]:
        self._history += self._recipe.round_tokens(self._session, number)
        return self._history

    def add_reply(self, number: int, reply: Reply) -> None:
        asked = self._session.rounds[number].output_tokens
        # Without token ids from the server, random ones stand in: the history keeps its length and cached prompt.
        self._history += reply.token_ids or self._recipe.draw(asked, _UNIQUE, self._session.index, number, 1)


class ChatConversation:
    """A session on the chat endpoint: a shared prefix becomes the system message."""

    def __init__(self, recipe: Recipe, session: BenchSession) -> None:
        self._recipe = recipe
        self._session = session
        prefix = recipe.prefix_of(session)
        self._messages = [ChatMessageText("system", recipe.words(prefix))] if prefix else []

    def ask(self, number: int) -> list[ChatMessageText]:
        words = self._recipe.words(self._recipe.round_tokens(self._session, number))
        self._messages.append(ChatMessageText("user", words))
        return self._messages

    def add_reply(self, number: int, reply: Reply) -> None:  # noqa: ARG002 - the same two methods as TokenConversation
        self._messages.append(ChatMessageText("assistant", reply.text))


Conversation = TokenConversation | ChatConversation


def converse(endpoint: Endpoint, recipe: Recipe, session: BenchSession) -> Conversation:
    if endpoint is Endpoint.CHAT:
        return ChatConversation(recipe, session)
    return TokenConversation(recipe, session)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Settings of all sessions of a workload."""

    rounds: int = 1
    think_s: float = 0.0
    prefix_tokens: int = 0
    prefix_groups: int = 1

    def session(self, index: int, first: Round, due_s: float | None) -> BenchSession:
        return BenchSession(
            index=index,
            rounds=(first,) * self.rounds,
            due_s=due_s,
            think_s=self.think_s,
            prefix_group=index % self.prefix_groups if self.prefix_tokens else None,
            prefix_tokens=self.prefix_tokens,
        )


def fixed_sessions(
    count: int, each: Round, shape: WorkloadShape, arrivals: Iterable[float] | None = None
) -> Iterator[BenchSession]:
    """`count` sessions of equal lengths."""
    due = iter(arrivals) if arrivals is not None else None
    for index in range(count):
        yield shape.session(index, each, next(due) if due is not None else None)


def traced_sessions(
    requests: Iterable[TracedRequest],
    shape: WorkloadShape,
    arrivals: Iterable[float] | None = None,
    speed: float | None = None,
) -> Iterator[BenchSession]:
    """One session a traced request; due by `arrivals`, else by the trace's own times at `speed`, else not at all."""
    due = iter(arrivals) if arrivals is not None else None
    for index, request in enumerate(requests):
        this = Round(max(1, request.input_tokens), max(1, request.output_tokens), request.prefix_blocks)
        if due is not None:
            yield shape.session(index, this, next(due))
        elif speed is not None and request.at_s is not None:
            yield shape.session(index, this, request.at_s / speed)
        else:
            yield shape.session(index, this, None)


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which a Poisson process of that rate fires; endless."""
    source = np.random.default_rng([seed, _ARRIVALS])
    at_s = 0.0
    while True:
        at_s += float(source.exponential(1.0 / rate_per_s))
        yield at_s
