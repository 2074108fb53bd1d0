"""The processes of a fleet and their command lines. Starts no process.

baton router MODEL --port 8000 --join-port 0                     first; its banner tells where instances join
baton serve MODEL --role decode --name decode-1 --router 127.0.0.1:41234 --host 127.0.0.1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.core.errors import SetupError
from baton.core.setting import Panel, Setting, Unit
from baton.node.baton_command import baton_command
from baton.node.settings import DEFAULT_MODEL, Model

LOOPBACK = "127.0.0.1"
INSTANCES_MAX = 64
ROLES = ("prefill", "decode", "mixed")
SERVING_ROLES = ("decode", "mixed")
"""Roles that a router sends requests to."""


def _fleet(
    name: str,
    text: str,
    least: float | None = None,
    most: float | None = None,
    *,
    unit: Unit = Unit.AS_IS,
    is_optional: bool = False,
    is_flag: bool = False,
) -> Setting:
    return Setting(
        name, Panel.FLEET, text, least, most, unit=unit, is_optional=is_optional, is_flag=is_flag, has_variable=False
    )


class BadFleet(SetupError):
    """A fleet that could never serve; the message names the options."""


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """The ports of a router. Zero in a plan: any free one."""

    http: int
    join: int = 0


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """An instance of the fleet."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class FleetPlan:
    model: Model = DEFAULT_MODEL
    prefill: Annotated[int, _fleet("prefill", "Instances that prefill for those that decode.", 0)] = 0
    decode: Annotated[int, _fleet("decode", "Instances that decode.", 0)] = 0
    mixed: Annotated[
        int, _fleet("mixed", "Instances that do both. Default: 1 where there are no others.", 0, is_optional=True)
    ] = 0
    serve_options: tuple[str, ...] = ()
    router_options: tuple[str, ...] = ()
    router_port: Annotated[
        int, _fleet("router-port", "Port of the API and the dashboard; 0 picks a free one.", 0, 65535)
    ] = 8000
    demo: Annotated[bool, _fleet("demo", "One that prefills, two that decode, and a button to kill one.", is_flag=True)] = (
        False
    )
    threads: Annotated[
        int | None, _fleet("threads", "CPU threads of each instance. Default: its share of the cores.", 1)
    ] = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Passed to all processes in the environment, since every user of the machine can read command lines."""
    drain_timeout_s: Annotated[
        float, _fleet("drain-timeout", "Seconds that open requests get to finish after Ctrl-C.", 0)
    ] = 30.0
    restart_delay_us_max: Annotated[
        int,
        _fleet(
            "restart-delay-max", "Longest pause in seconds before a process that keeps ending starts again.", 0,
            unit=Unit.SECONDS,
        ),
    ] = 10_000_000  # fmt: skip
    admin_key: str | None = field(default=None, repr=False)
    """Passed in the environment, like `api_keys`."""
    metrics_key: str | None = field(default=None, repr=False)
    """Passed in the environment. None: the metrics of instances are read with the admin key, if there is one."""
    kv_store: str | None = field(default=None, repr=False)
    """Passed in the environment: it may contain a password."""
    cluster_key: str | None = field(default=None, repr=False)
    """Passed in the environment. None: one is made for this fleet."""

    def __post_init__(self) -> None:
        if self.decode + self.mixed == 0:
            raise BadFleet("nobody would answer: give --decode or --mixed at least 1")
        keys = (*self.api_keys, *(key for key in (self.admin_key, self.metrics_key) if key is not None))
        if any(key.split() != [key] for key in keys):
            raise BadFleet("an API key, admin key or metrics key must not be empty or have spaces in it")
        if self.prefill and not self.decode:
            raise BadFleet("--prefill instances work for --decode ones, and there are none")
        if self.prefill + self.decode + self.mixed > INSTANCES_MAX:
            raise BadFleet(f"that is more than {INSTANCES_MAX} instances on one machine")

    @property
    def members(self) -> tuple[PlannedProcess, ...]:
        counts = zip(ROLES, (self.prefill, self.decode, self.mixed), strict=True)
        return tuple(PlannedProcess(f"{role}-{number}", role) for role, count in counts for number in range(1, count + 1))

    def router_command(self, ports: RouterPorts) -> list[str]:
        listens = ("--port", str(ports.http), "--join-port", str(ports.join))
        demo = ("--demo",) if self.demo else ()
        expected = ("--expect-instances", str(self.decode + self.mixed))
        return [*_BATON, "router", self.model, *listens, *expected, *demo, *self._drain, *self.router_options]

    def member_command(self, member: PlannedProcess, join: str, cores: int) -> list[str]:
        place = ("--role", member.role, "--name", member.name, "--router", join, "--host", LOOPBACK, "--port", "0")
        peers = ("--peer-port", "0") if member.role == "prefill" else ()
        threads = ("--threads", str(self.threads or max(1, cores // len(self.members))))
        return [*_BATON, "serve", self.model, *place, *peers, *threads, *self._drain, *self.serve_options]

    @property
    def _drain(self) -> tuple[str, ...]:
        return "--drain-timeout", f"{self.drain_timeout_s:g}"


_BATON = baton_command()
