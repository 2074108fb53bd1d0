"""Log-probabilities of many tokens, kept in arrays: four bytes a number instead of an object for each.

Read as a sequence of `TokenLogprob`, which are made one at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Alternatives (id, log-probability), most likely first."""


class LogprobColumns(Sequence[TokenLogprob]):
    """
    tokens, values   [tokens]
    ends             [tokens]   where the alternatives of a token end in the next two
    top_ids, top     [alternatives of all tokens]
    """

    __slots__ = ("_ends", "_tokens", "_top", "_top_ids", "_values")

    def __init__(self, lines: Iterable[TokenLogprob] = ()) -> None:
        self._tokens, self._values, self._ends = array("i"), array("f"), array("q")
        self._top_ids, self._top = array("i"), array("f")
        self.extend(lines)

    def extend(self, lines: Iterable[TokenLogprob]) -> None:
        if isinstance(lines, LogprobColumns):
            self._extend_columns(lines)
            return
        for line in lines:
            self.append(line.token, line.logprob, line.top)

    def _extend_columns(self, more: LogprobColumns) -> None:
        begun = len(self._top)
        self._tokens += more._tokens
        self._values += more._values
        self._ends.extend([begun + end for end in more._ends])
        self._top_ids += more._top_ids
        self._top += more._top

    def append(self, token: int, logprob: float, top: Iterable[tuple[int, float]]) -> None:
        self._tokens.append(token)
        self._values.append(logprob)
        for token_id, value in top:
            self._top_ids.append(token_id)
            self._top.append(value)
        self._ends.append(len(self._top))

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> LogprobColumns: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | LogprobColumns:
        places = range(len(self))[index]
        return self._line(places) if isinstance(places, int) else LogprobColumns(map(self._line, places))

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(self._line, range(len(self)))

    def _line(self, place: int) -> TokenLogprob:
        start, end = self._ends[place - 1] if place else 0, self._ends[place]
        alternatives = tuple(zip(self._top_ids[start:end], self._top[start:end], strict=True))
        return TokenLogprob(self._tokens[place], self._values[place], alternatives)
