"""The tokens that the penalties of a slot count: those of its prompt, and how often each was generated.

Owns device memory for slots that use penalties, and only for those: one row each, taken when such a slot starts and given
back when it stops. Memory grows to the largest number of rows in use at once.

    marks    [rows, vocabulary]  int32   2 · times generated + 1 if the prompt holds it (only with a repetition penalty)
    history  [rows, positions]   int32   the tokens themselves: which entries of `marks` to read

`marks` decides. `history` only lists the entries to read, so stale, repeated or padding entries do no harm.

A row at position p sees exactly the tokens before p. Tokens recorded at p or later (drafts that were not accepted) are
removed first; a gap before p raises InvariantViolated.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from baton.core.engine.request import Sampling, Tokens
from baton.core.errors import InvariantViolated

Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

_OUTPUT = 2
_PROMPT = 1
_HISTORY_FIRST = 256


def penalises(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


class SlotPenalties:
    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._marks = torch.zeros((0, vocabulary), dtype=torch.int32, device=device)
        self._history = torch.zeros((0, _HISTORY_FIRST), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self.held = np.zeros(slots, dtype=np.bool_)
        """The slots that have a row; the arrays below are valid only for those."""
        self._row = np.zeros(slots, dtype=np.int64)
        self._base = np.zeros(slots, dtype=np.int64)
        """Position of the first token in the slot's history."""
        self._recorded = np.zeros(slots, dtype=np.int64)
        """The position after the last token recorded."""
        self._weights = np.zeros((slots, 3))
        """Repetition, presence, frequency."""

    @property
    def rows(self) -> int:
        return len(self._marks)

    @property
    def in_turn(self) -> npt.NDArray[np.bool_]:
        return self.held

    def concerned(self, slots: Slots, positions: Int64s) -> Int64s:
        del positions
        return np.flatnonzero(self.held[slots])

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        self.stop(slot)
        if not penalises(sampling):
            return
        row_index = self._take_row()
        base = 0 if sampling.repetition_penalty != 1.0 else prompt_tokens
        history = torch.from_numpy(np.array(tokens[base:], dtype=np.int32)).to(self._device)
        self._make_room(len(history))
        outputs = history[prompt_tokens - base :].long()
        marks = self._marks[row_index].zero_()
        marks[history[: prompt_tokens - base].long()] = _PROMPT
        marks.index_add_(0, outputs, torch.full_like(outputs, _OUTPUT, dtype=torch.int32))
        self._history[row_index, : len(history)] = history
        self.held[slot] = True
        self._row[slot] = row_index
        self._base[slot] = base
        self._recorded[slot] = len(tokens)
        self._weights[slot] = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)

    def stop(self, slot: int) -> None:
        if self.held[slot]:
            self.held[slot] = False
            self._free.append(int(self._row[slot]))

    def shape(self, logits: torch.Tensor, rows: Int64s, slots: Slots, positions: Int64s) -> None:
        """Penalise the given rows of `logits` in place; each belongs to a different slot in `held`."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            self._rewind(slot, position)
        width = int((positions - self._base[slots]).max(initial=0))
        if width == 0:
            return
        row_index = torch.from_numpy(self._row[slots]).to(self._device).unsqueeze(1)
        row = torch.from_numpy(rows).to(self._device).unsqueeze(1)
        weights = torch.from_numpy(self._weights[slots]).to(self._device).to(logits.dtype)
        repetition, presence, frequency = weights[:, 0:1], weights[:, 1:2], weights[:, 2:3]
        places = self._history[row_index.squeeze(1), :width].long()
        marks = self._marks[row_index, places]
        values = logits[row, places]
        repeated = torch.where(values < 0, values * repetition, values / repetition)
        values = torch.where(marks > 0, repeated, values)
        times = marks >> 1
        values = values - times * frequency - (times > 0) * presence
        # A token that occurs twice in `places` is written twice, with the same value.
        logits[row, places] = values

    def record(self, slots: Slots, positions: Int64s, tokens: torch.Tensor) -> None:
        """Record the drawn tokens: int64 on the device, one for each slot, no slot twice."""
        at = positions - self._base[slots]
        self._make_room(int(at.max(initial=-1)) + 1)
        row_index = torch.from_numpy(self._row[slots]).to(self._device)
        self._marks[row_index, tokens] += _OUTPUT
        self._history[row_index, torch.from_numpy(at).to(self._device)] = tokens.to(torch.int32)
        self._recorded[slots] = positions + 1

    def _rewind(self, slot: int, position: int) -> None:
        recorded = int(self._recorded[slot])
        if recorded == position:
            return
        base, row_index = int(self._base[slot]), int(self._row[slot])
        if recorded < position or position < base:
            raise InvariantViolated(f"slot {slot} draws at position {position} but {recorded} tokens are recorded")
        undone = self._history[row_index, position - base : recorded - base].long()
        self._marks[row_index].index_add_(0, undone, torch.full_like(undone, -_OUTPUT, dtype=torch.int32))
        self._recorded[slot] = position

    def _take_row(self) -> int:
        if not self._free:
            old, grown = self.rows, min(max(1, 2 * self.rows), len(self.held))
            self._marks = _grown(self._marks, (grown, self._marks.shape[1]))
            self._history = _grown(self._history, (grown, self._history.shape[1]))
            self._free.extend(reversed(range(old, grown)))
        return self._free.pop()

    def _make_room(self, positions: int) -> None:
        if positions > self._history.shape[1]:
            self._history = _grown(self._history, (self.rows, max(positions, 2 * self._history.shape[1])))


def _grown(table: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    larger = table.new_zeros(shape)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
