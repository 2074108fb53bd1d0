"""Log-probabilities of a prompt, as they come from the engine and as answers show them.

They come in parts, in order of position, and again from the first position on where a request has moved before its first
token: what came first counts, since two instances may round differently. Kept as the arrays that came, eight bytes for each
alternative; the lines that answers are written from are made a few at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from baton.core.engine.request import PromptLogprobs
from baton.core.errors import InvariantViolated


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One token of a prompt."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """Alternatives (id, log-probability), most likely first."""


class PromptTable:
    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._parts: list[PromptLogprobs] = []
        self._begins: list[int] = []
        self._upto = 1
        """Positions that are known; the first token has no log-probability."""

    @property
    def is_complete(self) -> bool:
        return self._upto >= len(self._prompt)

    def __len__(self) -> int:
        return len(self._prompt)

    def add(self, parts: Iterable[PromptLogprobs]) -> None:
        for part in parts:
            if part.begin > self._upto or part.end > len(self._prompt):
                message = f"log-probabilities of {part.begin} to {part.end} of a prompt of {len(self._prompt)} tokens"
                raise InvariantViolated(f"{message}, of which {self._upto} are known")
            new = self._upto - part.begin
            if part.end > self._upto:
                self._begins.append(self._upto)
                self._parts.append(_from(part, new) if new else part)
                self._upto = part.end

    def tokens(self, places: slice) -> Sequence[int]:
        return self._prompt[places]

    def logprobs(self, places: slice) -> Iterator[float | None]:
        """The log-probabilities of the prompt's own tokens; None for the first."""
        for position in range(len(self._prompt))[places]:
            yield self._logprob(position) if position else None

    def lines(self, places: slice) -> Iterator[PromptLine | None]:
        """The lines of these positions; None for the first token of the prompt."""
        for position in range(len(self._prompt))[places]:
            yield self._line(position) if position else None

    def _part_with(self, position: int) -> PromptLogprobs:
        return self._parts[bisect_right(self._begins, position) - 1]

    def _logprob(self, position: int) -> float:
        part = self._part_with(position)
        return float(part.chosen[position - part.begin])

    def _line(self, position: int) -> PromptLine:
        part = self._part_with(position)
        at = position - part.begin
        top = tuple(zip(part.top_ids[at].tolist(), part.top[at].tolist(), strict=True))
        return PromptLine(self._prompt[position], float(part.chosen[at]), int(part.ranks[at]), top)


def _from(part: PromptLogprobs, first: int) -> PromptLogprobs:
    return replace(
        part,
        begin=part.begin + first,
        chosen=part.chosen[first:],
        ranks=part.ranks[first:],
        top_ids=part.top_ids[first:],
        top=part.top[first:],
    )
