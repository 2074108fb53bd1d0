"""Tokens that grammars force are drafts on the device: fewer steps, the same tokens, whatever is beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

import triton
from tests.support.forced_runs import BLOCKS, Answer, RunsBackend, StepsByHand, runs, undisturbed
from tests.support.no_device import pretend_a_device

from baton.core.engine.plan import Int32s, RowOutcome
from baton.core.engine.request import Sampling
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.slot_matchers import Bools, SlotMatchers
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cuda.chunks import MixedSize
from baton.executor.cuda.drafted_runner import mixed_row_sizes, row_sizes, rows_most
from baton.executor.cuda.executor import TorchCudaExecutor
from baton.executor.cuda.forced_tokens import ForcedPlan, ForcedTokens
from baton.executor.cuda.kernels_forced import propose_forced
from baton.executor.cuda.runner import LogitRows, ModelRunner
from baton.executor.drafts import NgramProposer
from baton.executor.model_loading import load_shape
from baton.executor.model_shapes import SHAPES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device; tests/gpu runs the executor on it"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
]

MODEL = "tiny-llama"
SHAPE = ExecutorShape(slots=4, blocks=4 * BLOCKS, block_size=16, context_tokens=64, constrained_burst=8)
PROPOSER = NgramProposer(drafts=2, ngram_min=1, ngram_max=3)
VOCABULARY = int(str(SHAPES[MODEL]["vocab_size"]))
CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 1, 2, 3, 1]
DRAWN = Sampling(seed=5, temperature=0.7, top_p=0.9, constraint=runs(3, VOCABULARY, 6))
GREEDY = Sampling(seed=6, temperature=0.0, constraint=runs(4, VOCABULARY, 11))
FREE = Sampling(seed=7, temperature=0.9, top_p=0.9)
HOT = Sampling(seed=8, temperature=1.3, top_k=30)


@pytest.fixture
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch, [MixedSize(32, 0), MixedSize(32, 4), MixedSize(32, 32)])


def asked() -> list[Answer]:
    return [
        Answer(0, PROMPT, len(PROMPT) + 40, DRAWN),
        Answer(1, [5, 6, 5, 6, 5], 60, FREE),
        Answer(3, [9, 8, 7], 3 + 20, GREEDY),
        Answer(0, PROMPT, 60, HOT),
    ]


@pytest.fixture
def wanted() -> list[list[int]]:
    """One token a step, on the CPU."""
    thread, constraints = ThreadPoolExecutor(max_workers=1), CompiledConstraints([RunsBackend()])
    shape = replace(SHAPE, constrained_burst=0)
    executor = TorchCpuExecutor(load_shape(MODEL, "float32"), shape, b"", None, thread, constraints=constraints)
    found = undisturbed(executor, asked())
    executor.close()
    return found


def on_device(shape: ExecutorShape = SHAPE, *, invariant: bool = True) -> Executor:
    return TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), shape, step_tokens=64, proposer=PROPOSER, batch_invariant=invariant,
        backends=lambda _: [RunsBackend()],
    )  # fmt: skip


def assert_begins(answers: list[Answer], wanted: list[list[int]]) -> None:
    for nth, (answer, tokens) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.outputs == tokens[: len(answer.outputs)], f"the {nth}. request"


@pytest.mark.usefixtures("_without_a_device")
@pytest.mark.parametrize(
    ("burst", "invariant"),
    [(1, True), pytest.param(3, True, marks=pytest.mark.slow), pytest.param(1, False, marks=pytest.mark.slow)],
    ids=["alone", "and n-grams", "not batch-invariant"],
)
def test_forced_tokens_take_fewer_steps_and_are_the_same(wanted: list[list[int]], burst: int, invariant: bool) -> None:
    executor = on_device(replace(SHAPE, burst=burst), invariant=invariant)
    by_hand = StepsByHand(executor)
    drawn, free, greedy, next_one = asked()
    by_hand.begin(drawn, free, greedy)
    by_hand.decode(4)
    assert by_hand.preempt(0) is drawn
    before = len(drawn.bursts)
    assert len(drawn.outputs) > 2 * before, "of seven tokens six are forced"
    drawn.slot = 2
    by_hand.begin(drawn, next_one)
    by_hand.decode(4)
    by_hand.drain()
    executor.close()
    assert_begins([drawn, free, greedy, next_one], wanted)
    assert len(greedy.outputs) == 20, "it came to its limit, in the middle of drafts"
    assert len(drawn.outputs) - sum(drawn.bursts[:before]) > 2 * (len(drawn.bursts) - before), "after its restart too"
    for answer in (free, next_one):
        assert max(answer.bursts) <= burst, "nothing is forced without a constraint, also in a slot that had one"
    assert drawn.bursts[:5] == [1, 1, 6, 1, 6], "a free one; the first that is forced; the five behind it and a free one"


@pytest.mark.slow
@pytest.mark.usefixtures("_without_a_device")
def test_a_row_that_sits_out_keeps_what_is_forced_for_it(monkeypatch: pytest.MonkeyPatch, wanted: list[list[int]]) -> None:
    turns = 0

    def late(self: SlotMatchers, slots: Int32s, patient: Bools, **_: object) -> Bools:
        """Every third time."""
        nonlocal turns
        turns += 1
        return self.held[slots] & patient & (turns % 3 == 0)

    monkeypatch.setattr(SlotMatchers, "late", late)
    executor = on_device()
    by_hand = StepsByHand(executor)
    drawn, free, greedy, _ = asked()
    by_hand.begin(drawn, free, greedy)
    by_hand.decode(6)
    by_hand.drain()
    executor.close()
    assert_begins([drawn, free, greedy], wanted[:3])
    assert sum(int((result.outcomes == RowOutcome.SAT_OUT).sum()) for result in by_hand.results) >= 2
    assert len(drawn.outputs) > 2 * len(drawn.bursts)
    assert set(free.bursts) == {1}, "it waits for nobody"


@pytest.mark.slow
@pytest.mark.usefixtures("_without_a_device")
def test_a_step_of_the_hosts_sampler_drafts_nothing_that_is_forced_and_the_next_one_does(wanted: list[list[int]]) -> None:
    executor = on_device()
    by_hand = StepsByHand(executor)
    drawn, _, greedy, _ = asked()
    by_hand.begin(drawn, greedy)
    by_hand.decode(1)
    by_hand.begin(Answer(1, [4, 4], 20, Sampling(seed=9, presence_penalty=0.5)))
    by_hand.decode(1)
    by_hand.preempt(1)
    by_hand.decode(4)
    by_hand.drain()
    executor.close()
    assert_begins([drawn, greedy], [wanted[0], wanted[2]])
    assert drawn.bursts[:4] == [1, 1, 1, 1], "two of the device, two of the host"
    assert drawn.bursts[4:8] == [4, 1, 6, 1], (
        "what the host has drawn is no longer ahead: three of six are left, then a free one"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_without_a_device")
def test_a_batch_without_constraints_runs_as_if_nothing_could_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    decode = ModelRunner.decode

    def noted(runner: ModelRunner, sequences: int) -> LogitRows:
        taken.append(f"{type(runner).__name__} {sequences} × {runner.queries}")
        return decode(runner, sequences)

    monkeypatch.setattr(ModelRunner, "decode", noted)
    executor = on_device()
    by_hand = StepsByHand(executor)
    _, free, _, other = asked()
    by_hand.begin(free, other)
    by_hand.decode(2)
    by_hand.drain()
    executor.close()
    assert taken == ["ModelRunner 2 × 1"] * 2


PLANNED = 10


def drafts_of(sequence: list[int], plan: tuple[int, list[int]] | None, room: int, others: list[int]) -> list[int]:
    """What the kernel proposes for one slot."""
    most = 4

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    tokens = torch.full((2, 24), -7, dtype=torch.int32)
    tokens[1, : len(sequence)] = ints(*sequence)
    plans = torch.zeros((2, 2 + PLANNED), dtype=torch.int32)
    if plan is not None:
        plans[1, : 2 + len(plan[1])] = ints(plan[0], len(plan[1]), *plan[1])
    drafts, counts = torch.full((most,), -1, dtype=torch.int32), ints(-1)
    other = ints(*others, *[0] * (2 - len(others)))
    propose_forced[(1,)](
        ints(1), tokens, ints(1, len(sequence)), plans, ints(plan is not None), ints(room), other, ints(len(others)), drafts,
        counts, tokens.stride(0), plans.stride(0), PLANNED=triton.next_power_of_2(PLANNED), OTHERS=2, DRAFTS=most,
        DRAFTS_PADDED=triton.next_power_of_2(most), num_warps=1,
    )  # fmt: skip
    count = int(counts[0])
    assert drafts[count:].tolist() == [0] * (most - count)
    return drafts[:count].tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_drafts_are_what_is_left_of_a_plan_that_came_true_so_far(data: st.DataObject) -> None:
    sequence = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=12))
    others = data.draw(st.lists(st.integers(3, 4), max_size=2))
    room = data.draw(st.integers(0, 4))
    planned = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=PLANNED))
    base = data.draw(st.integers(0, len(sequence) + 1))
    since = sequence[base:]
    left = planned[len(since) :] if base <= len(sequence) and planned[: len(since)] == since else []
    assert drafts_of(sequence, (base, planned), room, others) == (left or others)[:room]
    assert drafts_of(sequence, None, room, others) == others[:room]


@pytest.mark.usefixtures("_without_a_device")
def test_rows_are_given_out_until_there_are_no_more() -> None:
    forced = ForcedTokens(replace(SHAPE, burst=2), CPU)
    layout = forced.lay_out(np.array([0, 7, 3, 1, 7], np.int32), rows_max=19)
    assert layout.rooms.tolist() == [1, 7, 3, 1, 2], "nine of nineteen rows are left for what is forced"
    assert layout.first_rows.tolist() == [0, 2, 10, 14, 16]
    assert layout.cells.tolist() == [0, 1, *range(8, 16), *range(16, 20), 24, 25, 32, 33, 34]


@pytest.mark.usefixtures("_without_a_device")
def test_a_plan_is_of_one_request() -> None:
    forced, slots = ForcedTokens(SHAPE, CPU), np.array([0, 1, 4], dtype=np.int32)
    forced.send([ForcedPlan(0, 9, [5, 6, 7], 2), ForcedPlan(1, 3, [8], 0)])
    assert forced.left(slots).tolist() == [2, 0, 0]
    assert forced.plans[0, :5].tolist() == [9, 3, 5, 6, 7]
    forced.send([ForcedPlan(0, 12, list(range(40)), 39)])
    assert forced.left(slots).tolist() == [7, 0, 0], "as many as a decode may have drafts"
    assert forced.plans[0, :2].tolist() == [12, forced.tokens_max]
    forced.start(0)
    assert forced.left(slots).tolist() == [0, 0, 0]


def test_steps_are_captured_for_numbers_of_rows() -> None:
    assert rows_most(SHAPE) == 4 * 8
    assert rows_most(replace(SHAPE, slots=256)) == 256 + 128, "no more than cost little beside reading weights"
    assert row_sizes(32) == [8, 16, 32]
    assert mixed_row_sizes(128, 384) == [MixedSize(tokens, rows) for tokens in (64, 128) for rows in (64, 384)]
