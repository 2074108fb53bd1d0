"""The hand-over side of an instance with peers: sessions, transfers, and the log of hand-overs.

The engine loop gives this one object every order that concerns peers.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time

from baton.core.config import ROLES
from baton.core.engine.gauges import PeerTraffic
from baton.core.handover.faults import PdStage
from baton.core.handover.messages import AttemptFailed, HandoverMade, PeerEffect, PeerEvent, Tell
from baton.executor.contract import Executor
from baton.node.inbox import EngineInbox
from baton.node.kv_pool_memory import PoolMemory
from baton.node.kv_transfers import KvTransfers
from baton.node.peer_connection import LocalInstance
from baton.node.peers import PeerConnections, listen
from baton.node.settings import DEFAULT_PEER_PORT, EngineSettings

log = logging.getLogger("baton.handover")


class HandoverService:
    def __init__(self, peers: PeerConnections, transfers: KvTransfers, address: str, details: str) -> None:
        self.address = address
        """HOST:PORT where peers connect to us; empty where we connect to them."""
        self.details = details
        """For the operator: where peers connect, or which peers we connect to."""
        self._peers = peers
        self._transfers = transfers

    def before_handling(self, event: PeerEvent) -> None:
        """The worker is about to handle this."""
        self._peers.before_handling(event)

    def carry_out(self, effect: PeerEffect) -> None:
        match effect:
            case Tell(peer, message):
                self._peers.send(peer, message)
            case AttemptFailed(handover, fault):
                level = (
                    logging.WARNING if fault.stage is PdStage.OFFER else logging.ERROR
                )  # before the grant nothing is lost
                log.log(level, "hand-over of request %d with %s: %s", handover.request, handover.peer, fault.message)
            case HandoverMade(handover, _, took_us):
                log.debug("request %d was handed over by %s in %d ms", handover.request, handover.peer, took_us // 1000)
            case _:
                self._transfers.carry_out(effect)

    def connect_to(self, addresses: tuple[str, ...]) -> None:
        self._peers.connect_to(addresses)

    def step_done(self, step: int) -> None:
        self._transfers.step_done(step)

    def traffic(self) -> PeerTraffic:
        return PeerTraffic(dict(self._peers.refused + self._transfers.refused()), self._transfers.arrived_bytes())


def open_handovers(settings: EngineSettings, executor: Executor, pool: PoolMemory, inbox: EngineInbox) -> HandoverService:
    role, memory = ROLES[settings.role], pool.of(executor)
    transfers = KvTransfers(role, settings.transfer, memory, inbox.put, settings.peer_host)
    executor.on_layer = transfers.layer_done if role.gives else None
    listener = _listen(settings) if role.gives else None
    local = LocalInstance(
        name=f"{role.name} {socket.gethostname()[:64]} {os.getpid()} {secrets.token_hex(4)}",
        incarnation=time.time_ns() // 1000,
        role=role,
        layout=memory.layout,
        vocabulary=executor.vocabulary,
        cluster_key=settings.cluster_key,
    )
    peers = PeerConnections(local, transfers, inbox, listener, settings.peers)
    address = "" if listener is None else _address(listener)
    return HandoverService(peers, transfers, address, _details(settings, address))


def _listen(settings: EngineSettings) -> socket.socket:
    return listen(settings.peer_host, DEFAULT_PEER_PORT if settings.peer_port is None else settings.peer_port)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _details(settings: EngineSettings, address: str) -> str:
    if address:
        return f"role prefill, for peers at {address}"
    return f"role decode, prefilled by {', '.join(settings.peers) or 'itself'}"
