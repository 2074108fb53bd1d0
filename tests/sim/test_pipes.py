"""Pipes: lines on which nothing is lost."""

from __future__ import annotations

from baton.sim.lines import LineEndpoint, Pipes
from baton.sim.world import Host, World

DELAY_US = 70


class Owner:
    """Keeps what its end of a line tells it, with the time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.heard: list[tuple[int, str | bytes]] = []

    def opened(self) -> None:
        self.heard.append((self.world.now_us, "opened"))

    def lost(self, reason: str) -> None:
        self.heard.append((self.world.now_us, reason))

    def took(self, frames: list[bytes]) -> None:
        self.heard += [(self.world.now_us, frame) for frame in frames]


class Both:
    def __init__(self) -> None:
        self.world = World(0, events_max=1_000)
        self.pipes = Pipes(DELAY_US)
        self.caller, self.called = Owner(self.world), Owner(self.world)
        self.here = self.pipes.initiator(Host(self.world, "here"), "a", "b", self.caller)

    def accept(self) -> LineEndpoint:
        return self.pipes.acceptor(Host(self.world, "there"), "b", "a", self.called)

    def run(self) -> None:
        while self.world.next_us is not None:
            self.world.step()


def test_a_pipe_opens_when_both_ends_are_there_whichever_comes_first() -> None:
    for accepts_first in (True, False):
        both = Both()
        if accepts_first:
            both.accept()
            both.run()
        both.here.open()
        both.run()
        if not accepts_first:
            assert both.caller.heard == []
            both.accept()
            both.run()
        assert both.caller.heard == both.called.heard == [(0, "opened")]


def test_nobody_is_called_who_was_not_to_be() -> None:
    both = Both()
    both.accept()
    both.run()
    assert both.called.heard == []
    assert not both.here.is_open


def test_frames_arrive_in_order_after_the_delay_and_never_wait_for_room() -> None:
    both = Both()
    there = both.accept()
    both.here.open()
    both.run()
    for frame in (b"1", b"2"):
        assert not both.here.is_full
        both.here.send(frame)
    there.send(b"3")
    both.run()
    assert both.called.heard[1:] == [(DELAY_US, b"1"), (DELAY_US, b"2")]
    assert both.caller.heard[1:] == [(DELAY_US, b"3")]


def test_who_hangs_up_is_heard_of_and_what_was_on_the_way_to_it_is_not_delivered() -> None:
    both = Both()
    there = both.accept()
    both.here.open()
    both.run()
    there.send(b"too late")
    both.here.close("enough")
    both.run()
    assert both.called.heard[1:] == [(DELAY_US, "enough")]
    assert both.caller.heard[1:] == []
    both.here.open()
    both.run()
    assert both.called.heard[-1] == both.caller.heard[-1] == (DELAY_US, "opened")
