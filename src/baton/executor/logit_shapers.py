"""What changes logits before a token is chosen: each kind is a LogitShaper, and the sampler composes them.

Penalties are in `penalties`. Here are the logit bias, the ban on stop tokens before `min_tokens`, the allowed tokens, the
bad words and the mask of a constraint. The last three forbid tokens for good: `permitted` says which they leave, so that a
row whose logits are of no use still gets a token that may come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from baton.core.engine.request import Sampling, Tokens
from baton.core.errors import InvariantViolated
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import Words, allowed_of
from baton.executor.constraints.slot_matchers import SlotMatchers
from baton.executor.drafts import DraftTokens, no_drafts

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]


def shapes_logits(sampling: Sampling) -> bool:
    """Whether a bias, a ban, allowed tokens, bad words or a constraint change the logits; penalties are not asked."""
    bans = bool(sampling.stop_token_ids) and sampling.min_tokens > 0
    return bool(sampling.logit_bias) or bans or sampling.is_restricted


def shapes_beside_constraint(sampling: Sampling) -> bool:
    """Whether anything but a constraint changes the logits; penalties are not asked."""
    return shapes_logits(replace(sampling, constraint=None))


class LogitShaper(Protocol):
    """Owns its state of every slot. Rows are of one call of the sampler; all arguments in step with `rows`."""

    @property
    def in_turn(self) -> Bools:
        """[slots]: whether several rows of the slot in one call depend on what is drawn for the rows before them."""

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        """Replace all state of the slot. `tokens` past the prompt are its earlier outputs."""

    def stop(self, slot: int) -> None: ...

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        """Indexes of the rows that `shape` changes, ascending."""

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        """Change these rows of `logits` in place."""

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None:
        """Take the tokens (int64 on the device) drawn for concerned rows."""


class RestrictingShaper(LogitShaper, Protocol):
    def permitted(self, slot: int, position: int) -> Bools | None:
        """[vocabulary]: the tokens that it permits for a row that was just shaped; None: all."""


class LogitBias:
    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._held = np.zeros(slots, dtype=np.bool_)
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.in_turn: Bools = np.zeros(slots, dtype=np.bool_)

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        del tokens, prompt_tokens
        self.stop(slot)
        if sampling.logit_bias:
            bias = dict(sampling.logit_bias)
            values = torch.tensor(tuple(bias.values()), dtype=torch.float64, device=self._device)
            self._bias[slot] = (_ids(tuple(bias), self._device), values)
            self._held[slot] = True

    def stop(self, slot: int) -> None:
        self._held[slot] = False
        self._bias.pop(slot, None)

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        del positions
        return np.flatnonzero(self._held[slots])

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        del positions
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            ids, values = self._bias[slot]
            logits[row, ids] += values.to(logits.dtype)

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None: ...


class StopTokenBan:
    """Bans stop tokens before `min_tokens` outputs."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._banned: dict[int, torch.Tensor] = {}
        self._ends = np.zeros(slots, dtype=np.int64)
        """First position at which stop tokens may be drawn."""
        self.in_turn: Bools = np.zeros(slots, dtype=np.bool_)

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        del tokens
        self.stop(slot)
        if sampling.stop_token_ids and sampling.min_tokens > 0:
            self._ends[slot] = prompt_tokens + sampling.min_tokens
            self._banned[slot] = _ids(sampling.stop_token_ids, self._device)

    def stop(self, slot: int) -> None:
        self._ends[slot] = 0
        self._banned.pop(slot, None)

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        return np.flatnonzero(positions < self._ends[slots])

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        del positions
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            logits[row, self._banned[slot]] = -math.inf

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None: ...


class AllowedTokens:
    """Keeps only the tokens that a request lists."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._held = np.zeros(slots, dtype=np.bool_)
        self._allowed: dict[int, Bools] = {}
        self.in_turn: Bools = np.zeros(slots, dtype=np.bool_)

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        del tokens, prompt_tokens
        self.stop(slot)
        if sampling.allowed_token_ids:
            allowed = np.zeros(self._vocabulary, dtype=np.bool_)
            allowed[list(sampling.allowed_token_ids)] = True
            self._allowed[slot] = allowed
            self._held[slot] = True

    def stop(self, slot: int) -> None:
        self._held[slot] = False
        self._allowed.pop(slot, None)

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        del positions
        return np.flatnonzero(self._held[slots])

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        del positions
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            _forbid(logits, row, self._allowed[slot])

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None: ...

    def permitted(self, slot: int, position: int) -> Bools | None:
        del position
        return self._allowed.get(slot)


class BadWords:
    """Bans the last token of each bad word after the others, in the outputs only."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self.in_turn: Bools = np.zeros(slots, dtype=np.bool_)
        """The slots that have bad words."""
        self._words: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
        """By slot: the last tokens of its bad words, by the tokens before them."""
        self._outputs: dict[int, list[int]] = {}
        self._base = np.zeros(slots, dtype=np.int64)
        """Position of the slot's first output."""

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        self.stop(slot)
        if not sampling.bad_words:
            return
        words: dict[tuple[int, ...], tuple[int, ...]] = {}
        for word in sampling.bad_words:
            words[word[:-1]] = (*words.get(word[:-1], ()), word[-1])
        self._words[slot] = words
        self._outputs[slot] = tokens[prompt_tokens:].tolist()
        self._base[slot] = prompt_tokens
        self.in_turn[slot] = True

    def stop(self, slot: int) -> None:
        self.in_turn[slot] = False
        self._words.pop(slot, None)
        self._outputs.pop(slot, None)

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        del positions
        return np.flatnonzero(self.in_turn[slots])

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        for row, slot, position in zip(rows.tolist(), slots.tolist(), positions.tolist(), strict=True):
            banned = list(self._banned(slot, position))
            if banned:
                logits[row, _ids(tuple(banned), self._device)] = -math.inf

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None:
        for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            self._outputs_before(slot, position).append(token)

    def permitted(self, slot: int, position: int) -> Bools | None:
        if slot not in self._words:
            return None
        left = np.ones(self._vocabulary, dtype=np.bool_)
        left[list(self._banned(slot, position))] = False
        return left

    def _banned(self, slot: int, position: int) -> Iterator[int]:
        outputs = self._outputs_before(slot, position)
        for before, lasts in self._words[slot].items():
            if not before or tuple(outputs[-len(before) :]) == before:
                yield from lasts

    def _outputs_before(self, slot: int, position: int) -> list[int]:
        """The outputs before a position; later ones were drafts that did not stand, and are forgotten."""
        outputs, count = self._outputs[slot], position - int(self._base[slot])
        if not 0 <= count <= len(outputs):
            raise InvariantViolated(f"slot {slot} draws output {count}, but {len(outputs)} are recorded")
        del outputs[count:]
        return outputs


class ConstraintMasks:
    """Keeps only the tokens that the slot's matcher allows."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device, compiled: CompiledConstraints) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self.matchers = SlotMatchers(slots, vocabulary, compiled)
        self.in_turn: Bools = np.zeros(slots, dtype=np.bool_)
        """None: the mask of a row follows from the drafts before it."""
        self._prepared = False
        self._shaped: dict[tuple[int, int], Words] = {}
        """Masks of the current call, by slot and position."""
        self._failed: set[tuple[int, int]] = set()

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        self.matchers.start(slot, tokens, prompt_tokens, sampling)

    def stop(self, slot: int) -> None:
        self.matchers.stop(slot)

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        del positions
        return np.flatnonzero(self.matchers.held[slots])

    def prepare(self, slots: Slots, positions: Int64s, drafts: DraftTokens) -> None:
        """Begin to compute the masks of the next call, on other threads."""
        self.matchers.prepare(slots, positions, drafts)
        self._prepared = True

    def begin(self, slots: Slots, positions: Int64s) -> None:
        """A call of the sampler with these rows begins."""
        self._shaped.clear()
        self._failed.clear()
        if not self._prepared and self.matchers.held[slots].any():
            distinct, firsts = np.unique(slots, return_index=True)
            if len(distinct) < len(slots) and np.bincount(slots)[self.matchers.held[: slots.max() + 1]].max(initial=0) > 1:
                raise InvariantViolated("several rows of a slot with a constraint, and no drafts are known")
            self.matchers.prepare(distinct, positions[firsts], no_drafts(len(distinct)))
        self._prepared = False

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        masks = self.matchers.masks(slots, positions)
        self._failed.update((int(slots[row]), int(positions[row])) for row in masks.failed)
        allowed = allowed_of(masks.words, self._vocabulary)
        for nth, row in enumerate(masks.rows.tolist()):
            self._shaped[int(slots[row]), int(positions[row])] = masks.words[nth]
            _forbid(logits, int(rows[row]), allowed[nth])

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None:
        failed = [row for row in range(len(slots)) if self.has_failed(int(slots[row]), int(positions[row]))]
        self.matchers.record(slots, positions, tokens.cpu().numpy(), failed)

    def note_failed(self, slot: int, position: int) -> None:
        """All shapers together permit no token there."""
        self._failed.add((slot, position))

    def permitted(self, slot: int, position: int) -> Bools | None:
        if (slot, position) in self._failed:
            return np.zeros(self._vocabulary, dtype=np.bool_)
        words = self._shaped.get((slot, position))
        return None if words is None else allowed_of(words, self._vocabulary)

    def has_failed(self, slot: int, position: int) -> bool:
        return (slot, position) in self._failed


def _forbid(logits: torch.Tensor, row: int, allowed: Bools) -> None:
    logits[row, : len(allowed)].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -math.inf)
    logits[row, len(allowed) :] = -math.inf


def _ids(tokens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=device)
