"""Log-probabilities of prompt tokens, for the slots that ask for them: of all positions that a step's chunks compute.

The logits at position p - 1 give the log-probability of the token at p. Logits are asked for in pieces of at most
PIECE_ELEMENTS, so that the memory they take does not grow with the chunk. Knows nothing of plans, blocks or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.engine.plan import Int32s
from baton.core.engine.request import PromptLogprobs, Sampling, Tokens
from baton.executor.packing import FeedRange
from baton.executor.sampling import LOGPROB_LEAST
from baton.executor.token_choice import finite_logits, top_tokens

PIECE_ELEMENTS = 1 << 23
"""Logits computed at a time: 32 MiB in float32."""

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
"""Logits [rows, vocabulary] of these rows of the packed step."""


@dataclass(frozen=True, slots=True)
class _Asking:
    prompt: Tokens
    alternatives: int


@dataclass(frozen=True, slots=True)
class ScoredRange:
    """Prompt tokens whose log-probabilities a step gives."""

    row: int
    """Row of the result."""
    slot: int
    begin: int
    """Position of the first of these tokens."""
    end: int
    logits_from: int
    """The row of the packed step that predicts the first of them; the others follow."""


class PromptScorer:
    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._piece_rows = max(1, PIECE_ELEMENTS // vocabulary)
        self._asking: dict[int, _Asking] = {}

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        """Replace all state of the slot."""
        self.stop(slot)
        if sampling.prompt_logprobs is not None:
            self._asking[slot] = _Asking(tokens[:prompt_tokens], min(sampling.prompt_logprobs, self._vocabulary))

    def stop(self, slot: int) -> None:
        self._asking.pop(slot, None)

    def ranges(self, feeds: Sequence[FeedRange], rows: Sequence[int]) -> list[ScoredRange]:
        """What the chunks of a step score, which are packed one after the other; `rows` are theirs in the result."""
        found: list[ScoredRange] = []
        if not self._asking:
            return found
        first = 0
        for feed, row in zip(feeds, rows, strict=True):
            asking = self._asking.get(feed.slot)
            if asking is not None:
                end = min(feed.end + 1, len(asking.prompt))
                if end > feed.begin + 1:
                    found.append(ScoredRange(row, feed.slot, feed.begin + 1, end, first))
            first += feed.end - feed.begin
        return found

    def score(self, ranges: Sequence[ScoredRange], logits_of: LogitsOf) -> tuple[PromptLogprobs, ...]:
        return tuple(self._score(item, self._asking[item.slot], logits_of) for item in ranges)

    def _score(self, item: ScoredRange, asking: _Asking, logits_of: LogitsOf) -> PromptLogprobs:
        parts = []
        for begin in range(item.begin, item.end, self._piece_rows):
            end, first = min(begin + self._piece_rows, item.end), item.logits_from + begin - item.begin
            rows = torch.arange(first, first + end - begin, device=self._device)
            parts.append(_scores(logits_of(rows)[:, : self._vocabulary], asking.prompt[begin:end], asking.alternatives))
        chosen, ranks, top_ids, top = (np.concatenate(column) for column in zip(*parts, strict=True))
        return PromptLogprobs(item.row, item.begin, chosen, ranks, top_ids, top)


_Scores = tuple[
    np.ndarray[tuple[int], np.dtype[np.float32]], Int32s, Int32s, np.ndarray[tuple[int, int], np.dtype[np.float32]]
]


def _scores(logits: torch.Tensor, tokens: Tokens, alternatives: int) -> _Scores:
    every = torch.log_softmax(finite_logits(logits), dim=-1).clamp_(min=LOGPROB_LEAST)
    named = torch.from_numpy(tokens.astype(np.int64)).to(logits.device).unsqueeze(1)
    chosen = every.gather(1, named)
    ranks = (every > chosen).sum(dim=1) + 1
    count = max(1, alternatives)
    ids, top = top_tokens(every, torch.full((len(every), 1), count, device=logits.device), count)
    return (
        chosen[:, 0].to(torch.float32).cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
        ids[:, :alternatives].to(torch.int32).cpu().numpy(),
        top[:, :alternatives].to(torch.float32).cpu().numpy(),
    )
