"""Says at the start what leaves this machine without encryption: one WARNING that names the links, and what each carries.

docs/security.md has the same as a table, with what protects each link. Links on loopback are not named.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from baton.kv.store import parse_url
from baton.node.peer_options import is_loopback, split_address
from baton.node.settings import EngineSettings, HttpSettings, Transfer

log = logging.getLogger("baton.node")

OF_TRACES = "ids, names, lengths and times, no text; an https:// address encrypts them"
OVER_HTTP = "API keys, prompts and answers; --ssl-certfile encrypts them"
BETWEEN = "prompts, answers and hashes of API keys; the cluster key only authenticates them"
OF_PEERS = {
    Transfer.MOONCAKE: "prompts and KV; the KV is not authenticated either",
    Transfer.SHM: "prompts; the cluster key only authenticates them",
}
OVER_TCP = "prompts and KV; the cluster key authenticates messages, not KV over TCP"


def clear_links_of_http(settings: HttpSettings) -> list[str]:
    links = (
        [] if is_loopback(settings.host) or settings.ssl_certfile is not None else [f"HTTP at {settings.host} ({OVER_HTTP})"]
    )
    collector = urlsplit(settings.otlp_endpoint or "")
    if collector.scheme == "http" and not is_loopback(collector.hostname or ""):
        links.append(f"traces to {collector.hostname} ({OF_TRACES})")
    return links


def clear_links_of_instance(engine: EngineSettings) -> list[str]:
    links = []
    if engine.router is not None and not is_loopback(split_address("--router", engine.router)[0]):
        links.append(f"messages with the router at {engine.router} ({BETWEEN})")
    peers = [engine.peer_host, *(split_address("--peer", peer)[0] for peer in engine.peers)] if engine.has_peers else []
    if not all(map(is_loopback, peers)):
        links.append(f"messages and KV with peers through {engine.peer_host} ({OF_PEERS.get(engine.transfer, OVER_TCP)})")
    return links + _clear_links_of_store(engine.kv_store)


def clear_links_of_router(join_host: str) -> list[str]:
    return [] if is_loopback(join_host) else [f"messages with instances at {join_host} ({BETWEEN})"]


def _clear_links_of_store(address: str | None) -> list[str]:
    url = None if address is None else parse_url(address)
    if url is None or url.kind == "file" or url.is_tls or is_loopback(url.host):
        return []
    is_valkey = url.kind == "valkey"
    return [f"{url} ({'KV and the password; valkeys:// encrypts them' if is_valkey else 'KV'})"]


def tell_clear_links(links: Sequence[str]) -> None:
    if links:
        log.warning("not encrypted: %s. Only a private network or a tunnel protects them", "; ".join(links))
