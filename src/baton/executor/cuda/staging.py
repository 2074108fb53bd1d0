"""Pinned memory on the way to and from the device, in rings: nothing is overwritten before the device is done with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.core.engine.plan import Int32s

RING = 16
"""Steps that can be under way; whoever comes round waits for the oldest."""


class StepUploads:
    """Small arrays to the device, all of a step in one piece of pinned memory."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._device = device
        self._host = [torch.empty(elements, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._there = [torch.empty(elements, dtype=torch.int32, device=device) for _ in range(RING)]
        self._done = [torch.cuda.Event() for _ in range(RING)]
        self._turn = 0

    def send(self, arrays: Sequence[Int32s]) -> list[torch.Tensor]:
        """On the current stream. What comes back is good until the ring comes round."""
        self._turn = (self._turn + 1) % RING
        host, there, done = self._host[self._turn], self._there[self._turn], self._done[self._turn]
        done.synchronize()
        sizes = [len(array) for array in arrays]
        # Every array begins where the widest loads of a kernel may begin.
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
    """What a step tells the host: written by its kernels, copied out on a stream of its own."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._there = [torch.zeros(elements, dtype=torch.int32, device=device) for _ in range(RING)]
        self._host = [torch.zeros(elements, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._stream = torch.cuda.Stream(device)
        self._turn = 0

    def next(self) -> torch.Tensor:
        """Where the step writes. Who keeps more steps under way than the ring has places overwrites what nobody read."""
        self._turn = (self._turn + 1) % RING
        return self._there[self._turn]

    def fetch(self, elements: int) -> StepDownload:
        """After the kernels that write it are launched."""
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

    def wait(self) -> Int32s:
        """A copy of its own."""
        self._done.synchronize()
        return self._host.numpy().copy()
