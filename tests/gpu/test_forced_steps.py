"""Tokens that grammars force are drafts on the device: fewer steps, each a graph, and the tokens of steps without drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.engine.request import Sampling
from baton.executor.contract import ExecutorShape
from baton.executor.drafts import NaiveProposer, NgramProposer
from baton.executor.model_shapes import SHAPES
from tests.support.forced_runs import BLOCKS, Answer, RunsBackend, StepsByHand, runs
from tests.support.masks import wait_for_masks
from tests.support.on_cuda import closing, on_cuda

pytestmark = pytest.mark.cuda

MODEL, SLOTS, STEPS = "tiny-qwen3", 8, 5
SHAPE = ExecutorShape(slots=SLOTS, blocks=SLOTS * BLOCKS, block_size=16, context_tokens=64)
VOCABULARY = int(str(SHAPES[MODEL]["vocab_size"]))
CUTS: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.05}]


@pytest.fixture(autouse=True)
def _masks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_masks(monkeypatch)


def asked() -> list[Answer]:
    """Every other one is constrained."""
    answers = []
    for slot in range(SLOTS):
        constraint = runs(slot, VOCABULARY, 5 + slot) if slot % 2 else None
        wish = Sampling(seed=slot, constraint=constraint, **CUTS[slot // 2 % len(CUTS)])  # type: ignore[arg-type]
        answers.append(Answer(slot, [slot + 1, 7, slot + 1, 7, slot + 1], 64, wish))
    return answers


def answered(constrained_burst: int, burst: int, invariant: bool, taken: list[str]) -> list[Answer]:
    """With a preemption in between; then a request without a constraint has the slot of the one that was preempted."""
    proposer = NgramProposer(drafts=burst - 1, ngram_min=1, ngram_max=3) if burst > 1 else NaiveProposer()
    shape = replace(SHAPE, burst=burst, constrained_burst=constrained_burst)
    made = on_cuda(MODEL, shape, invariant=invariant, proposer=proposer, backends=lambda _: [RunsBackend()])
    answers, steps = asked(), STEPS if constrained_burst else 5 * STEPS
    with closing(made) as executor:
        taken.clear()
        by_hand = StepsByHand(executor)
        by_hand.begin(*answers[:-1])
        by_hand.decode(steps)
        moved = by_hand.preempt(1)
        moved.slot = SLOTS - 1
        answers[-1] = Answer(1, [3, 4, 5], 64, Sampling(seed=77, temperature=0.9))
        by_hand.begin(moved, answers[-1])
        by_hand.decode(steps)
        by_hand.drain()
    return answers


@pytest.mark.parametrize("burst", [1, 3], ids=["without n-grams", "with n-grams"])
@pytest.mark.parametrize("invariant", [True, False], ids=["batch-invariant", "usual"])
def test_forced_tokens_take_fewer_steps_and_are_the_same(
    monkeypatch: pytest.MonkeyPatch, burst: int, invariant: bool
) -> None:
    from baton.executor.cuda.drafted_runner import DraftedRunner
    from baton.executor.cuda.runner import LogitRows

    taken, decode, replayed = list[str](), DraftedRunner._decode, DraftedRunner._replayed

    def note_decode(runner: DraftedRunner, sequences: int) -> LogitRows:
        taken.append("kernel by kernel")
        return decode(runner, sequences)

    def note_replayed(runner: DraftedRunner, size: object) -> LogitRows:
        if isinstance(runner, DraftedRunner):
            taken.append("graph")
        return replayed(runner, size)  # type: ignore[arg-type]

    monkeypatch.setattr(DraftedRunner, "_decode", note_decode)
    monkeypatch.setattr(DraftedRunner, "_replayed", note_replayed)
    wanted = answered(0, burst, invariant, taken)
    assert not taken, "without forced drafts there is no such runner"
    given = answered(8, burst, invariant, taken)
    assert set(taken) == {"graph"}
    for ours, theirs in zip(given, wanted, strict=True):
        both = min(len(ours.outputs), len(theirs.outputs))
        if invariant:
            assert ours.outputs[:both] == theirs.outputs[:both]
        if ours.wish.constraint is None:
            assert max(ours.bursts) <= burst
            continue
        assert len(ours.outputs) > 2 * len(ours.bursts), "most of its tokens are forced"
        matcher = RunsBackend().compile(ours.wish.constraint.source).matcher()
        assert all(matcher.consume(token) for token in ours.outputs)
