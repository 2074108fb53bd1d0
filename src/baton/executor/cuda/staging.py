"""Rings of pinned memory for copies to and from the device; an entry is reused when the device is done with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.core.engine.plan import Int32s

RING = 16
"""Entries of a ring, one per step in flight; an upload waits for the oldest when the ring is full."""


class StepUploads:
    """Uploads the small arrays of a step in one piece of pinned memory."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._device = device
        self._host = [torch.empty(elements, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._there = [torch.empty(elements, dtype=torch.int32, device=device) for _ in range(RING)]
        self._done = [torch.cuda.Event() for _ in range(RING)]
        self._turn = 0

    def send(self, arrays: Sequence[Int32s]) -> list[torch.Tensor]:
        """Upload on the current stream. The result is valid until its ring entry is reused."""
        self._turn = (self._turn + 1) % RING
        host, there, done = self._host[self._turn], self._there[self._turn], self._done[self._turn]
        done.synchronize()
        sizes = [len(array) for array in arrays]
        # Every array is aligned for the widest loads of a kernel.
        starts = np.concatenate([[0], np.cumsum([size + -size % 16 for size in sizes])]).tolist()
        if starts[-1] > len(host):
            host, there = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True), there.new_empty(starts[-1])
            self._host[self._turn], self._there[self._turn] = host, there
        view = host.numpy()
        for start, array in zip(starts[:-1], arrays, strict=True):
            view[start : start + len(array)] = array
        there[: starts[-1]].copy_(host[: starts[-1]], non_blocking=True)
        done.record()
        return [there[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]


class StepDownloads:
    """Downloads the report of a step, written by its kernels, on a stream of its own."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._there = [torch.zeros(elements, dtype=torch.int32, device=device) for _ in range(RING)]
        self._host = [torch.zeros(elements, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._stream = torch.cuda.Stream(device)
        self._turn = 0

    def next(self) -> torch.Tensor:
        """The buffer that the step writes. With more than RING steps in flight, unread reports are overwritten."""
        self._turn = (self._turn + 1) % RING
        return self._there[self._turn]

    def fetch(self, elements: int) -> StepDownload:
        """Start the download. Call it after the kernels that write the buffer are launched."""
        written, done = torch.cuda.Event(), torch.cuda.Event()
        written.record()
        host = self._host[self._turn][:elements]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(written)
            host.copy_(self._there[self._turn][:elements], non_blocking=True)
            done.record()
        return StepDownload(host, done)


class StepDownload:
    def __init__(self, host: torch.Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done
        self._read: Int32s | None = None

    def wait(self) -> Int32s:
        """Wait for the download; returns a copy, the same one every time. Two threads may wait, and a copy that was made
        in time is there after the ring entry is reused."""
        if self._read is None:
            self._done.synchronize()
            self._read = self._host.numpy().copy()
        return self._read
