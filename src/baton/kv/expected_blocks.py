"""What D expects of one hand-over, and what of it has come.

Pure. A range is claimed when it is announced and kept when it has landed; nothing is claimed twice, and nothing that was not
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
        """Why these may not come now; None when they may, and then they may not come again."""
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
        """What was claimed has landed."""
        self._missing -= pieces.count * len(pieces.layers)

    def targets(self, pieces: PiecesFrame) -> Int32s:
        """Our blocks that these go to."""
        begin = pieces.first - self.first
        return self.blocks[begin : begin + pieces.count]

    @property
    def complete(self) -> bool:
        return self._missing == 0
