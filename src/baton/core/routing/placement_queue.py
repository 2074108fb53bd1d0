"""Choices that wait for a place at a router: until they are due, then in the order of (priority, arrival).

Arrival is that at the first front end, so that a request keeps its place when another router adopts it.
A choice that leaves without being taken out leaves a void entry, which is skipped, and swept when there are many.
"""

from __future__ import annotations

import heapq

from baton.core.routing.routed_request import RoutedChoice

VOID_MIN = 64


class PlacementQueue:
    def __init__(self) -> None:
        self._later: list[tuple[int, int, RoutedChoice]] = []
        """Ordered by (due, entry)."""
        self._ready: list[tuple[int, int, int, int, int, RoutedChoice]] = []
        """Ordered by (priority, arrival of its request anywhere, order of arrival here, choice, entry)."""
        self._entries = 0
        self.count = 0

    def snapshot_fields(self) -> dict[str, object]:
        """Without void entries, in order: which void entries are left, and the order in a heap, depend on who asked when."""
        later = sorted(item for item in self._later if item[2].entry == item[1])
        ready = sorted(item for item in self._ready if item[5].entry == item[4])
        return {**vars(self), "_later": later, "_ready": ready}

    def restore_fields(self, fields: dict[str, object]) -> None:
        vars(self).update(fields)

    def enter(self, choice: RoutedChoice, due_us: int) -> None:
        self._entries += 1
        choice.entry, choice.due_us = self._entries, due_us
        heapq.heappush(self._later, (due_us, choice.entry, choice))
        self.count += 1

    def leave(self, choice: RoutedChoice) -> None:
        """The choice does not wait any more."""
        choice.entry = 0
        self.count -= 1
        if len(self._ready) + len(self._later) > VOID_MIN + 2 * self.count:
            self._sweep()

    def promote_due(self, now_us: int) -> bool:
        """Move due choices to the ready ones. Returns whether there are any ready ones."""
        later = self._later
        while later and later[0][0] <= now_us:
            _, entry, choice = heapq.heappop(later)
            if choice.entry == entry:
                self._line_up(choice)
        return bool(self._ready)

    def next_due(self) -> int | None:
        later = self._later
        while later and later[0][2].entry != later[0][1]:
            heapq.heappop(later)
        return later[0][0] if later else None

    def batch(self) -> list[RoutedChoice]:
        """Take out the first ready choice and the other ready ones of its request. Empty: none is ready.

        A choice whose group was too large for an instance goes alone.
        """
        ready, found = self._ready, list[RoutedChoice]()
        while ready:
            _, _, order, _, entry, choice = ready[0]
            if found and (order != found[0].request.order or choice.goes_alone or found[0].goes_alone):
                break
            heapq.heappop(ready)
            if choice.entry == entry:
                found.append(choice)
        return found

    def put_back(self, batch: list[RoutedChoice]) -> None:
        for choice in batch:
            self._line_up(choice)

    def put_off(self, batch: list[RoutedChoice], due_us: int) -> None:
        """Make them wait until then."""
        for choice in batch:
            choice.due_us = due_us
            heapq.heappush(self._later, (due_us, choice.entry, choice))

    def unaccepted(self) -> int:
        """Waiting choices of requests that no instance has accepted yet."""
        later = sum(c.entry == entry and not c.request.opened for _, entry, c in self._later)
        return later + sum(c.entry == entry and not c.request.opened for *_, entry, c in self._ready)

    def all_waiting(self) -> list[RoutedChoice]:
        """All waiting choices, in order of arrival."""
        entries = [(c.request.order, c.index, c) for _, entry, c in self._later if c.entry == entry]
        entries += [(c.request.order, c.index, c) for *_, entry, c in self._ready if c.entry == entry]
        return [choice for _, _, choice in sorted(entries, key=lambda item: item[:2])]

    def _line_up(self, choice: RoutedChoice) -> None:
        request = choice.request
        entry = (request.priority, request.asked_us, request.order, choice.index, choice.entry, choice)
        heapq.heappush(self._ready, entry)

    def _sweep(self) -> None:
        self._later = [item for item in self._later if item[2].entry == item[1]]
        self._ready = [item for item in self._ready if item[5].entry == item[4]]
        heapq.heapify(self._later)
        heapq.heapify(self._ready)
