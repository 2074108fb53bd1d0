"""KV that leaves the device and comes back, from host memory or a store or another executor: the tokens do not change."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.core.config import BringBack, ReservePolicy, TierConfig, WorkerConfig
from baton.core.handover.messages import Arriving, Handover, PeerEvent, PeerId, Shipped, Verified
from baton.executor.contract import Executor
from tests.support.driver import Driver, shape_of, submission
from tests.support.on_cuda import WAIT_S, StoringDriver, assert_alike, closing, layout_of, on_cuda
from tests.support.planner import Planner, generate

pytest.importorskip("xxhash", reason="objects and pieces of KV are checked by it")
pytestmark = pytest.mark.cuda

NAME = "tiny-qwen3"
CONFIG = WorkerConfig(
    slots=4, blocks=24, block_size=16, context_tokens=256, step_tokens=256, depth=2, reserve=ReservePolicy.NONE,
    tiers=TierConfig(host_rows=64, bring_back=BringBack.ALWAYS, transfer_blocks=4),
)  # fmt: skip
STORED = replace(CONFIG, tiers=replace(CONFIG.tiers, store=True))
ROOMY = replace(CONFIG, blocks=128, prefix_cache=False, tiers=TierConfig())
PROMPTS = [np.random.default_rng(seed).integers(0, 320, 60 + 20 * seed).tolist() for seed in range(4)]
NEW_TOKENS = 60
PRECISIONS = ("float32", "bfloat16, batch-invariant")


def build(config: WorkerConfig, precision: str) -> Executor:
    if precision == "float32":
        return on_cuda(NAME, shape_of(config))
    return on_cuda(NAME, shape_of(config), "bfloat16", invariant=True)


def answers(driver: Driver) -> list[list[int]]:
    serials = [driver.submit(submission(prompt, NEW_TOKENS))[0] for prompt in PROMPTS]
    driver.run()
    return [driver.outputs[serial] for serial in serials]


def undisturbed(precision: str) -> list[list[int]]:
    with closing(build(ROOMY, precision)) as executor:
        return answers(Driver(ROOMY, executor))


@contextmanager
def storing(config: WorkerConfig, precision: str, folder: Path | None = None) -> Iterator[StoringDriver]:
    from baton.kv.store import open_store

    with closing(build(config, precision)) as executor:
        driver = StoringDriver(config, executor, None if folder is None else open_store(f"file:{folder}"))
        yield driver
        driver.close()


def restored(driver: Driver) -> int:
    return sum(ended.bill.restored_tokens for ended in driver.ended.values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_preempted_comes_back_from_host_memory_and_goes_on(precision: str) -> None:
    with storing(CONFIG, precision) as driver:
        assert_alike(answers(driver), undisturbed(precision))
        assert restored(driver) > 0, f"nothing came back: {driver.orders}, {driver.worker.gauges()}"
        assert_alike(answers(driver), undisturbed(precision), "the second time")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_one_executor_stored_another_goes_on_from(precision: str, tmp_path: Path) -> None:
    wanted = undisturbed(precision)
    with storing(STORED, precision, tmp_path) as driver:
        assert_alike(answers(driver), wanted)
        assert driver.orders["Put"] > 0
    with storing(STORED, precision, tmp_path) as driver:
        assert_alike(answers(driver), wanted, "from the store")
        assert driver.orders["Get"] > 0
        assert restored(driver) > 0, f"nothing came back: {driver.orders}, {driver.worker.gauges()}"


GIVEN, TAKEN = Handover(PeerId("the taker"), 1, 1), Handover(PeerId("the giver"), 1, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("prompt", PROMPTS[:2], ids=len)
def test_a_prefill_that_is_handed_over_layer_by_layer_goes_on_elsewhere(
    kind: str, precision: str, prompt: list[int]
) -> None:
    with closing(build(ROOMY, precision)) as giver, closing(build(ROOMY, precision)) as taker:
        given = hand_over(kind, giver, taker, prompt)
    with closing(build(ROOMY, precision)) as executor:
        assert_alike([given], generate(executor, [prompt], 12))


def hand_over(kind: str, giver: Executor, taker: Executor, prompt: list[int]) -> list[int]:
    """Through mirrors in host memory; the tokens of both, one after the other."""
    from baton.kv.shared_memory import allocate_mirror, release_pool
    from baton.kv.transfer_contract import make_receiver, make_sender

    assert giver.kv.device is not None
    assert taker.kv.device is not None
    memories = [allocate_mirror(layout_of(executor), executor.kv.device) for executor in (giver, taker)]
    sent, got = queue.SimpleQueue[PeerEvent](), queue.SimpleQueue[PeerEvent]()
    sender, receiver = make_sender(kind, memories[0], sent.put), make_receiver(kind, memories[1], got.put)
    giver.on_layer = sender.layer_done
    giving, taking = Planner(giver, chunk_tokens=32), Planner(taker)
    taking.take_blocks(5)  # so that block ids differ on the two sides
    first = giving.add(prompt, 1)
    blocks = -(-len(prompt) // giver.shape.block_size)
    later = taking.add([*prompt, 0], 11, computed=len(prompt))
    receiver.expect(TAKEN, b"a token", 0, np.array(later.blocks[:blocks], np.int32))
    sender.open(GIVEN, receiver.address, b"a token", 0, np.array(first.blocks[:blocks], np.int32))
    for step, begin in enumerate(range(0, blocks, 2), start=1):
        sender.ship(GIVEN, step, begin, min(begin + 2, blocks), begin + 2 >= blocks)
        giving.take_step()
        sender.step_done(step)
    shipped = sent.get(timeout=WAIT_S)
    assert isinstance(shipped, Shipped), shipped
    receiver.verify(TAKEN, shipped.checks)
    while isinstance(event := got.get(timeout=WAIT_S), Arriving):
        pass
    assert event == Verified(TAKEN)
    start = taking.starts[0]
    tokens = np.array([*prompt, *first.outputs], dtype=np.int32)
    taking.starts[0] = replace(start, tokens=tokens, prompt_tokens=len(prompt))
    taking.run()
    sender.close()
    receiver.close()
    for memory in memories:
        release_pool(memory)
    return first.outputs + later.outputs
