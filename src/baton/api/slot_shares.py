"""Shares the slots of an engine, or of a fleet, between API keys.

With several keys, one of them holds at most its share of the slots at a time, so that another's request finds a slot; what
is beyond waits here, outside of the engine's queue, and the key that holds least goes first. With one key, or none, every
request goes to the engine at once and waits there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.api.fair_queue import FairQueue, QueueEntry, ShareLimits
from baton.core.errors import Refusal, RefusalCode, Refused

CHOICES_ALWAYS = 16
"""A request of so many choices is taken however few slots there are; it then runs alone among those of its key."""
WAITING_MAX = 1024
"""Most choices of one key that wait here."""


class SlotPlace:
    """The slots that one request holds. Each is given back when its choice ends, the rest with `close`."""

    def __init__(self, choices: int, give_back: Callable[[int], None]) -> None:
        self._left = choices
        self._give_back = give_back

    def end_choice(self) -> None:
        if self._left:
            self._left -= 1
            self._give_back(1)

    def close(self) -> None:
        left, self._left = self._left, 0
        if left:
            self._give_back(left)


NO_PLACE = SlotPlace(0, lambda _: None)
"""Of a request that needs none."""

_Turn = asyncio.Future[None]


class SlotShares:
    def __init__(self, slots: Callable[[], int], share: float, tenants: int) -> None:
        """`slots` is asked every time: those of a fleet change. 0: not known yet, nobody waits."""
        self._slots = slots
        self._share = share
        self._is_shared = tenants > 1 and share < 1
        self._queue: FairQueue[_Turn] = FairQueue()

    @property
    def limits(self) -> ShareLimits | None:
        """None where nothing is shared. A quarter more than the slots may be with the engine, so that none stays empty."""
        slots = self._slots()
        if not self._is_shared or not slots:
            return None
        return ShareLimits(slots + max(1, slots // 4), max(1, int(slots * self._share)))

    async def enter(self, tenant: str, choices: int) -> SlotPlace:
        """Wait until the request may go to the engine. Raises Refused when it never may, or when too many wait."""
        limits = self.limits
        if limits is None or not choices:
            return NO_PLACE
        self._check(tenant, choices, limits)
        entry = QueueEntry(tenant, choices, asyncio.get_running_loop().create_future())
        self._queue.put(entry)
        self._start()
        try:
            await entry.item
        except asyncio.CancelledError:
            if not self._queue.drop(entry):
                self._give_back(entry, choices)
            raise
        return SlotPlace(choices, lambda count: self._give_back(entry, count))

    def _check(self, tenant: str, choices: int, limits: ShareLimits) -> None:
        if choices > max(limits.tenant, CHOICES_ALWAYS):
            text = f"{choices} choices are asked for at once, and one key may hold {limits.tenant} slots; send fewer prompts"
            raise Refused(Refusal(RefusalCode.TOO_MANY_CHOICES, text))
        waiting = self._queue.waiting_weight_of(tenant)
        if waiting and waiting + choices > WAITING_MAX:
            raise Refused(Refusal(RefusalCode.QUEUE_FULL, f"{waiting} choices of this key wait for a slot", 1))

    def _give_back(self, entry: QueueEntry[_Turn], count: int) -> None:
        self._queue.end(entry, count)
        self._start()

    def _start(self) -> None:
        # Where the slots became unknown, whoever waits goes on: the fleet's own queue takes them.
        everything = self._queue.waiting_weight + self._queue.in_use
        for entry in self._queue.start(self.limits or ShareLimits(everything, everything)):
            if not entry.item.done():
                entry.item.set_result(None)
