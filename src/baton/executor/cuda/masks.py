"""Masks on the device: one bit a token, copied there from pinned memory on a stream of their own.

    table   [entries, words]      the masks of a draw
    rows    [rows of a draw]      the entry of each row, or NO_MASK

All of it is allocated once, at full size, so that a draw which reads it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.engine.plan import Int64s
from baton.executor.constraints.contract import WORD_BITS, Words, words_of

NO_MASK = -1
GAP_MAX = 4
"""Entries that are copied although nobody asked, to make one copy of two."""


@dataclass(frozen=True, slots=True)
class MaskTable:
    """What the kernels read."""

    entries: torch.Tensor
    """[entries, words] int32"""
    rows: torch.Tensor
    """[rows of a draw] int32"""

    @classmethod
    def of(cls, entries: int, vocabulary: int, rows_max: int, device: torch.device) -> MaskTable:
        """Without any mask."""
        table = torch.zeros((entries, words_of(vocabulary)), dtype=torch.int32, device=device)
        return cls(table, torch.full((rows_max,), NO_MASK, dtype=torch.int32, device=device))


class MaskUploads:
    """Copies the masks of one step after the other into a table."""

    def __init__(self, table: MaskTable, device: torch.device) -> None:
        self.table = table
        self._entries = torch.zeros(tuple(table.entries.shape), dtype=torch.int32, pin_memory=True)
        self._rows = torch.zeros(len(table.rows), dtype=torch.int32, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._copied, self._read = torch.cuda.Event(), torch.cuda.Event()

    def send(self, masks: Words, entries: Int64s, rows: Int64s) -> None:
        """Give these rows of the next draw the masks, at distinct ascending entries, and all other rows none. What is
        launched from now on waits for the copy; the copy waits for the draw before it."""
        self._copied.synchronize()  # the pinned memory is free again
        self._entries.numpy()[entries] = masks.view(np.int32)
        named = self._rows.numpy()
        named[:] = NO_MASK
        named[rows] = entries
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read)
            for begin, end in _runs(entries):
                self.table.entries[begin:end].copy_(self._entries[begin:end], non_blocking=True)
            self.table.rows.copy_(self._rows, non_blocking=True)
            self._copied.record()
        self._copied.wait()

    def done(self) -> None:
        """The draw that reads them is launched."""
        self._read.record()


def _runs(entries: Int64s) -> Iterator[tuple[int, int]]:
    """Ranges that hold all of these ascending entries, and few others."""
    if not len(entries):
        return
    cuts = np.flatnonzero(np.diff(entries) > GAP_MAX) + 1
    for part in np.split(entries, cuts):
        yield int(part[0]), int(part[-1]) + 1


def permit_something(masks: Words, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[masks]: whether each permits a token of the vocabulary."""
    left = masks.copy()
    used = vocabulary % WORD_BITS
    if used:
        left[:, -1] &= np.uint32((1 << used) - 1)
    return np.asarray(left.any(axis=1))
