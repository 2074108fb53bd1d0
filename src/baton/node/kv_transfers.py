"""Moves KV to and from peers as the worker orders: picks the kind of transfer for each peer and keeps it for a hand-over.

The decode side (D) decides by which kind it receives: the configured one or, with `auto`, shared memory from a peer on this
host and TCP from elsewhere; it sends the peer one address as it registers. The prefill side (P) sends by the kind of that
address. Orders return at once; their results are reported from the transfers' own threads.
"""

from __future__ import annotations

from collections import Counter

from baton.core.config import Role
from baton.core.errors import BatonError
from baton.core.handover.messages import (
    Expect,
    Fence,
    Fenced,
    Handover,
    OpenShip,
    PeerEvent,
    PeerId,
    Ship,
    ShipFailed,
    Shipped,
    Verified,
    Verify,
)
from baton.kv.transfer_contract import (
    KvMemory,
    Receiver,
    Report,
    Sender,
    SenderOptions,
    TransferUnavailable,
    available,
    make_receiver,
    make_sender,
)

AUTO = "auto"
BUILT_IN = ("shm", "tcp")
"""The kinds that `auto` chooses from. Mooncake's ports are not authenticated, so it is used only where both sides ask for
it."""
TransferOrder = Expect | Verify | OpenShip | Ship | Fence


class NoTransfer(BatonError):
    """The kind of transfer that was asked for cannot work here."""


def kinds_of(setting: str) -> tuple[str, ...]:
    """The kinds of transfer that an instance with this setting can use here."""
    if setting != AUTO:
        reason = available(setting)
        if reason is not None:
            raise NoTransfer(f"--transfer {setting} cannot be used: {reason}")
        return (setting,)
    return tuple(kind for kind in BUILT_IN if available(kind) is None)


class KvTransfers:
    def __init__(
        self, role: Role, setting: str, memory: KvMemory, report: Report, host: str, bytes_per_s: float | None = None
    ) -> None:
        """`bytes_per_s` limits senders, for measurements."""
        self._setting = setting
        self._memory = memory
        self._report = report
        self._options: SenderOptions = {"host": host} if bytes_per_s is None else {"host": host, "bytes_per_s": bytes_per_s}
        kinds = kinds_of(setting)
        wanted = kinds if role.takes else ()
        self._receivers: dict[str, Receiver] = {kind: make_receiver(kind, memory, self._tell, host=host) for kind in wanted}
        self._sends_by: tuple[str, ...] = kinds if role.gives else ()
        self._senders: dict[str, Sender] = {}
        """Made when a peer first needs one; replaced as a whole, since other threads read it."""
        self._address: dict[PeerId, str] = {}
        """P: the address where each peer receives KV."""
        self._kind: dict[PeerId, str] = {}
        """D: the kind of transfer each peer was told to use."""
        self._receiving: dict[Handover, Receiver] = {}
        self._sending: dict[Handover, Sender] = {}
        """The sender of each hand-over until it is done or fenced."""

    def _tell(self, event: PeerEvent) -> None:
        """Called on a transfer's thread. Data that has arrived or was fully sent can no longer be stopped: D verifies it."""
        if isinstance(event, Verified):
            self._receiving.pop(event.handover, None)
        elif isinstance(event, Shipped):
            self._sending.pop(event.handover, None)
        self._report(event)

    # ── at registration, on the peers' thread ────────────────────────────────────────────────────────────────────────────

    def offer(self, peer: PeerId, same_host: bool) -> tuple[str, ...]:
        if not self._receivers:
            return ()
        kind = self._setting if self._setting != AUTO else "shm" if same_host and "shm" in self._receivers else "tcp"
        self._kind[peer] = kind
        return (self._receivers[kind].address,)

    def accept(self, peer: PeerId, addresses: tuple[str, ...]) -> str | None:
        if not self._sends_by:
            return None
        if len(addresses) != 1:
            return f"transfers: 1 address is wanted here, {len(addresses)} were given there"
        kind = addresses[0].partition(":")[0]
        if kind not in self._sends_by:
            return f"transfer: {' or '.join(self._sends_by)} here, {kind} there"
        if kind not in self._senders:
            try:
                sender = make_sender(kind, self._memory, self._tell, **self._options)
            except (OSError, TransferUnavailable) as error:
                return f"transfer: {kind} cannot be used here: {error}"
            self._senders = {**self._senders, kind: sender}
        self._address[peer] = addresses[0]
        return None

    def forget(self, peer: PeerId) -> None:
        self._address.pop(peer, None)

    # ── orders of the worker, on the engine loop's thread ────────────────────────────────────────────────────────────────

    def carry_out(self, order: TransferOrder) -> None:
        match order:
            case Expect(handover, token, first, blocks):
                self._receiving[handover] = way = self._receivers[self._kind[handover.peer]]
                way.expect(handover, token, first, blocks)
            case OpenShip():
                self._open(order)
            case Verify(handover, checks):
                if (receiver := self._receiving.get(handover)) is not None:
                    receiver.verify(handover, checks)
            case Ship(handover, step, first, upto, last):
                if (sender := self._sending.get(handover)) is not None:
                    sender.ship(handover, step, first, upto, last)
            case Fence(handover):
                self._fence(handover)

    def _open(self, order: OpenShip) -> None:
        handover = order.handover
        address = self._address.get(handover.peer)
        if address is None:
            self._report(ShipFailed(handover, "its session is over"))
            return
        sender = self._senders[address.partition(":")[0]]
        self._sending[handover] = sender
        sender.open(handover, address, order.token, order.first, order.blocks)

    def _fence(self, handover: Handover) -> None:
        way = self._receiving.pop(handover, None) or self._sending.pop(handover, None)
        if way is None:
            self._report(Fenced(handover))
        else:
            way.fence(handover)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def layer_done(self, step: int, layer: int) -> None:
        """Called on the executor's thread."""
        for sender in self._senders.values():
            sender.layer_done(step, layer)

    def step_done(self, step: int) -> None:
        for sender in self._senders.values():
            sender.step_done(step)

    def arrived_bytes(self) -> int:
        return sum(receiver.arrived_bytes for receiver in self._receivers.values())

    def refused(self) -> Counter[str]:
        return sum((receiver.refused for receiver in self._receivers.values()), Counter())

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        for sender in self._senders.values():
            sender.close()
