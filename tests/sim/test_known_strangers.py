"""Processes with the key of the cluster that are no members: a router in a simulated world lets none of them join."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from baton.core.config import MIXED
from baton.core.routing.events import Join
from baton.executor.fingerprint import SCRIPTED_MARK
from baton.sim.exhaustive import fleet_world
from baton.sim.fuzzed_world import FuzzedWorld
from baton.sim.router_host import RouterHost
from baton.sim.zombies import KnownStranger, ZombieInstance, forged
from tests.support.routing import facts

WITHIN_US = 300_000
"""All strangers have come and gone; an old life, which sends no heartbeats, is not suspected yet."""
JOINED_WITHIN_US = 20_000
OLD_LIFE = 7
"""Number of an old life: beyond those of the instances."""


@pytest.fixture
def site() -> FuzzedWorld:
    """A router that no instance dials."""
    return FuzzedWorld(fleet_world((MIXED, MIXED)))


@pytest.fixture
def router(site: FuzzedWorld) -> RouterHost:
    assert site.fleet is not None
    return site.fleet.router_host


def join(incarnation: int) -> Join:
    return replace(facts("instance 0", incarnation=incarnation), fingerprint=SCRIPTED_MARK, pid=0, url="")


def send_strangers(site: FuzzedWorld) -> None:
    """One for each of many draws, so that all kinds of talk occur."""
    for number in range(60):
        name = f"stranger with the key {number}"
        KnownStranger(site.world, site.all_lines[0], name, forged(random.Random(number), join(incarnation=2)))
    site.until(site.world.now_us + WITHIN_US)


def test_no_stranger_joins_a_router_without_members(site: FuzzedWorld, router: RouterHost) -> None:
    send_strangers(site)
    assert not router.open_at()


def test_no_stranger_takes_the_place_of_an_old_life_that_was_welcomed(site: FuzzedWorld, router: RouterHost) -> None:
    ZombieInstance(site.world, site.all_lines[0], router, join(incarnation=1), OLD_LIFE).come_back()
    site.until(JOINED_WITHIN_US)
    (session,) = router.open_at()
    send_strangers(site)
    assert list(router.open_at()) == [session]
