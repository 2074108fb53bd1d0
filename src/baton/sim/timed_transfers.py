"""KV transfers between instances of measured clusters: no bytes and no faults, only the time that they take.

The counterpart of `faulty_transfers` for runs that measure: it costs one event per layer, not one per piece.

    one network card out of and one into each instance, first come first served, `card_bytes_per_s` each way
    KV is sent while its step runs: layer l of L is ready when (l + 1) / L of the step's time is over
    a piece occupies the sender's card, then the receiver's, then takes `delay_us`; blocks are sent whole
    connecting, checksums and fences take no time

With cards that are faster than KV is computed, about one layer of the last chunk is left to send when a prefill ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Arriving, Fenced, Handover, PeerId, Shipped, Verified
from baton.executor.contract import KvView
from baton.sim.faulty_transfers import Report
from baton.sim.world import Host

ARRIVING_EVERY_US = 200_000
"""Least interval between two Arriving events of one hand-over."""
NO_CHECKS = b""
"""Checksums are neither computed nor compared."""


@dataclass(frozen=True, slots=True)
class KvLinkModel:
    """The size of KV, and the bandwidth and delay of its transfers."""

    layers: int
    block_bytes: int
    """Over all layers."""
    card_bytes_per_s: float
    delay_us: int

    def layers_us(self, takes_us: int) -> list[int]:
        """Microseconds from the beginning of a step of `takes_us` until each of its layers can be sent."""
        return [takes_us * (layer + 1) // self.layers for layer in range(self.layers)]


class NetworkCard:
    """One direction of an instance's network card."""

    def __init__(self, bytes_per_s: float) -> None:
        self._us_a_byte = 1e6 / bytes_per_s
        self._free_us = 0.0
        self.bytes = 0.0
        self.busy_us = 0.0

    def transmit(self, from_us: float, size: float) -> float:
        """Send `size` bytes that are ready at `from_us`; returns when the last byte has passed."""
        took_us = size * self._us_a_byte
        self._free_us = max(from_us, self._free_us) + took_us
        self.bytes += size
        self.busy_us += took_us
        return self._free_us


class TimedTransfers:
    """All receivers and senders of a cluster, by instance name."""

    echo = 0.0

    def __init__(self, kv_link: KvLinkModel) -> None:
        self.kv_link = kv_link
        self._receivers: dict[str, TimedReceiver] = {}
        self._senders: dict[str, TimedSender] = {}

    def connect(self, name: str, host: Host, kv: KvView, report: Report) -> tuple[TimedReceiver, TimedSender]:  # noqa: ARG002
        self._receivers[name] = receiver = TimedReceiver(host, self.kv_link, report)
        self._senders[name] = sender = TimedSender(self, name, host, report)
        return receiver, sender

    def leave(self, name: str) -> None:
        del self._receivers[name], self._senders[name]

    def of(self, name: str) -> tuple[NetworkCard, NetworkCard]:
        """The cards out of an instance and into it."""
        return self._senders[name].card, self._receivers[name].card

    def receiver(self, name: str) -> TimedReceiver:
        return self._receivers[name]


@dataclass(slots=True)
class _Arrival:
    """The blocks of one hand-over that have not arrived yet."""

    missing: int
    """Number of blocks."""
    asked: bool = False
    told_us: int = -ARRIVING_EVERY_US


class TimedReceiver:
    def __init__(self, host: Host, kv_link: KvLinkModel, report: Report) -> None:
        self.host = host
        self.card = NetworkCard(kv_link.card_bytes_per_s)
        self._report = report
        self._arrivals: dict[Handover, _Arrival] = {}

    @property
    def open(self) -> int:
        return len(self._arrivals)

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:  # noqa: ARG002
        self._arrivals[handover] = _Arrival(len(blocks))

    def verify(self, handover: Handover, checks: bytes) -> None:  # noqa: ARG002
        self._arrivals[handover].asked = True
        self._look_at(handover)

    def fence(self, handover: Handover) -> None:
        self._arrivals.pop(handover, None)
        self.host.after(0, self._report, Fenced(handover))

    def coming(self, handover: Handover) -> None:
        arrival, now_us = self._arrivals.get(handover), self.host.world.now_us
        if arrival is not None and now_us - arrival.told_us >= ARRIVING_EVERY_US:
            arrival.told_us = now_us
            self._report(Arriving(handover))

    def landed(self, handover: Handover, blocks: int) -> None:
        arrival = self._arrivals.get(handover)
        if arrival is not None:
            arrival.missing -= blocks
            self._look_at(handover)

    def _look_at(self, handover: Handover) -> None:
        arrival = self._arrivals[handover]
        if arrival.asked and not arrival.missing:
            del self._arrivals[handover]
            self.host.after(0, self._report, Verified(handover))


@dataclass(frozen=True, slots=True)
class _Part:
    """One Ship order: some blocks of one hand-over."""

    handover: Handover
    blocks: int
    last: bool


class TimedSender:
    def __init__(self, transfers: TimedTransfers, name: str, host: Host, report: Report) -> None:
        self.card = NetworkCard(transfers.kv_link.card_bytes_per_s)
        self._transfers = transfers
        self._kv_link = transfers.kv_link
        self._name = PeerId(name)
        self._host = host
        self._report = report
        self._open: set[Handover] = set()
        self._parts: dict[int, list[_Part]] = defaultdict(list)
        """Orders by the step that computes their blocks."""

    @property
    def open(self) -> int:
        return len(self._open)

    def open_ship(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:  # noqa: ARG002
        self._open.add(handover)

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        part = _Part(handover, upto - first, last)
        if step is None:
            self._send(part, self._kv_link.layers, begins=True, ends=True)
        else:
            self._parts[step].append(part)

    def fence(self, handover: Handover) -> None:
        self._open.discard(handover)
        self._host.after(0, self._report, Fenced(handover))

    # ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def awaits(self, step: int) -> bool:
        return step in self._parts

    def layers_us(self, takes_us: int) -> Sequence[int]:
        return self._kv_link.layers_us(takes_us)

    def layer_done(self, step: int, layer: int) -> None:
        for part in self._parts[step]:
            self._send(part, 1, begins=layer == 0, ends=layer == self._kv_link.layers - 1)

    def step_done(self, step: int) -> None:
        self._parts.pop(step, None)

    def _send(self, part: _Part, layers: int, *, begins: bool, ends: bool) -> None:
        """Send `layers` layers of it; `begins` and `ends` say whether the first and the last layer are among them."""
        handover, kv_link = part.handover, self._kv_link
        if handover not in self._open:
            return
        receiver = self._transfers.receiver(handover.peer)
        size = part.blocks * kv_link.block_bytes * layers / kv_link.layers
        left_us = self.card.transmit(self._host.world.now_us, size)
        landed_us = receiver.card.transmit(left_us - size * 1e6 / kv_link.card_bytes_per_s, size) + kv_link.delay_us
        theirs = handover._replace(peer=self._name)
        if begins and part.blocks:
            receiver.host.at(round(landed_us), receiver.coming, theirs)
        if ends:
            receiver.host.at(round(landed_us), receiver.landed, theirs, part.blocks)
            if part.last:
                self._host.at(round(left_us), self._shipped, handover)

    def _shipped(self, handover: Handover) -> None:
        if handover in self._open:
            self._open.remove(handover)
            self._report(Shipped(handover, NO_CHECKS))
