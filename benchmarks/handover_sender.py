"""The sending process of `benchmarks.handover`: sends KV on request and reports when it began.

Its orders are lines of JSON on standard input, its answers lines on standard output. Both processes read the same monotonic
clock, so a transfer is timed from the order to ship here to the last byte over there.
"""

from __future__ import annotations

import queue
import socket
import sys
import time

import msgspec
import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Handover, PeerEvent, PeerId, Shipped
from baton.kv.shared_memory import allocate_pool
from baton.kv.transfer_contract import KvLayout, KvMemory, Sender, make_sender

TOKEN = b"for measuring it"
ANSWER_S = 60.0
SOCKET_CALL_BYTES = 1 << 20


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Create a pool of this size."""

    layer_bytes: int
    layers: int
    blocks: int


class Send(msgspec.Struct, tag="send", frozen=True):
    kind: str
    verified: bool
    address: str
    request: int


class SendBare(msgspec.Struct, tag="bare", frozen=True):
    """Send the same bytes through a plain socket."""

    port: int


class Sent(msgspec.Struct, frozen=True):
    began_s: float
    checks: bytes = b""
    failure: str = ""


Order = Begin | Send | SendBare


def layout_of(layer_bytes: int, layers: int) -> KvLayout:
    return KvLayout(b"measured", "bytes", 16, (layer_bytes,) * layers)


def filled_pool(layer_bytes: int, layers: int, blocks: int) -> KvMemory:
    """A pool with every page written, as in service."""
    memory = allocate_pool(layout_of(layer_bytes, layers), blocks)
    memory.pool[:] = np.arange(memory.layout.block_bytes, dtype=np.uint32).astype(np.uint8)
    memory.pool[:, 0] = np.arange(blocks, dtype=np.uint32).astype(np.uint8)
    return memory


def scattered(blocks: int, seed: int) -> Int32s:
    """All blocks of a pool in random order, as in a pool long in use."""
    return np.random.default_rng(seed).permutation(blocks).astype(np.int32)


class KvSender:
    def __init__(self, begin: Begin) -> None:
        self._memory = filled_pool(begin.layer_bytes, begin.layers, begin.blocks)
        self._blocks = scattered(begin.blocks, seed=1)
        self._senders: dict[tuple[str, bool], tuple[Sender, queue.SimpleQueue[PeerEvent]]] = {}
        self._step = 0

    def send(self, order: Send) -> Sent:
        """Send layer by layer, as if a step computed them in no time."""
        sender, events = self._sender(order.kind, order.verified)
        handover = Handover(PeerId("receiver"), order.request, 1)
        self._step += 1
        sender.open(handover, order.address, TOKEN, 0, self._blocks)
        began_s = time.monotonic()
        sender.ship(handover, self._step, 0, len(self._blocks), True)
        for layer in range(len(self._memory.spans)):
            sender.layer_done(self._step, layer)
        sender.step_done(self._step)
        event = events.get(timeout=ANSWER_S)
        if isinstance(event, Shipped):
            return Sent(began_s, event.checks)
        return Sent(began_s, failure=str(event))

    def send_bare(self, order: SendBare) -> Sent:
        data = self._memory.pool.data.cast("B")
        with socket.create_connection(("127.0.0.1", order.port)) as sock:
            began_s = time.monotonic()
            for at in range(0, len(data), SOCKET_CALL_BYTES):
                sock.sendall(data[at : at + SOCKET_CALL_BYTES])
        return Sent(began_s)

    def _sender(self, kind: str, verified: bool) -> tuple[Sender, queue.SimpleQueue[PeerEvent]]:
        if (kind, verified) not in self._senders:
            events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
            self._senders[kind, verified] = self._make(kind, events, verified), events
        return self._senders[kind, verified]

    def _make(self, kind: str, events: queue.SimpleQueue[PeerEvent], verified: bool) -> Sender:
        # layers that are ready together would go as one piece, and nothing like it is done by what we compare with
        return make_sender(kind, self._memory, events.put, verified=verified, run_layers_max=1)

    def close(self) -> None:
        for sender, _ in self._senders.values():
            sender.close()


def main() -> None:
    sender: KvSender | None = None
    for line in sys.stdin.buffer:
        match msgspec.json.decode(line, type=Order):
            case Begin() as begin:
                sender = KvSender(begin)
                answer = Sent(time.monotonic())
            case Send() as order if sender is not None:
                answer = sender.send(order)
            case SendBare() as bare if sender is not None:
                answer = sender.send_bare(bare)
            case _:
                answer = Sent(time.monotonic(), failure="nothing has begun")
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    if sender is not None:
        sender.close()


if __name__ == "__main__":
    main()
