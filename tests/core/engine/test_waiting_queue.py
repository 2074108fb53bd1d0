"""Requests that wait: their order, and siblings that wait behind a leader."""

from __future__ import annotations

import pytest

from baton.core.engine.records import Request
from baton.core.engine.request import Serial
from baton.core.engine.waiting_queue import NoQueue, WaitingQueue
from baton.core.errors import InvariantViolated
from tests.support.driver import submission


def request(serial: int, leader: Request | None = None) -> Request:
    return Request(Serial(serial), submission([1, 2, 3], 4, name=str(serial)), 7, [], since_us=0, leader=leader)


def test_a_request_that_comes_back_goes_before_those_that_came_later() -> None:
    queue, early, late = WaitingQueue(), request(0), request(1)
    queue.push(late)
    queue.push(early)
    assert queue.first(2) == [early, late]


def test_followers_wait_behind_their_leader_until_it_lets_them_in() -> None:
    queue, leader = WaitingQueue(), request(0)
    follower = request(1, leader)
    queue.hold_back(follower, leader)
    assert (len(queue), queue.waiting) == (0, 1)
    queue.release_followers(leader)
    assert queue.head is follower
    assert (len(queue), queue.waiting) == (1, 1)


def test_a_follower_that_is_withdrawn_waits_no_more() -> None:
    queue, leader = WaitingQueue(), request(0)
    follower = request(1, leader)
    queue.hold_back(follower, leader)
    queue.withdraw(follower)
    queue.release_followers(leader)
    assert queue.waiting == 0


def test_nothing_waits_where_there_is_no_queue() -> None:
    with pytest.raises(InvariantViolated, match="nothing waits"):
        NoQueue().push(request(0))
