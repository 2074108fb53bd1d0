"""Proposers for tests: one that knows the answers, and engines that decode with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.plan import Int32s, Int64s
from baton.core.engine.worker import Deliver, Effect
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.drafts import DraftProposer, DraftTokens
from tests.support.driver import Driver


class Oracle:
    """Knows how each sequence goes on, and says so; but every `lies`-th draft it makes is another token."""

    def __init__(self, sequences: Sequence[Sequence[int]], drafts: int, lies: int = 0) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._drafts = drafts
        self._lies = lies
        self._made = 0

    def propose(self, tokens: Int32s, slots: Int32s, known: Int64s) -> DraftTokens:
        made = DraftTokens(np.zeros((len(slots), self._drafts), dtype=np.int32), np.zeros(len(slots), dtype=np.int32))
        for row, (slot, count) in enumerate(zip(slots.tolist(), known.tolist(), strict=True)):
            guess = self._guess(tokens[slot, :count].tolist())
            made.tokens[row, : len(guess)] = guess
            made.counts[row] = len(guess)
        return made

    def _guess(self, prefix: list[int]) -> list[int]:
        after = [whole[len(prefix) :] for whole in self._sequences if whole[: len(prefix)] == prefix]
        guess = after[0][: self._drafts] if after else []
        return [self._told(token) for token in guess]

    def _told(self, token: int) -> int:
        self._made += 1
        return abs(token - 1) if self._lies and self._made % self._lies == 0 else token

    def __str__(self) -> str:
        return "the answers"


class Listening(Driver):
    """Keeps the log-probabilities too."""

    def _take(self, effect: Effect) -> None:
        super()._take(effect)
        if isinstance(effect, Deliver):
            for line in effect.settled.logprobs:
                serial = int(effect.settled.serials[line.row])
                assert len(line.chosen) == len(line.top_ids) == len(line.top) == effect.settled.counts[line.row]
                self.logprobs.setdefault(serial, []).extend(line.chosen.tolist())

    @cached_property
    def logprobs(self) -> dict[int, list[float]]:
        return {}


def drafting(
    folder: Path,
    proposer: DraftProposer | None,
    *,
    drafts: int = 4,
    dtype: str = "float64",
    attention: str = "auto",
    context_tokens: int = 128,
    audited: bool = True,
    **sizes: int,
) -> Listening:
    """An engine whose decodes are given drafts; with None it decodes one token at a time."""
    shape = {"slots": 3, "blocks": 96, "block_size": 8, "step_tokens": 48, "depth": 2, **sizes}
    burst = 1 if proposer is None else 1 + drafts
    given = {} if proposer is None else {"proposer": proposer}
    executor = TorchCpuExecutor.load(
        folder, dtype=dtype, slots=shape["slots"], blocks=shape["blocks"], block_size=shape["block_size"],
        context_tokens=context_tokens, attention=attention, burst=burst, **given,
    )  # fmt: skip
    return Listening(WorkerConfig(**shape, context_tokens=context_tokens, burst=burst), executor, audited)
