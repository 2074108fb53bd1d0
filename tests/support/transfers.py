"""Two pools and what a transfer reports about them; a line spoken by hand; a sender in a process of its own."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Arriving, Handover, PeerEvent, PeerId
from baton.kv.checksums import BlockChecksums, DeviceChecksums
from baton.kv.sender import SenderKind
from baton.kv.shared_memory import allocate_mirror, allocate_pool, pool_bytes, release_pool
from baton.kv.transfer_contract import (
    KINDS,
    KvLayout,
    KvMemory,
    ReceiverOptions,
    SenderOptions,
    available,
    make_receiver,
    make_sender,
)
from baton.kv.transfer_frames import TAKEN, WELCOME, encode_hello, encode_pieces
from baton.kv.transfer_mooncake import MooncakeSenderKind
from baton.kv.transfer_shm import ShmSenderKind
from baton.kv.transfer_tcp import TcpSenderKind
from tests.support.devices import DeviceLike

LAYOUT = KvLayout(b"a model", "float32", 4, (4096, 8192, 512, 12, 4096))
LAYERS = len(LAYOUT.layer_bytes)
GIVER_BLOCKS, TAKER_BLOCKS = 48, 64
WAIT_S = 30.0
TOKEN = b"a token of sixte"
HOST, DEVICE, SHARED_DEVICE = "in host memory", "on a device", "on a device that the taker reads"
PLACE = HOST
"""Where pairs and processes made from now on have their KV. For a test to set."""
ROOT = Path(__file__).parents[2]

Event = TypeVar("Event", bound=PeerEvent)


def usable_kinds() -> list[object]:
    """Each kind by its name, with each place where its KV may be; those that cannot work here are skipped and say why."""
    params = []
    for kind in KINDS:
        reason = available(kind)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        places = (HOST, DEVICE, SHARED_DEVICE) if kind == "shm" else (HOST, DEVICE)
        params += [pytest.param(kind, place, marks=marks, id=f"{kind}, {place}") for place in places]
    return params


class Reports:
    """What one side was told, in order."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self.seen: list[PeerEvent] = []

    def __call__(self, event: PeerEvent) -> None:
        self._events.put(event)

    def next(self, kind: type[Event], handover: Handover | None = None) -> Event:
        """The next event of this kind; others are remembered in `seen`, and an unexpected end fails at once."""
        while True:
            event = self._events.get(timeout=WAIT_S)
            self.seen.append(event)
            if isinstance(event, kind) and handover in (None, getattr(event, "handover", None)):
                return event
            assert isinstance(event, Arriving) or handover is not None, f"{event} instead of {kind.__name__}"

    def nothing_more(self) -> bool:
        return self._events.empty()


def giver_names(request: int, attempt: int = 1) -> Handover:
    return Handover(PeerId("the taker"), request, attempt)


def taker_names(request: int, attempt: int = 1) -> Handover:
    return Handover(PeerId("the giver"), request, attempt)


def make_pool(blocks: int, seed: int | None = None) -> KvMemory:
    memory = allocate_pool(LAYOUT, blocks)
    if seed is not None:
        memory.pool[:] = np.random.default_rng(seed).integers(0, 256, memory.pool.shape, dtype=np.uint8)
    return memory


def worked_on(memory: KvMemory, place: str) -> KvMemory:
    """What a transfer of this KV works on."""
    if place == HOST:
        return memory
    device = DeviceLike(memory.pool, memory.fd)
    return allocate_mirror(memory.layout, device, device if place == SHARED_DEVICE else None)


def ids(*blocks: int) -> Int32s:
    return np.array(blocks, dtype=np.int32)


def some_blocks(count: int, of: int, seed: int) -> Int32s:
    return np.random.default_rng(seed).permutation(of)[:count].astype(np.int32)


def checks_of(memory: KvMemory, first: int, blocks: Int32s) -> bytes:
    checks: BlockChecksums | DeviceChecksums = BlockChecksums(first, len(blocks), memory.spans, pool_bytes(memory))
    if PLACE == SHARED_DEVICE:
        checks = DeviceChecksums(first, len(blocks), memory.spans, DeviceLike(memory.pool))
    checks.add(range(LAYERS), first, blocks)
    return checks.digest()


def sender_kind_of(kind: str, memory: KvMemory) -> SenderKind:
    match kind:
        case "shm":
            return ShmSenderKind(memory)
        case "mooncake":
            return MooncakeSenderKind(memory, "127.0.0.1")
        case _:
            return TcpSenderKind()


class Pair:
    """P and D of one kind in this process."""

    def __init__(self, kind: str, receiver: ReceiverOptions | None = None, sender: SenderOptions | None = None) -> None:
        self.kind = kind
        self.giver, self.taker = make_pool(GIVER_BLOCKS, seed=1), make_pool(TAKER_BLOCKS)
        """The KV of each, wherever it lies."""
        self.sent, self.got = Reports(), Reports()
        self._memories = worked_on(self.giver, PLACE), worked_on(self.taker, PLACE)
        self.receiver = make_receiver(kind, self._memories[1], self.got, **(receiver or {}))
        self.sender = make_sender(kind, self._memories[0], self.sent, **(sender or {}))
        self._transport = sender_kind_of(kind, self.giver)  # so that what lines spoken by hand name outlives them

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._transport.close()
        for memory in (self.giver, self.taker, *self._memories):
            release_pool(memory)

    def arrived(self, sources: Int32s, targets: Int32s) -> bool:
        return bool((self.giver.pool[sources] == self.taker.pool[targets]).all())


@contextlib.contextmanager
def pair_of(kind: str, receiver: ReceiverOptions | None = None, sender: SenderOptions | None = None) -> Iterator[Pair]:
    pair = Pair(kind, receiver, sender)
    try:
        yield pair
    finally:
        pair.close()


class HandLine:
    """A line to a receiver, spoken by hand: it can say whatever it likes."""

    def __init__(self, kind: str, memory: KvMemory, address: str) -> None:
        self._kind = kind
        self._memory = memory
        self._transport = sender_kind_of(kind, memory)
        self.sock = self._transport.connect(address)
        self.sock.settimeout(WAIT_S)

    def hello(self, request: int, token: bytes, blocks: Int32s, digest: bytes = LAYOUT.digest) -> None:
        more, fds = self._transport.introduce(blocks)
        data = encode_hello(self._kind, giver_names(request), digest, token) + more
        if fds:
            socket.send_fds(self.sock, [data], fds)
        else:
            self.sock.sendall(data)

    def welcomed(self) -> bool:
        return self.sock.recv(1) == WELCOME

    def pieces(self, layers: range, first: int, blocks: Int32s, part: float = 1.0) -> None:
        """Announce, and where the bytes travel on the line send them, or the first part of them."""
        low, high = LAYOUT.spans[layers.start][0], LAYOUT.spans[layers.stop - 1][1]
        data = encode_pieces(layers, first, len(blocks))
        if self._transport.carries_bytes:
            data += self._memory.pool[blocks, low:high].tobytes()
        self.sock.sendall(data[: int(len(data) * part)])

    def hung_up_on(self) -> bool:
        """Waits for it."""
        try:
            while (said := self.sock.recv(1)) == TAKEN:
                pass
            return said == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.sock.close()
        self._transport.close()


class SenderProcess:
    """A sender in a process of its own, told what to do line by line; its pool is `make_pool(GIVER_BLOCKS, seed=1)`."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.transfers", kind, PLACE],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, method: str, *arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> tuple[str, str]:
        """(name of the event, checks or reason)."""
        assert self._process.stdout is not None
        name, what = json.loads(self._process.stdout.readline())
        return name, what

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _serve(kind: str, place: str) -> None:
    """The child's side of SenderProcess."""

    def tell(event: PeerEvent) -> None:
        what = getattr(event, "checks", b"").hex() or getattr(event, "reason", "")
        sys.stdout.write(json.dumps([type(event).__name__, what]) + "\n")
        sys.stdout.flush()

    sender = make_sender(kind, worked_on(make_pool(GIVER_BLOCKS, seed=1), place), tell)
    for line in sys.stdin:
        match json.loads(line):
            case ["open", int(request), str(address), str(token), int(first), list(blocks)]:
                sender.open(giver_names(request), address, bytes.fromhex(token), first, ids(*blocks))
            case ["ship", int(request), step, int(first), int(upto), bool(last)]:
                sender.ship(giver_names(request), step, first, upto, last)
            case ["layer_done", int(step), int(layer)]:
                sender.layer_done(step, layer)
    sender.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
