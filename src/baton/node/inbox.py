"""What other threads of the engine process have for its loop, in the order it came, and the bell that wakes the loop.

Putting never blocks and may happen on any thread; taking is the loop's alone. Nothing is lost and nothing is bounded here:
how much may wait is the business of those who put (steps in flight, peers, transfers, hauls), who may ask `len`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from baton.core.engine.worker import StepDone
from baton.core.handover.messages import PeerEvent
from baton.core.tiers.transfers import StorageEvent


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """A thread that must not end has ended with this; so does the engine."""

    error: BaseException


Item = Future[StepDone] | PeerEvent | StorageEvent | ThreadFailure


class EngineInbox:
    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)

    def __len__(self) -> int:
        return len(self._items)

    def fileno(self) -> int:
        """Readable while something may be waiting."""
        return self._ear

    def put(self, item: Item) -> None:
        self._items.append(item)
        with contextlib.suppress(BlockingIOError):  # so many rings are unheard that one more would say nothing
            os.write(self._bell, b"!")

    def take(self) -> list[Item]:
        """Everything that has come so far."""
        # The bell before the items: what is put from here on rings again.
        with contextlib.suppress(BlockingIOError):
            os.read(self._ear, 4096)
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        os.close(self._ear)
        os.close(self._bell)
