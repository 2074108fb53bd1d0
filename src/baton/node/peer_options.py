"""Checks which options of an instance with peers or a router go together, and finds the key that it shares with them.

Refuses contradictions, by the names of the options, before anything slow happens. On one machine no key needs to be given:
one is made and kept in the cache folder, readable by this user alone. Beyond loopback a key must be given.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from baton.core.config import ROLES, PrefillPath
from baton.core.errors import SetupError
from baton.executor.private_files import why_unsafe
from baton.node.secrets import kept_secret
from baton.node.settings import EngineSettings
from baton.wire.keyfile import key_of_text

log = logging.getLogger("baton.node")

KEY_CHARS_MIN = 16
NAME_CHARS_MAX = 64
LOOPBACK = "127.0.0.1"


class BadPairing(SetupError):
    """Options that cannot go together; the message names them."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_pairing(engine: EngineSettings) -> None:
    role = ROLES[engine.role]
    _refuse_without(role.takes, "--peer", bool(engine.peers), "--role decode, which asks peers to prefill")
    _refuse_without(role.gives, "--peer-port", engine.peer_port is not None, "--role prefill, which listens for peers")
    general = engine.prefill_path is PrefillPath.GENERAL
    _refuse_without(role.gives, "--prefill-path general", general, "--role prefill, which has two ways to plan")
    _refuse_without(engine.has_peers, "--peer-host", engine.peer_host != LOOPBACK, "--role prefill or decode")
    _refuse_without(engine.has_peers, "--transfer", engine.transfer != "auto", "--role prefill or decode")
    _check_host(engine)
    _check_router(engine)
    seen: list[str] = []
    for peer in engine.peers:
        _check_peer(peer, engine)
        if peer in seen:
            raise BadPairing(f"--peer {peer} is given twice")
        seen.append(peer)


def _refuse_without(has: bool, option: str, given: bool, needs: str) -> None:
    if given and not has:
        raise BadPairing(f"{option} is only for {needs}")


def _check_host(engine: EngineSettings) -> None:
    try:
        address = ipaddress.ip_address(engine.peer_host)
    except ValueError:
        raise BadPairing(f"--peer-host {engine.peer_host} is no numeric address, such as 127.0.0.1 or 10.0.0.5") from None
    if address.is_unspecified and ROLES[engine.role].takes:
        raise BadPairing(
            f"--peer-host {engine.peer_host} is no address that a peer could send KV to; give one of this machine"
        )


def _check_router(engine: EngineSettings) -> None:
    if engine.router is None:
        if engine.name:
            raise BadPairing(f"--name {engine.name} is only for --router, which knows instances by their names")
        return
    host, _ = split_address("--router", engine.router)
    if engine.has_peers and not is_loopback(host) and is_loopback(engine.peer_host):
        raise BadPairing(
            f"--router {engine.router} is another machine, and peers there cannot reach {engine.peer_host}; "
            "give --peer-host an address of this machine"
        )
    if engine.name and not (engine.name.isascii() and engine.name.isprintable() and len(engine.name) <= NAME_CHARS_MAX):
        raise BadPairing(f"--name {engine.name!r} is not up to {NAME_CHARS_MAX} printable ASCII characters")
    if ROLES[engine.role].gives and ipaddress.ip_address(engine.peer_host).is_unspecified:
        raise BadPairing(
            f"--peer-host {engine.peer_host} is no address that the router could tell others; give one of this machine"
        )


def _check_peer(peer: str, engine: EngineSettings) -> None:
    host, _ = split_address("--peer", peer)
    if not is_loopback(host) and is_loopback(engine.peer_host):
        raise BadPairing(
            f"--peer {peer} is another machine, and KV would be received on {engine.peer_host}, which it cannot reach; "
            "give --peer-host an address of this machine"
        )


def split_address(option: str, address: str) -> tuple[str, int]:
    """Split HOST:PORT or [HOST]:PORT; the error names the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadPairing(f"{option} {address} is not HOST:PORT, such as 127.0.0.1:8100")
    return host.removeprefix("[").removesuffix("]"), int(port)


def cluster_key(engine: EngineSettings, text: str | None, file: str | None, folder: Path) -> bytes:
    """The key of an instance; empty where none is given and none is needed."""
    hosts = [engine.peer_host] if engine.has_peers else []
    hosts += [split_address("--peer", peer)[0] for peer in engine.peers]
    if engine.router is not None:
        hosts.append(split_address("--router", engine.router)[0])
    if not engine.needs_key and text is None and file is None:
        return b""
    return key_for(hosts, text, file, folder)


def key_for(hosts: Iterable[str], text: str | None, file: str | None, folder: Path) -> bytes:
    """The given key; or, where all these hosts are this machine, the one kept on this machine."""
    if text is not None and file is not None:
        raise BadPairing("--cluster-key and --cluster-key-file are both given; one of them is enough")
    if file is not None:
        text = _read(file)
    if text is not None:
        if len(text) < KEY_CHARS_MIN:
            raise BadPairing(f"the cluster key has {len(text)} characters; it needs at least {KEY_CHARS_MIN}")
        return key_of_text(text)
    for host in hosts:
        if not is_loopback(host):
            raise BadPairing(
                f"{host} is not this machine alone, and no cluster key is set. Give the same one to all instances with "
                "--cluster-key-file (or BATON_CLUSTER_KEY), or stay on 127.0.0.1."
            )
    return kept_secret(folder / "cluster.key", "instances that still have the old one must be restarted")


def _read(file: str) -> str:
    try:
        status = Path(file).stat()
        if (why := why_unsafe(status.st_uid, status.st_mode, os.geteuid())) is not None:
            raise BadPairing(f"--cluster-key-file {file} {why}; make it yours alone, with mode 600")
        if status.st_mode & 0o077:
            log.warning("--cluster-key-file %s can be read by others on this machine; chmod 600 it", file)
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPairing(f"--cluster-key-file {file} cannot be read: {error}") from None
