"""A backend without a grammar, for the simulator and tests: what may come next is a hash of the tokens so far.

The source is JSON: `{"seed": 7, "vocabulary": 32, "stops": [3]}`. A place of an answer is one of

    open        about half of the tokens may come, at least one; in some places stop tokens too
    forced      one token may come
    complete    only stop tokens may come; none of these where the source names no stop token

One token lost, repeated or out of place changes all masks that follow.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
from msgspec import Struct

from baton.core.bounds import Count, Positive
from baton.executor.constraints.contract import ConstraintError, Words, allowed_of, set_bits, words_of

_MASK = (1 << 64) - 1
_ODD_A, _ODD_B, _ODD_C = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xAEF17502108EF2D9
_FORCED, _COMPLETE, _MAY_STOP = 64, 72, 128
"""Of 256 places: below the first number forced, below the second complete; below the third an open one may end."""
_FORCED_MAX = 8
_KEPT_MASKS = 4096


class ScriptedSource(Struct, frozen=True, forbid_unknown_fields=True):
    seed: int
    vocabulary: Positive
    stops: tuple[Count, ...] = ()

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 32)) * _ODD_B) & _MASK
    value = ((value ^ (value >> 29)) * _ODD_C) & _MASK
    return value ^ (value >> 32)


@lru_cache(_KEPT_MASKS)
def _allowed(source: ScriptedSource, state: int) -> tuple[int, ...]:
    """The tokens that may come at a place, ascending."""
    kind = _mix(state) & 255
    others = [token for token in range(source.vocabulary) if token not in source.stops]
    if source.stops and (not others or _FORCED <= kind < _COMPLETE):
        return tuple(sorted(source.stops))
    if kind < _FORCED:
        return (others[_mix(state + 1) % len(others)],)
    open_to = [token for token in others if _mix(state ^ (token + 1) * _ODD_A) & 1]
    stops = source.stops if kind < _MAY_STOP else ()
    return tuple(sorted((*(open_to or others[:1]), *stops)))


class ScriptedMatcher:
    def __init__(self, source: ScriptedSource, state: int, ended: bool = False) -> None:
        self._source = source
        self._state = state
        self._ended = ended

    def mask(self, out: Words) -> None:
        set_bits(out, self._next())

    def consume(self, token: int) -> bool:
        if token not in self._next():
            return False
        self._ended = self._ended or token in self._source.stops
        self._state = _mix(self._state + (token + 1) * _ODD_A)
        return True

    def copy(self) -> ScriptedMatcher:
        return ScriptedMatcher(self._source, self._state, self._ended)

    def forced_tokens(self) -> list[int]:
        ahead, forced = self.copy(), list[int]()
        while len(forced) < _FORCED_MAX and len(only := ahead._next()) == 1 and not ahead.is_stopped:
            forced.append(only[0])
            ahead.consume(only[0])
        return forced

    @property
    def is_stopped(self) -> bool:
        return self._ended or all(token in self._source.stops for token in self._next())

    def _next(self) -> tuple[int, ...]:
        return tuple(sorted(self._source.stops)) if self._ended else _allowed(self._source, self._state)


class _ScriptedConstraint:
    def __init__(self, source: ScriptedSource) -> None:
        self._source = source

    def matcher(self) -> ScriptedMatcher:
        return ScriptedMatcher(self._source, _mix(self._source.seed * _ODD_A + 1))


class ScriptedBackend:
    name = "scripted"
    version = "1"

    def __init__(self, version: str = version) -> None:
        """All versions allow the same tokens."""
        self.version = version

    def compile(self, source: str) -> _ScriptedConstraint:
        try:
            decoded = msgspec.json.decode(source, type=ScriptedSource)
        except msgspec.DecodeError as error:
            raise ConstraintError(f"not a scripted constraint: {error}") from error
        if any(stop >= decoded.vocabulary for stop in decoded.stops):
            raise ConstraintError("a stop token of a scripted constraint is not in its vocabulary")
        return _ScriptedConstraint(decoded)


def fits(source: str, tokens: list[int]) -> bool:
    """Whether an answer of these tokens keeps to a scripted constraint."""
    matcher = ScriptedBackend().compile(source).matcher()
    return all(matcher.consume(token) for token in tokens)


def allowed_after(source: str, tokens: list[int], vocabulary: int) -> list[int]:
    """The tokens that may follow these."""
    matcher = ScriptedBackend().compile(source).matcher()
    if not all(matcher.consume(token) for token in tokens):
        return []
    words = np.zeros(words_of(vocabulary), dtype=np.uint32)
    matcher.mask(words)
    return np.flatnonzero(allowed_of(words, vocabulary)).tolist()
