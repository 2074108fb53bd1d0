"""KV from a device to a device, between two processes: through mirrors, and past them where both are on one device."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.handover.messages import Arriving, Handover, PeerEvent, PeerId, Shipped, Verified
from baton.executor.cuda.blocks import CudaBlocks
from baton.kv.shared_memory import allocate_mirror, release_pool
from baton.kv.transfer_contract import KvLayout, KvMemory, make_receiver, make_sender

pytest.importorskip("xxhash", reason="checks of pieces in host memory need it")
pytestmark = pytest.mark.cuda

ROOT = Path(__file__).parents[2]
LAYOUT = KvLayout(b"a model", "uint8", 16, (65_536,) * 36)
BLOCKS, SENT, STEPS = 96, 64, 4
TOKEN, WAIT_S = b"a token", 60.0
SOURCES = np.random.default_rng(1).permutation(BLOCKS)[:SENT].astype(np.int32)
TARGETS = np.random.default_rng(2).permutation(BLOCKS)[:SENT].astype(np.int32)
GIVEN, TAKEN = Handover(PeerId("the taker"), 1, 1), Handover(PeerId("the giver"), 1, 1)


def pool_of(seed: int) -> torch.Tensor:
    words = torch.randint(-(2**62), 2**62, (BLOCKS, LAYOUT.block_bytes // 8), generator=torch.Generator().manual_seed(seed))
    return words.cuda().view(torch.uint8)


def memory_of(pool: torch.Tensor, shared: bool) -> KvMemory:
    device = CudaBlocks(pool)
    return allocate_mirror(LAYOUT, device, device if shared else None)


@contextmanager
def giver_process(kind: str, shared: bool, address: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.test_handover", kind, str(int(shared)), address],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.communicate("over\n")


@pytest.mark.parametrize(
    ("kind", "shared"), [("shm", True), ("shm", False), ("tcp", True)], ids=["device to device", "mirrors", "tcp"]
)
def test_all_that_a_prefill_computed_is_on_the_other_device(kind: str, shared: bool) -> None:
    pool, events = torch.zeros(BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8, device="cuda"), queue.SimpleQueue[PeerEvent]()
    torch.cuda.synchronize()
    memory = memory_of(pool, shared)
    receiver = make_receiver(kind, memory, events.put)
    receiver.expect(TAKEN, TOKEN, 0, TARGETS)
    with giver_process(kind, shared, receiver.address) as process:
        assert process.stdout is not None
        receiver.verify(TAKEN, bytes.fromhex(process.stdout.readline()))
        while isinstance(event := events.get(timeout=WAIT_S), Arriving):
            pass
        assert event == Verified(TAKEN)
    wanted = torch.zeros_like(pool)
    wanted[TARGETS.tolist()] = pool_of(7)[SOURCES.tolist()]
    assert torch.equal(pool, wanted)
    receiver.close()
    release_pool(memory)


def _give(kind: str, shared: bool, address: str) -> None:
    """The other process: steps that write a layer after the other, each shipped as it is there."""
    events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
    computed, pool = pool_of(7), torch.zeros(BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    sender = make_sender(kind, memory_of(pool, shared), events.put)
    sender.open(GIVEN, address, TOKEN, 0, SOURCES)
    for step in range(1, STEPS + 1):
        first, upto = (step - 1) * SENT // STEPS, step * SENT // STEPS
        sender.ship(GIVEN, step, first, upto, step == STEPS)
        blocks = SOURCES[first:upto].tolist()
        for layer, (begin, end) in enumerate(LAYOUT.spans):
            pool[blocks, begin:end] = computed[blocks, begin:end]
            written = torch.cuda.Event()
            written.record()
            written.synchronize()
            sender.layer_done(step, layer)
        sender.step_done(step)
    shipped = events.get(timeout=WAIT_S)
    assert isinstance(shipped, Shipped), shipped
    sys.stdout.write(shipped.checks.hex() + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    _give(sys.argv[1], bool(int(sys.argv[2])), sys.argv[3])
