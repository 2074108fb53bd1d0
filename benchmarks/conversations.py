"""Conversations of a trace of lengths: tokens asked and answered in each round, and sessions drawn from them.

Owns how rows become rounds. The ShareGPT trace has one row per turn, whose prompt contains all earlier turns; rows of one
conversation are consecutive. A row whose prompt is longer than prompt and answer of the previous row continues that
conversation, and the difference is its new prompt; any other row begins a conversation. A conversation whose first prompt is
longer than the whole previous one is taken for its continuation: there are a few rounds too many, never out of order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from baton.bench.traces import TracedRequest, read_trace
from baton.bench.workload import BenchSession, Round
from baton.sim.cluster import PlannedRequest
from baton.sim.workload import BadWorkload
from benchmarks.runner import find_trace

T = TypeVar("T")

ANSWERED_MIN = 2
"""Tokens that are really generated of an answer that is a pause."""

TRACE_GLOB = "*sharegpt*.csv*"
_CALLS, _SESSIONS, _LONG = 3, 5, 7
"""Purposes of random streams: two uses of one seed never draw the same stream."""


class Turn(NamedTuple):
    """One round."""

    asked: int
    """New prompt tokens of the round."""
    answered: int


Conversation = tuple[Turn, ...]


def find_conversations(trace: Path | None, folder: Path | None) -> Path:
    """The named file, or the ShareGPT trace in a folder."""
    return find_trace(trace, folder, TRACE_GLOB, "the ShareGPT lengths")


def read_conversations(path: Path) -> list[Conversation]:
    return conversations_of(read_trace(path))


def conversations_of(rows: Iterable[TracedRequest]) -> list[Conversation]:
    conversations: list[list[Turn]] = []
    said = 0
    for row in rows:
        if conversations and row.input_tokens > said:
            conversations[-1].append(Turn(row.input_tokens - said, row.output_tokens))
        else:
            conversations.append([Turn(row.input_tokens, row.output_tokens)])
        said = row.input_tokens + row.output_tokens
    return [tuple(conversation) for conversation in conversations]


def _sampled(several: Sequence[T], count: int, seed: Sequence[int]) -> list[T]:
    """`count` distinct items in random order."""
    if len(several) < count:
        raise BadWorkload(f"{count} sessions were asked for, and the trace has {len(several)} of several rounds")
    chosen = np.random.default_rng(seed).choice(len(several), size=count, replace=False)
    return [several[place] for place in chosen.tolist()]


@dataclass(frozen=True, slots=True)
class SimulatedConversations:
    """Conversations drawn from a trace for the simulator, with scaled lengths."""

    count: int
    input_scale: float
    """Factor on new prompt tokens; answers keep their length."""
    context_tokens: int
    """A session ends before the first round that exceeds this."""
    max_tokens: int
    """`max_tokens` of each request, unless the answer is longer."""
    think_us: int = 0

    def drawn(self, conversations: Sequence[Conversation], seed: int) -> list[PlannedRequest]:
        """Requests of `count` distinct conversations with more than one round, session by session."""
        several = [turns for turns in conversations if len(turns) > 1]
        chosen = _sampled(several, self.count, [seed, _CALLS])
        return [call for number, conversation in enumerate(chosen) for call in self._calls(number, conversation)]

    def _calls(self, session: int, conversation: Conversation) -> list[PlannedRequest]:
        calls: list[PlannedRequest] = []
        said = 0
        for turn in conversation:
            asked = max(1, round(turn.asked * self.input_scale))
            answered = max(1, turn.answered)
            declared = max(answered, self.max_tokens)
            if said + asked + declared > self.context_tokens:
                break
            calls.append(
                PlannedRequest(None, asked, answered, declared, session=session, think_us=self.think_us if calls else 0)
            )
            said += asked + answered
        return calls


@dataclass(frozen=True, slots=True)
class ConversationLoad:
    """Conversations for a real server, with lengths reduced for a CPU."""

    count: int = 78
    concurrency: int = 12
    input_scale: float = 0.5
    output_tokens_max: int = 16
    context_tokens: int = 1536
    seed: int = 0

    def drawn(self, conversations: Sequence[Conversation]) -> list[BenchSession]:
        several = [rounds for conversation in conversations if len(rounds := self._rounds(conversation)) > 1]
        chosen = _sampled(several, self.count, [self.seed, _SESSIONS])
        return [BenchSession(number, rounds) for number, rounds in enumerate(chosen)]

    def _rounds(self, conversation: Conversation) -> tuple[Round, ...]:
        rounds: list[Round] = []
        said = 0
        for turn in conversation:
            asked = max(1, round(turn.asked * self.input_scale))
            answered = max(1, min(turn.answered, self.output_tokens_max))
            said += asked + answered
            if said > self.context_tokens:
                break
            rounds.append(Round(asked, answered))
        return tuple(rounds)


@dataclass(frozen=True, slots=True)
class LongSessions:
    """Sessions of many rounds for the simulator: conversations of a trace one after the other, with all said before.

    An answer is drawn out as a pause before the next round: two tokens are really generated, and the others come with the
    next prompt. To the instance that prefills this is the same, since it computes earlier answers as part of a prompt; the
    time of a run no longer depends on how many tokens were decoded.
    """

    count: int
    rounds: int
    """Mean number of rounds of a session; each has between half and one and a half times as many."""
    input_scale: float
    context_tokens: int
    """A session ends before the first round that exceeds this."""
    max_tokens: int
    token_us: int
    """Time of each token of an answer."""

    def drawn(self, conversations: Sequence[Conversation], seed: int) -> list[PlannedRequest]:
        stream = np.random.default_rng([seed, _LONG])
        return [call for number in range(self.count) for call in self._calls(number, conversations, stream)]

    def _calls(
        self, session: int, conversations: Sequence[Conversation], stream: np.random.Generator
    ) -> Iterator[PlannedRequest]:
        said = before = 0
        for turn in self._turns(conversations, stream):
            answered = max(ANSWERED_MIN, turn.answered)
            asked = max(1, round(turn.asked * self.input_scale)) + max(0, before - ANSWERED_MIN)
            if said + asked + self.max_tokens > self.context_tokens:
                return
            pause_us = (before - ANSWERED_MIN) * self.token_us if before else 0
            yield PlannedRequest(None, asked, ANSWERED_MIN, self.max_tokens, session=session, think_us=pause_us)
            said += asked + ANSWERED_MIN
            before = answered

    def _turns(self, conversations: Sequence[Conversation], stream: np.random.Generator) -> Iterator[Turn]:
        left = int(stream.integers(self.rounds // 2, self.rounds * 3 // 2 + 1))
        while left > 0:
            for turn in conversations[int(stream.integers(len(conversations)))]:
                yield turn
                left -= 1
