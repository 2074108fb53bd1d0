"""How many blocks running requests keep others from taking: the rule of admission.

`WholeNeed` reserves everything that a running request may ever use, so that growth never meets a full pool.
"""

from __future__ import annotations

import numpy as np

from baton.core.request import Phase
from baton.core.slots import Slots


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class WholeNeed:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def blocks(self, slots: Slots) -> int:
        """What the running requests will still take, beyond what they hold."""
        growing = (slots.phase == Phase.RUNNING_PREFILL) | (slots.phase == Phase.RUNNING_DECODE)
        need = -(-slots.limit // self._block_size) - slots.held
        return int(np.sum(need, where=growing))
