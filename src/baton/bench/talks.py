"""Conversations of a trace of lengths: who said how much in which round, and sessions that are drawn from them.

Owns how rows become rounds. The ShareGPT lengths have one row a turn, with all that was said before it as its prompt; rows
of one conversation follow each other. So a row whose prompt is longer than everything in the row before goes on with that
conversation, and adds what is more; any other row begins one. A conversation that happens to begin with a longer text than
the whole one before it is taken for its continuation: rounds are a little too many, never out of order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baton.bench.traces import TracedRequest, read_trace
from baton.sim.cluster import Call
from baton.sim.workload import BadWorkload

TRACE_GLOB = "*sharegpt*.csv*"
# What the random stream is for, so that no two uses of one seed ever draw the same stream.
_SESSIONS = 3


class NoTalks(Exception):
    """There is no file to take conversations from; the message says how to name one."""


class Turn(NamedTuple):
    """One round."""

    asked: int
    """Tokens that the client adds to what was said before."""
    answered: int


Talk = tuple[Turn, ...]


def find_talks(trace: Path | None, folder: Path | None) -> Path:
    """The file that was named, or the ShareGPT lengths among the traces of a folder."""
    if trace is not None:
        return trace
    found = sorted(folder.glob(TRACE_GLOB)) if folder is not None else []
    if not found:
        where = f"{folder} has no {TRACE_GLOB}" if folder is not None else "no trace was named"
        raise NoTalks(f"{where}: use --trace FILE, or set BATON_TRACES to a folder with the ShareGPT lengths")
    return found[0]


def talks_of(rows: Iterable[TracedRequest]) -> list[Talk]:
    talks: list[list[Turn]] = []
    said = 0
    for row in rows:
        if talks and row.input_tokens > said:
            talks[-1].append(Turn(row.input_tokens - said, row.output_tokens))
        else:
            talks.append([Turn(row.input_tokens, row.output_tokens)])
        said = row.input_tokens + row.output_tokens
    return [tuple(talk) for talk in talks]


@dataclass(frozen=True, slots=True)
class Sessions:
    """How many conversations are drawn, and what is made of their lengths."""

    count: int
    input_scale: float
    """What clients add is so many times as long as in the file; answers are as long as there."""
    context_tokens: int
    """A session ends before the round that would not fit."""
    max_tokens: int
    """What clients declare, unless the answer is longer."""
    think_us: int = 0

    def drawn(self, talks: Sequence[Talk], seed: int) -> list[Call]:
        """Calls of `count` different conversations of more than one round, session after session."""
        several = [talk for talk in talks if len(talk) > 1]
        if len(several) < self.count:
            raise BadWorkload(f"{self.count} sessions were asked for, and the trace has {len(several)} of several rounds")
        chosen = np.random.default_rng([seed, _SESSIONS]).choice(len(several), size=self.count, replace=False)
        return [call for number, place in enumerate(chosen.tolist()) for call in self._calls(number, several[place])]

    def _calls(self, session: int, talk: Talk) -> list[Call]:
        calls: list[Call] = []
        said = 0
        for turn in talk:
            asked = max(1, round(turn.asked * self.input_scale))
            answered = max(1, turn.answered)
            declared = max(answered, self.max_tokens)
            if said + asked + declared > self.context_tokens:
                break
            calls.append(Call(None, asked, answered, declared, session=session, think_us=self.think_us if calls else 0))
            said += asked + answered
        return calls


def read_talks(path: Path) -> list[Talk]:
    return talks_of(read_trace(path))
