"""Requests that wait for a slot, the most important and then the oldest first.

A preempted request keeps its serial, which is lower than that of everyone who still waits, so it goes back to the head of
its priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from baton.core.engine.records import Request
from baton.core.errors import InvariantViolated


class WaitingQueue:
    def __init__(self) -> None:
        self._places: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def head(self) -> Request | None:
        return self._places[0][2] if self._places else None

    def first(self, count: int) -> list[Request]:
        return [request for _, _, request in self._places[:count]]

    def push(self, request: Request) -> None:
        insort(self._places, _place(request), key=_order)

    def remove(self, request: Request) -> None:
        place = _place(request)
        at = bisect_left(self._places, _order(place), key=_order)
        if at == len(self._places) or self._places[at][2] is not request:
            raise InvariantViolated(f"request {request.serial} is not in the queue")
        del self._places[at]


def _place(request: Request) -> tuple[int, int, Request]:
    return request.submission.priority, request.serial, request


def _order(place: tuple[int, int, Request]) -> tuple[int, int]:
    return place[0], place[1]
