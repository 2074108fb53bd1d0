"""Virtual time: order, pauses, crashes, alarms, and streams that do not disturb each other."""

from __future__ import annotations

import pytest

from baton.sim.world import Alarm, EventsExhausted, Host, World, stream_of


def make(events_max: int = 1000) -> tuple[World, Host, list[str]]:
    world = World(7, events_max=events_max, tell_story=True)
    return world, Host(world, "host"), []


def run(world: World) -> None:
    while world.next_us is not None:
        world.step()


def test_events_at_one_moment_happen_in_the_order_they_were_asked_for() -> None:
    world, host, seen = make()
    for name in ("a", "b", "c"):
        host.at(5, seen.append, name)
    host.at(3, seen.append, "earlier")
    run(world)
    assert seen == ["earlier", "a", "b", "c"]
    assert world.now_us == 5


def test_what_is_asked_for_in_the_past_happens_now() -> None:
    world, host, seen = make()
    host.at(10, lambda: host.at(1, seen.append, "late"))
    run(world)
    assert seen == ["late"]
    assert world.now_us == 10


def test_after_a_crash_nothing_of_the_old_life_happens() -> None:
    world, host, seen = make()
    host.at(5, seen.append, "old")
    host.crash()
    host.restart()
    host.at(5, seen.append, "new")
    run(world)
    assert seen == ["new"]


def test_a_paused_host_catches_up_in_order_when_it_wakes() -> None:
    world, host, seen = make()
    host.at(1, seen.append, "a")
    host.at(2, seen.append, "b")
    host.pause()
    world.at(100, host.resume)
    run(world)
    assert seen == ["a", "b"]
    assert world.now_us == 100


def test_a_crash_in_a_pause_loses_what_was_held() -> None:
    world, host, seen = make()
    host.at(1, seen.append, "a")
    host.pause()
    world.at(5, host.crash)
    world.at(6, host.resume)
    run(world)
    assert seen == []


def test_an_alarm_rings_at_the_last_time_that_was_set_and_at_no_other() -> None:
    world, host, _ = make()
    rung: list[int] = []
    alarm = Alarm(host, lambda: rung.append(world.now_us))
    alarm.set(10)
    alarm.set(30)
    alarm.set(20)
    run(world)
    assert rung == [20]
    alarm.set(40)
    alarm.set(None)
    run(world)
    assert rung == [20]


def test_a_world_that_goes_in_circles_is_stopped() -> None:
    world, host, _ = make(events_max=50)

    def again() -> None:
        host.after(0, again)

    again()
    with pytest.raises(EventsExhausted, match="50 events"):
        run(world)


def test_a_stream_depends_on_seed_and_name_alone() -> None:
    one = World(3, events_max=1)
    other = World(3, events_max=1)
    other.stream("somebody else").random()
    assert one.stream("network").random() == other.stream("network").random() == stream_of(3, "network").random()
    assert one.stream("network").random() != one.stream("disk").random()
    assert stream_of(4, "network").random() != stream_of(3, "network").random()


def test_the_digest_covers_time_place_and_word() -> None:
    def digest(at_us: int, who: str, what: str) -> str:
        world = World(1, events_max=10)
        world.at(at_us, world.note, who, what)
        run(world)
        return world.digest()

    assert len({digest(1, "a", "x"), digest(2, "a", "x"), digest(1, "b", "x"), digest(1, "a", "y")}) == 4
    assert digest(1, "a", "x") == digest(1, "a", "x")
