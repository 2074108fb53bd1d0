"""Buffers that passes over a vocabulary write into, again and again.

On a CPU, a fresh allocation of megabytes comes as untouched pages, and touching them costs more than the arithmetic. On
other devices torch keeps freed memory itself, so nothing is kept here.
"""

from __future__ import annotations

import torch


class ScratchBuffers:
    """Taking a name again overwrites what was handed out under it before: nothing in a buffer outlives a draw."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeps = device.type == "cpu"
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        if not self._keeps:
            return torch.empty(shape, dtype=dtype, device=self._device)
        elements = shape[0] * shape[1]
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < elements:
            buffer = torch.empty(elements, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:elements].view(shape)
