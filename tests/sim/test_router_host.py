"""The host of a simulated router: which of an instance's connections it is a member in."""

from __future__ import annotations

from baton.core.routing.config import RouterConfig
from baton.sim.instance_front_end import line_names
from baton.sim.lines import Pipes
from baton.sim.router_host import RouterHost
from baton.sim.world import World
from baton.sim.zombies import KnownStranger, ZombieInstance
from tests.support.routing import facts

JOINED_US = 10_000
"""Time in which an instance joins, and loses no membership for want of heartbeats."""


def test_an_instance_is_a_member_where_it_joined_whichever_connection_it_opened_last() -> None:
    world, pipes = World(0, events_max=1_000), Pipes(100)
    router_host = RouterHost(world, pipes, RouterConfig(), b"secret")
    joined = ZombieInstance(world, pipes, router_host, facts("instance 0"), 0)
    assert router_host.connection_of("instance 0") is None
    joined.come_back()
    until(world, JOINED_US)
    KnownStranger(world, pipes, line_names(0)[0], [])  # of an earlier life: it ends before it has said anything
    until(world, 2 * JOINED_US)
    connection = router_host.connection_of("instance 0")
    assert connection is not None
    assert connection.line.session == joined.line.session is not None


def until(world: World, at_us: int) -> None:
    while world.next_us is not None and world.next_us <= at_us:
        world.step()
