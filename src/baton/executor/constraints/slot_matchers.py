"""The matchers of the slots that have a constraint, and the masks of a step's rows.

    known     … t(n-1)         drafts  d1 d2 d3         fed by the step
    masks     m0  m1  m2  m3                            m0 after t(n-1), m1 after d1, …; none after a draft that is refused
    drawn     s0  s1  s2  s3                            s0 stands; s1 if d1 = s0; and so on

A slot's matcher has consumed the outputs that are final. What was drawn in a step is remembered, and consumed when the next
step says by its position how much of it stood. So a slot is right after drafts, and whether or not the host is told how many
of them were accepted.

Masking runs on a few threads while the step computes; so does compiling, where nobody did it before. A slot whose masks are
late may sit the step out: they go on being computed, and the next step uses them. A matcher that gives up fails its own slot
only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Int32s, Int64s
from baton.core.engine.request import Sampling, Tokens
from baton.core.errors import InvariantViolated
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import ConstraintError, Matcher, Words, words_of
from baton.executor.drafts import DraftTokens

log = logging.getLogger(__name__)

THREADS = 2
"""For the masks of decodes, and as many for what may not wait behind them: new matchers and the ends of prefills."""
GRACE_S = 0.002
"""Time for which rows that can be drawn wait for the masks of others."""
ALONE_S = 0.03
"""Time for which a step waits in which nothing can be drawn; requests that come meanwhile wait with it."""
POLL_S = 0.0002
Bools = npt.NDArray[np.bool_]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _StepMasks:
    words: list[Words]
    """At the first position, then after each draft up to the first that is refused."""
    gave_up: bool = False
    """They end because a matcher gave up, not because a draft was refused."""
    forced: tuple[int, ...] = ()
    """What the grammar forces after the last draft that it takes."""


class TokensAhead(NamedTuple):
    """What comes from the position of a step on, if its drafts stand."""

    fed: int
    """How many of the tokens are drafts of the step; the others are forced by the grammar."""
    tokens: list[int]


@dataclass(slots=True)
class _SlotMatcher:
    ready: Future[Matcher]
    """The matcher after the outputs before `base`."""
    base: int
    drawn: list[int] = field(default_factory=list)
    """Tokens drawn at `base` and after it, not consumed yet."""
    drafts: list[int] = field(default_factory=list)
    """Drafts of the current step, at `base` and after it."""
    forced: list[int] = field(default_factory=list)
    """What the grammar forced when it was last asked."""
    position: int = -1
    """Where the current step draws; -1 before the end of its prefill."""
    masks: Future[_StepMasks] | None = None
    """Of the current step."""
    failure: ConstraintError | None = None
    """Why the matcher gave up, from then on for ever."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of some rows of a step."""

    rows: Int64s
    """Indexes of the rows that have a mask, ascending."""
    words: Words
    """[rows, words]"""
    failed: tuple[int, ...]
    """Rows whose matcher gave up: nothing may be drawn for them."""


class SlotMatchers:
    def __init__(self, slots: int, vocabulary: int, compiled: CompiledConstraints, threads: int = THREADS) -> None:
        self.held = np.zeros(slots, dtype=np.bool_)
        """The slots that have a constraint."""
        self._words = words_of(vocabulary)
        self._compiled = compiled
        self._threads = threads
        self._decodes: ThreadPoolExecutor | None = None
        self._prefills: ThreadPoolExecutor | None = None
        """Both are started with the first constraint."""
        self._slots: dict[int, _SlotMatcher] = {}

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        """Replace the slot's matcher; it is compiled and fed the earlier outputs on another thread."""
        self.stop(slot)
        if sampling.constraint is not None:
            outputs = np.array(tokens[prompt_tokens:])
            ready = self._submit(partial(self._compiled.matcher, sampling.constraint, outputs), is_decode=False)
            self._slots[slot] = _SlotMatcher(ready, len(tokens))
            self.held[slot] = True

    def stop(self, slot: int) -> None:
        self.held[slot] = False
        entry = self._slots.pop(slot, None)
        if entry is not None:  # nobody waits for what has not begun
            entry.ready.cancel()
            if entry.masks is not None:
                entry.masks.cancel()

    def close(self) -> None:
        for pool in (self._decodes, self._prefills):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self._decodes = self._prefills = None

    def forced(self, slot: int, position: int, most: int) -> list[int]:
        """Tokens that the grammar forces at a position of the slot, at most so many; empty if its matcher has failed."""
        entry = self._slots[slot]
        if entry.position == position:  # it sat out, and its matcher may be in use
            return entry.forced[:most]
        if not entry.ready.done():
            return []
        try:
            entry.forced = self._settled(slot, entry, position).forced_tokens()[:most]
        except ConstraintError as error:
            entry.failure, entry.forced = error, []
        return entry.forced

    def prepare(self, slots: Int32s, positions: Int64s, drafts: DraftTokens, *, foresee: int = 0) -> None:
        """Begin to compute the masks of a step that draws at these positions, and after each of the drafts; and at most so
        many tokens that are forced after them, for `ahead`."""
        if not self.held[slots].any():
            return
        counts = drafts.counts.tolist()
        for row in np.flatnonzero(self.held[slots]).tolist():
            slot, position = int(slots[row]), int(positions[row])
            entry, fed = self._slots[slot], drafts.tokens[row, : counts[row]].tolist()
            earlier, is_decode = entry.masks if entry.position == position else None, entry.position >= 0
            if earlier is not None and entry.drafts == fed and entry.failure is None:
                continue  # it sat out
            entry.position, entry.drafts = position, fed
            masks = partial(self._masks, slot, entry, position, fed, earlier, foresee)
            entry.masks = self._submit(masks, is_decode=is_decode)

    def late(
        self, slots: Int32s, patient: Bools, *, others: bool = False, computes: Callable[[], bool] | None = None
    ) -> Bools:
        """Which of the slots of the current step sit it out: of the `patient` ones, those whose masks are not there shortly
        after something could be drawn.

        `others`: something is drawn for other slots as well. `computes`: whether a device still computes what is drawn from;
        its steps are short, and are hardly held up beyond that.
        """
        late = np.zeros(len(slots), dtype=np.bool_)
        rows = np.flatnonzero(self.held[slots] & patient).tolist()
        masks = {row: _prepared(self._slots[int(slots[row])]) for row in rows}
        waiting = [future for future in masks.values() if not future.done()]
        if not waiting:
            return late
        if len(waiting) == len(slots) and not others:
            wait(waiting, timeout=ALONE_S, return_when=FIRST_COMPLETED)
        while computes is not None and computes() and wait(waiting, timeout=POLL_S).not_done:
            pass
        wait(waiting, timeout=GRACE_S if computes is None else POLL_S)
        late[[row for row, future in masks.items() if not future.done()]] = True
        return late

    def masks(self, slots: Int32s, positions: Int64s) -> RowMasks:
        """Wait for the masks of rows; `prepare` was called for their slots. A row behind a draft that was refused has none:
        that draft cannot have been drawn, so that whatever is drawn for the row is dropped."""
        rows, found, failed = list[int](), list[Words](), list[int]()
        for row in np.flatnonzero(self.held[slots]).tolist():
            slot, position = int(slots[row]), int(positions[row])
            entry = self._slots[slot]
            try:
                masks, nth = _prepared(entry).result(), position - entry.base
            except ConstraintError as error:
                log.warning("the constraint of a request failed at token %d: %s", position, error)
                failed.append(row)
                continue
            if nth < len(masks.words):
                rows.append(row)
                found.append(masks.words[nth])
            elif masks.gave_up:
                failed.append(row)
        words = np.stack(found) if found else np.empty((0, self._words), dtype=np.uint32)
        return RowMasks(np.array(rows, dtype=np.int64), words, tuple(failed))

    def ahead(self, slot: int) -> TokensAhead:
        """What is known of the slot's next tokens; waits for the masks of its step. Nothing if the matcher has failed."""
        entry = self._slots[slot]
        try:
            found = _prepared(entry).result()
        except ConstraintError:
            return TokensAhead(0, [])
        fed = len(found.words) - 1
        return TokensAhead(fed, [*entry.drafts[:fed], *found.forced])

    def fail(self, slot: int) -> None:
        """A token was drawn for the slot although none may be: nothing is drawn for it any more."""
        entry = self._slots[slot]
        entry.failure = entry.failure or ConstraintError("no token could be drawn earlier")

    def record(self, slots: Int32s, positions: Int64s, tokens: Tokens, failed: Collection[int] = ()) -> None:
        """Remember what was drawn, as far as it was drawn after what had been drawn before it. In `failed` rows none may be
        drawn: the slot fails there, and what follows is not asked of its matcher."""
        for row in np.flatnonzero(self.held[slots]).tolist():
            slot = int(slots[row])
            entry, nth = self._slots[slot], int(positions[row]) - self._slots[slot].base
            if nth != len(entry.drawn) or entry.drawn != entry.drafts[:nth]:
                continue
            if row in failed:
                self.fail(slot)
            else:
                entry.drawn.append(int(tokens[row]))

    def _masks(
        self,
        slot: int,
        entry: _SlotMatcher,
        position: int,
        drafts: list[int],
        earlier: Future[_StepMasks] | None,
        foresee: int,
    ) -> _StepMasks:
        """`earlier`: masks at the same position after other drafts, which may still use the matcher."""
        if earlier is not None:
            wait((earlier,))
        try:
            matcher = self._settled(slot, entry, position)
            masks = [self._mask(matcher)]
        except ConstraintError as error:
            entry.failure = error
            raise
        if not drafts:
            return _StepMasks(masks, forced=_forced_by(matcher, foresee))
        ahead = matcher.copy()
        try:
            for draft in drafts:
                if not ahead.consume(draft):
                    break
                masks.append(self._mask(ahead))
        except ConstraintError:
            return _StepMasks(masks, gave_up=True)  # if these drafts stand, the slot fails at the next step
        return _StepMasks(masks, forced=_forced_by(ahead, foresee))

    def _mask(self, matcher: Matcher) -> Words:
        words = np.zeros(self._words, dtype=np.uint32)
        matcher.mask(words)
        return words

    def _settled(self, slot: int, entry: _SlotMatcher, position: int) -> Matcher:
        """The matcher at a position: what was drawn before it has stood, the rest has not."""
        if entry.failure is not None:
            raise entry.failure
        matcher, stood = entry.ready.result(), position - entry.base
        if not 0 <= stood <= len(entry.drawn):
            drawn = f"{len(entry.drawn)} tokens drawn from {entry.base}"
            raise InvariantViolated(f"slot {slot} draws at position {position}, but its matcher has {drawn}")
        for token in entry.drawn[:stood]:
            if not matcher.consume(token):
                raise InvariantViolated(f"slot {slot}: token {token} was drawn, and its constraint does not allow it")
        entry.base, entry.drawn = position, []
        return matcher

    def _submit(self, run: Callable[[], R], *, is_decode: bool) -> Future[R]:
        if self._decodes is None or self._prefills is None:
            self._decodes, self._prefills = (
                ThreadPoolExecutor(self._threads, thread_name_prefix=f"baton-masks-{name}") for name in ("decode", "prefill")
            )
        return (self._decodes if is_decode else self._prefills).submit(run)


def _forced_by(matcher: Matcher, most: int) -> tuple[int, ...]:
    """At most so many tokens; none of a matcher that gives up, which fails at the next step."""
    if not most:
        return ()
    try:
        return tuple(matcher.forced_tokens()[:most])
    except ConstraintError:
        return ()


def _prepared(entry: _SlotMatcher) -> Future[_StepMasks]:
    if entry.masks is None:
        raise InvariantViolated("masks were not prepared")
    return entry.masks
