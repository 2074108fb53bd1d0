"""Requests that wait for a slot, ordered by seniority: priority, then arrival at the first front end, then serial.

A preempted request is older than those that have waited since, so it returns to the head of its priority; so does one that
was preempted elsewhere and has moved here. Sibling choices wait behind their leader, outside the queue, until its prompt is
computed or it ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from baton.core.engine.records import Request
from baton.core.errors import InvariantViolated

Place = tuple[int, int, int]
"""Priority, arrival, serial."""


class WaitingQueue:
    def __init__(self) -> None:
        self._places: list[tuple[Place, Request]] = []
        self._held_back = 0
        """Followers of leaders that still prefill."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def waiting(self) -> int:
        """Requests in the queue, and those behind a leader."""
        return len(self._places) + self._held_back

    @property
    def head(self) -> Request | None:
        return self._places[0][1] if self._places else None

    def first(self, count: int) -> list[Request]:
        return [request for _, request in self._places[:count]]

    def push(self, request: Request) -> None:
        insort(self._places, _place(request), key=_order)

    def remove(self, request: Request) -> None:
        place = _place(request)
        at = bisect_left(self._places, _order(place), key=_order)
        if at == len(self._places) or self._places[at][1] is not request:
            raise InvariantViolated(f"request {request.serial} is not in the queue")
        del self._places[at]

    def hold_back(self, follower: Request, leader: Request) -> None:
        leader.followers.append(follower)
        self._held_back += 1

    def release_followers(self, leader: Request) -> None:
        """Push sibling choices into the queue."""
        self._held_back -= len(leader.followers)
        for follower in leader.followers:
            self.push(follower)
        leader.followers.clear()

    def withdraw(self, request: Request) -> None:
        """Remove it from the queue, or from behind its leader."""
        leader = request.leader
        if leader is not None and request in leader.followers:
            leader.followers.remove(request)
            self._held_back -= 1
        else:
            self.remove(request)


class NoQueue(WaitingQueue):
    """For a scheduler without a queue: a request gets a slot or is refused."""

    def push(self, request: Request) -> None:
        raise InvariantViolated(f"request {request.serial} would have to wait where nothing waits")


def _place(request: Request) -> tuple[Place, Request]:
    return (*request.submission.seniority, request.serial), request


def _order(entry: tuple[Place, Request]) -> Place:
    return entry[0]
