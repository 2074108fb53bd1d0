"""The queue from other threads of the engine process to its loop, in order of arrival, with a pipe that wakes the loop.

Putting never blocks and is possible on any thread; only the loop takes. Nothing is dropped and nothing is bounded here: the
producers (steps in flight, peers, transfers) bound what they put, and may ask `len`.
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
from baton.node.constraint_gate import GatePassed, GateRefused


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """A thread that must not end has ended with this error; the engine ends too."""

    error: BaseException


EventItem = Future[StepDone] | PeerEvent | StorageEvent | GatePassed | ThreadFailure
"""What becomes an event of the worker, or ends the engine."""
Item = EventItem | GateRefused


class EngineInbox:
    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)

    def __len__(self) -> int:
        return len(self._items)

    def fileno(self) -> int:
        """Readable while items may be waiting."""
        return self._read_end

    def put(self, item: Item) -> None:
        self._items.append(item)
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop will wake anyway
            os.write(self._write_end, b"!")

    def take(self) -> list[Item]:
        """All items put so far."""
        # The pipe is drained before the items are taken: what is put from here on wakes the loop again.
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)
