"""A router and its instances, as processes of a benchmark.

Owns their start and the wait until all instances have joined. Each process has its own session, so that the router's CPU
time is measured alone. Every start has a new random cluster key.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter

import aiohttp
import msgspec

from baton.bench.child_processes import Child, ChildFailed, free_port, started
from baton.bench.client import open_http
from baton.node.baton_command import baton_command

START_LIMIT_S = 180.0
POLL_S = 0.1
_BATON = baton_command()


class _Listed(msgspec.Struct):
    name: str
    state: str


class _Instances(msgspec.Struct):
    data: list[_Listed]


@dataclass(frozen=True, slots=True)
class FleetInstance:
    child: Child
    url: str


@dataclass(frozen=True, slots=True)
class RunningFleet:
    router: Child
    url: str
    members: tuple[FleetInstance, ...]


@contextlib.asynccontextmanager
async def fleet(
    served: Sequence[str], roles: Sequence[str], router: Sequence[str] = (), each: Sequence[str] = ()
) -> AsyncIterator[RunningFleet]:
    """Start a fleet. `served`: arguments of both router and instances: the model, or the scripted executor."""
    env = {"BATON_CLUSTER_KEY": secrets.token_hex(32), "BATON_LOG_LEVEL": "warning"}
    port, join_port = free_port(), free_port()
    async with AsyncExitStack() as running:
        head = [*_BATON, "router", *served, "--port", str(port), "--join-port", str(join_port), *router]
        lead = running.enter_context(started("the router", head, env))
        members = []
        for number, role in enumerate(roles, 1):
            own, name = free_port(), f"{role}-{number}"
            command = [*_BATON, "serve", *served, "--port", str(own), "--role", role, "--name", name, *each]
            command += ["--router", f"127.0.0.1:{join_port}", *(("--peer-port", "0") if role == "prefill" else ())]
            members.append(FleetInstance(running.enter_context(started(name, command, env)), f"http://127.0.0.1:{own}"))
        made = RunningFleet(lead, f"http://127.0.0.1:{port}", tuple(members))
        await _until_joined(made)
        yield made


async def _until_joined(fleet: RunningFleet) -> None:
    begun_s = perf_counter()
    async with open_http(2) as http:
        while await _ready(http, fleet.url) < len(fleet.members):
            for child in (fleet.router, *(member.child for member in fleet.members)):
                child.check_alive()
            if perf_counter() - begun_s > START_LIMIT_S:
                raise ChildFailed(f"not all instances joined within {START_LIMIT_S:g} s\n{fleet.router.last_lines()}")
            await asyncio.sleep(POLL_S)


async def _ready(http: aiohttp.ClientSession, url: str) -> int:
    """Number of ready instances, from the router."""
    try:
        async with http.get(f"{url}/v1/instances") as response:
            listed = msgspec.json.decode(await response.read(), type=_Instances).data
    except (aiohttp.ClientError, ConnectionError, msgspec.DecodeError):
        return 0
    return sum(instance.state == "ready" for instance in listed)
