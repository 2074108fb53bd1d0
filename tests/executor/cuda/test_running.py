"""A step of decodes, from the slots to the logits, gives what `transformers` gives for the same tokens; with drafts too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from tests.support.attending import HostPool

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from transformers import AutoModelForCausalLM

from baton.executor.contract import ExecutorShape
from baton.executor.cuda import fuse
from baton.executor.cuda.chunks import NO_CHUNKS, MixedSize
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.runner import ModelRunner
from baton.executor.dummy_weights import draw_weights
from baton.executor.model_loading import load_shape, shape_config
from baton.executor.slot_table import NO_BLOCK

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # by the interpreter
    # Rows of nobody hold whatever the memory held: a GPU says nothing then.
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a device the executor's tests run the same kernels"),
]

CPU = torch.device("cpu")
SEQUENCES = ([7, 3, 250, 3, 99, 120], [11, 12, 13, 14, 15, 16])
SLOTS, BLOCK_SIZE = 3, 4


@dataclass(frozen=True)
class HostSlots:
    """Rows as `DeviceSlots` has them: the sequences in slots 2 and 0, whose blocks are mixed, and a spare one."""

    spare: int
    tokens: torch.Tensor
    tables: torch.Tensor
    known: torch.Tensor
    limits: torch.Tensor


def slots_with_all_tokens() -> HostSlots:
    tokens = torch.zeros(SLOTS + 1, 20, dtype=torch.int32)
    tables = torch.full((SLOTS + 1, 5), NO_BLOCK, dtype=torch.int32)
    for slot, sequence, blocks in zip((2, 0), SEQUENCES, ([5, 1], [0, 3]), strict=True):
        tokens[slot, : len(sequence)] = torch.tensor(sequence)
        tables[slot, : len(blocks)] = torch.tensor(blocks)
    ones = torch.ones(SLOTS + 1, dtype=torch.int32)
    return HostSlots(SLOTS, tokens, tables, ones, 16 * ones)


@pytest.fixture(autouse=True)
def _in_host_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fuse, "CudaPool", HostPool)
    with torch.inference_mode():
        yield


def runner_on(name: str, slots: HostSlots, burst: int, invariant: bool) -> ModelRunner:
    loaded, bench = load_shape(name, "float32"), ProductScratch(CPU, invariant)
    fuse.fuse_for_cuda(loaded, bench, 32)
    shape = ExecutorShape(SLOTS, 6, BLOCK_SIZE, 16, burst)
    pool = HostPool(loaded.layers, 6, BLOCK_SIZE, loaded.dtype, CPU)
    made = ModelRunner(loaded, shape, slots, pool, bench, step_tokens=16)  # type: ignore[arg-type]
    made.decode_slots.copy_(torch.tensor([2, SLOTS, 0]))  # a row of nobody between two of somebody
    return made


def of_transformers(name: str) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.float32, attn_implementation="eager")
    draw_weights(model, 0)
    return [model.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in SEQUENCES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "invariant"), [("tiny-qwen3", False), ("tiny-gemma2", False), ("tiny-llama", True)])
def test_decodes_one_token_at_a_time_give_the_logits_of_the_whole(name: str, invariant: bool) -> None:
    slots, wanted = slots_with_all_tokens(), of_transformers(name)
    runner = runner_on(name, slots, 1, invariant)
    for position in range(len(SEQUENCES[0])):
        slots.known.fill_(position + 1)
        drawn = runner.decode(3)
        assert drawn.positions[[0, 2]].tolist() == [position + 1] * 2
        for row, right in ((0, wanted[0]), (2, wanted[1])):
            assert float((drawn.logits[row] - right[position]).abs().max()) < 1e-4, f"row {row}, position {position}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "invariant"), [("tiny-qwen3", False), ("tiny-gemma2", True)])
def test_decodes_with_drafts_give_the_logits_behind_each_of_them(name: str, invariant: bool) -> None:
    slots, wanted = slots_with_all_tokens(), of_transformers(name)
    runner = runner_on(name, slots, 3, invariant)
    drafts, counts = runner.drafts.view(SLOTS, 2), (2, 1)
    for position in (0, 3):  # a draft more than one of them has: that row is fed nothing
        slots.known.fill_(position + 1)
        for row, sequence, count in zip((0, 2), SEQUENCES, counts, strict=True):
            drafts[row] = torch.tensor(sequence[position + 1 : position + 3])
            runner.draft_counts[row] = count
        drawn = runner.decode(3)
        assert runner.fed.tolist() == [3, 0, 2]
        for row, right, count in zip((0, 2), wanted, counts, strict=True):
            given = drawn.logits[3 * row : 3 * row + 1 + count]
            assert float((given - right[position : position + 1 + count]).abs().max()) < 1e-4, f"row {row}"
        if position == 0:  # the position that one of them was not fed
            slots.known.fill_(3)
            runner.draft_counts.zero_()
            runner.decode(3)


class Captures:
    """In place of CUDA's: counts what is captured and replayed. The one whose turn is `fails_at` cannot be captured."""

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.captured, self.replayed = 0, 0
        self.pools: list[object] = []

    def replay(self) -> None:
        self.replayed += 1

    def pool(self) -> object:
        return "the one pool"

    @contextmanager
    def capturing(self, _: object, pool: object) -> Iterator[None]:
        yield
        self.pools.append(pool)
        if self.captured == self.fails_at:
            raise RuntimeError("asks the host\nin the middle")
        self.captured += 1


MIXED = [MixedSize(8, 0), MixedSize(8, 2), MixedSize(16, 0)]


def captured_runner(monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> tuple[ModelRunner, Captures]:
    captures = Captures(fails_at)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: captures)
    monkeypatch.setattr(torch.cuda, "graph", captures.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = runner_on("tiny-llama", slots_with_all_tokens(), 1, False)
    runner.capture([1, 2])
    runner.capture_mixed(MIXED)
    return runner, captures


@pytest.mark.slow
def test_captured_steps_share_memory_and_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, captures = captured_runner(monkeypatch)
    assert captures.pools == [None] + ["the one pool"] * 4
    assert (runner.bucket(1), runner.bucket(2), runner.bucket(3)) == (1, 2, 3)
    assert len(runner.decode(2).logits) == 2
    drawn = []
    for chunks, tokens, decodes in ((3, 9, 0), (1, 1, 1), (2, 8, 0)):
        size = runner.mixed_size(chunks, tokens, decodes)
        assert size is not None
        drawn.append(runner.mixed_filled(size, torch.from_numpy(runner.frame(size).fill(NO_CHUNKS))))
    assert captures.replayed == 4
    assert [len(each.slots) for each in drawn] == [len(each.logits) for each in drawn] == [SLOTS, SLOTS + 2, SLOTS]
    assert len({each.logits.data_ptr() for each in drawn}) == 1
    assert not float(abs(sum(layer.keys.sum() for layer in runner._pool.layers))), "capturing writes nowhere"
    for unfit in ((SLOTS + 1, 8, 0), (1, 17, 0), (1, 9, 1), (1, 8, 3)):
        assert runner.mixed_size(*unfit) is None


@pytest.mark.slow
def test_what_cannot_be_captured_runs_kernel_by_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner, captures = captured_runner(monkeypatch, fails_at=3)
    assert "steps with chunks run kernel by kernel: they cannot be captured (asks the host)" in caplog.text
    assert runner.mixed_size(1, 8, 0) is None
    runner.decode(2)
    assert captures.replayed == 1, "decodes are still captured"
