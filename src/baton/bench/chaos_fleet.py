"""The fleet of a chaos run: a `baton up` process and the state reported by its router.

Owns the process and the polling. Router events are stored by number, so that none is missed between two polls or counted
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from baton.bench.chaos_faults import READY, SeenInstance, SeenSuspicion
from baton.bench.child_processes import Child, ChildFailed, started
from baton.node.baton_command import baton_command

LOOK_EVERY_S = 0.1
START_S_MAX = 300.0
_API = re.compile(r"^\s*API\s+(https?://\S+)/v1\s*$", re.MULTILINE)


class FleetLost(Exception):
    """The router does not answer, or the fleet did not come back; the message says which."""


class _Ledger(msgspec.Struct):
    running: int = 0
    waiting: int = 0
    used: int = 0
    leased: int = 0
    receiving: int = 0
    leaving: int = 0


class _Instance(msgspec.Struct):
    name: str
    role: str
    state: str
    pid: int
    incarnation: int
    open: int
    ledger: _Ledger

    @property
    def still_held(self) -> str:
        """Requests and blocks that the instance still holds; "" when none."""
        held = {"open": self.open, **msgspec.structs.asdict(self.ledger)}
        return ", ".join(f"{count} {what}" for what, count in held.items() if count)


class _Event(msgspec.Struct):
    number: int
    name: str
    what: str
    why: str = ""


class _Listing(msgspec.Struct):
    data: list[_Instance]
    events: list[_Event] = []


@dataclass(slots=True)
class ChaosFleet:
    """State of the fleet at the last poll of the router."""

    url: str
    child: Child
    http: aiohttp.ClientSession
    instances: list[SeenInstance] = field(default_factory=list)
    events: list[SeenSuspicion] = field(default_factory=list)
    still_held: str = ""
    """Requests and blocks still held, by instance; empty when none."""

    @property
    def last_event(self) -> int:
        return self.events[-1].number if self.events else 0

    async def look(self) -> None:
        try:
            async with asyncio.timeout(30), self.http.get(f"{self.url}/v1/instances") as response:
                listing = msgspec.json.decode(await response.read(), type=_Listing)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise FleetLost(f"the router does not tell of its instances: {error}\n{self.child.last_lines()}") from error
        self.instances = [SeenInstance(one.name, one.role, one.state, one.pid, one.incarnation) for one in listing.data]
        self.still_held = "; ".join(f"{one.name}: {one.still_held}" for one in listing.data if one.still_held)
        last = self.last_event
        fresh = sorted((event for event in listing.events if event.number > last), key=lambda event: event.number)
        self.events += [SeenSuspicion(event.number, event.name, event.what, event.why) for event in fresh]

    async def drain(self, name: str) -> None:
        async with asyncio.timeout(30), self.http.post(f"{self.url}/v1/instances/{name}/drain") as response:
            if response.status >= 400:
                raise FleetLost(f"draining {name} was answered {response.status}: {await response.text()}")

    @property
    def ready(self) -> int:
        return sum(seen.state == READY for seen in self.instances)


@contextlib.asynccontextmanager
async def running_fleet(options: Sequence[str], instances: int, http: aiohttp.ClientSession) -> AsyncIterator[ChaosFleet]:
    """Start a fleet and wait until all instances are ready. Stopped when the block ends."""
    command = baton_command("up", "--router-port", "0", *options)
    with started("baton up", command, {"NO_COLOR": "1"}) as child:
        fleet = ChaosFleet(await _address(child), child, http)
        while fleet.ready < instances:
            await fleet.look()
            await asyncio.sleep(LOOK_EVERY_S)
        yield fleet


async def _address(child: Child) -> str:
    """Address of the API, from the banner printed when all instances are ready."""
    deadline_s = time.monotonic() + START_S_MAX
    while (found := _API.search(child.output())) is None:
        child.check_alive()
        if time.monotonic() > deadline_s:
            raise ChildFailed(f"the fleet was not ready within {START_S_MAX:g} s\n{child.last_lines()}")
        await asyncio.sleep(LOOK_EVERY_S)
    return found[1]
