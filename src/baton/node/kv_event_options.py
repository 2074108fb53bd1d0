"""Checks the options of KV events, before anything slow happens."""

from __future__ import annotations

import re

from baton.core.config import BadConfig
from baton.node.peer_options import is_loopback
from baton.node.settings import EngineSettings

_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
_PORTS_END = 1 << 16


def check_kv_events(settings: EngineSettings) -> None:
    """Raise BadConfig for settings that cannot work."""
    if settings.kv_events_endpoint is None:
        if settings.kv_events_replay_endpoint is not None:
            raise BadConfig("--kv-events-replay-endpoint is only for --kv-events-endpoint")
        if settings.kv_events_connect:
            raise BadConfig("--kv-events-connect is only for --kv-events-endpoint")
        return
    if not settings.prefix_cache:
        raise BadConfig("--kv-events-endpoint tells what the prefix cache holds; leave --no-prefix-cache out")
    _check("--kv-events-endpoint", settings.kv_events_endpoint, listens=not settings.kv_events_connect)
    if settings.kv_events_replay_endpoint is not None:
        _check("--kv-events-replay-endpoint", settings.kv_events_replay_endpoint, listens=True)


def _check(option: str, endpoint: str, listens: bool) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    found = _TCP.fullmatch(endpoint)
    if found is None or int(found["port"]) >= _PORTS_END:
        raise BadConfig(f"{option} {endpoint} is not tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557, or ipc://PATH")
    if not listens and (found["host"] == "*" or found["port"] == "0"):
        raise BadConfig(
            f"{option} {endpoint} is no address to connect to; give the reader's, or leave --kv-events-connect out"
        )


def leaves_this_machine(endpoint: str) -> bool:
    """Whether events go, or can be fetched, beyond loopback."""
    found = _TCP.fullmatch(endpoint)
    return found is not None and not is_loopback(found["host"].removeprefix("[").removesuffix("]"))


def exposed_endpoints(settings: EngineSettings) -> list[str]:
    """Endpoints that others than this machine may reach."""
    endpoints = [settings.kv_events_endpoint, settings.kv_events_replay_endpoint]
    return [endpoint for endpoint in endpoints if endpoint is not None and leaves_this_machine(endpoint)]
