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
        self.here = self.pipes.dial(Host(self.world, "here"), "a", "b", self.caller)
        self.there: list[LineEndpoint] = []

    def listen(self) -> None:
        self.pipes.listen(Host(self.world, "there"), "b", self._accept)

    def _accept(self, there: LineEndpoint) -> Owner:
        assert there.peer == "a"
        self.there.append(there)
        return self.called

    def run(self) -> None:
        while self.world.next_us is not None:
            self.world.step()


def test_a_pipe_opens_when_both_ends_are_there_whichever_comes_first() -> None:
    for accepts_first in (True, False):
        both = Both()
        if accepts_first:
            both.listen()
            both.run()
        both.here.open()
        both.run()
        if not accepts_first:
            assert both.caller.heard == []
            both.listen()
            both.run()
        assert both.caller.heard == both.called.heard == [(0, "opened")]


def test_nobody_is_called_who_was_not_to_be() -> None:
    both = Both()
    both.listen()
    both.run()
    assert both.called.heard == []
    assert both.here.session is None


def test_frames_arrive_in_order_after_the_delay_and_never_wait_for_room() -> None:
    both = Both()
    both.listen()
    both.here.open()
    both.run()
    for frame in (b"1", b"2"):
        assert not both.here.is_full
        both.here.send(frame)
    both.there[0].send(b"3")
    both.run()
    assert both.called.heard[1:] == [(DELAY_US, b"1"), (DELAY_US, b"2")]
    assert both.caller.heard[1:] == [(DELAY_US, b"3")]


def test_who_hangs_up_is_heard_of_and_what_was_on_the_way_to_it_is_not_delivered() -> None:
    both = Both()
    both.listen()
    both.here.open()
    both.run()
    both.there[0].send(b"too late")
    both.here.close("enough")
    both.run()
    assert both.called.heard[1:] == [(DELAY_US, "enough")]
    assert both.caller.heard[1:] == []
    both.here.open()
    both.run()
    assert both.called.heard[-1] == both.caller.heard[-1] == (DELAY_US, "opened")
