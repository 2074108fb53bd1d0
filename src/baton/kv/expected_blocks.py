"""The blocks and layers that D expects of one hand-over, and which of them have arrived.

Pure. A range is claimed when it is announced and kept when it has landed. No range is claimed twice, or without being
expected. Complete when every layer of every block is kept.
"""

from __future__ import annotations

import numpy as np

from baton.core.engine.plan import Int32s
from baton.kv.transfer_frames import PiecesFrame


class ExpectedBlocks:
    def __init__(self, first: int, blocks: Int32s, layers: int) -> None:
        self.first = first
        self.blocks = blocks
        self._claimed = np.zeros((len(blocks), layers), dtype=np.bool_)
        self._missing = len(blocks) * layers

    def claim(self, pieces: PiecesFrame) -> str | None:
        """Claim these pieces: None, or the reason why they are not acceptable. Each piece can be claimed once."""
        layers, begin = pieces.layers, pieces.first - self.first
        if begin < 0 or not 0 < pieces.count <= len(self.blocks) - begin:
            return "block out of range"
        if not 0 <= layers.start < layers.stop <= self._claimed.shape[1]:
            return "layer out of range"
        window = self._claimed[begin : begin + pieces.count, layers.start : layers.stop]
        if window.any():
            return "piece came twice"
        window[:] = True
        return None

    def keep(self, pieces: PiecesFrame) -> None:
        """Count claimed pieces as arrived."""
        self._missing -= pieces.count * len(pieces.layers)

    def targets(self, pieces: PiecesFrame) -> Int32s:
        """The ids of our blocks that these pieces go to."""
        begin = pieces.first - self.first
        return self.blocks[begin : begin + pieces.count]

    @property
    def complete(self) -> bool:
        return self._missing == 0
