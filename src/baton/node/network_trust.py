"""Refuses what can only be used on a network where everybody is trusted, unless the operator says that it is such a one."""

from __future__ import annotations

from baton.core.errors import SetupError
from baton.kv.store import parse_url
from baton.node.kv_event_options import exposed_endpoints
from baton.node.settings import EngineSettings

DANGER = (
    "opens ports on all addresses of this machine, without authentication: every process that reaches them can read and "
    "write the KV of all tenants here, whatever the cluster key is. Where only trusted machines and users reach them, say "
    "so with --trust-network"
)

EVENTS_DANGER = (
    "sends the token ids of all prompts and answers of all tenants, unencrypted and without authentication, to whoever "
    "subscribes. Where only trusted machines and users reach that address, say so with --trust-network"
)


class UntrustedNetwork(SetupError):
    """An option that needs --trust-network; the message says why."""


def check_trust(transfer: str, store: str | None, trusted: bool) -> None:
    """Mooncake's engine and the client of its store listen without a key, and nothing makes them stay on loopback."""
    if trusted:
        return
    if transfer == "mooncake":
        raise UntrustedNetwork(f"--transfer mooncake {DANGER}")
    if store and (url := parse_url(store)).kind == "mooncake":
        raise UntrustedNetwork(f"--kv-store {url} {DANGER}")


def check_events_trust(settings: EngineSettings) -> None:
    """KV events hold what clients wrote, and their readers know no key."""
    if not settings.trust_network and (exposed := exposed_endpoints(settings)):
        raise UntrustedNetwork(f"KV events at {exposed[0]}: this {EVENTS_DANGER}")
