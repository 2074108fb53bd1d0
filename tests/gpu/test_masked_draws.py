"""Constrained rows are drawn on the device with the tokens of the host, and steps with them are replayed as graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from baton.core.engine.request import Constraint, Sampling
from baton.executor.constraints.contract import Words, allowed_of, words_of
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource, fits
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.drafts import NaiveProposer, NgramProposer
from baton.executor.model_shapes import SHAPES
from baton.executor.sampling import Sampler
from tests.support.masks import wait_for_masks
from tests.support.on_cuda import assert_alike, closing, on_cuda
from tests.support.planner import Planner

pytestmark = pytest.mark.cuda

VOCABULARY, ROWS = 151_936, 48
CUTS: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 50, "min_p": 0.05}]
WISHES = [replace(Sampling(seed=row), **CUTS[row % len(CUTS)]) for row in range(ROWS)]
MODEL, SLOTS, NEW_TOKENS = "tiny-qwen3", 8, 24


def random_masks(seed: int) -> Words:
    """Of which one permits a single token."""
    masks = np.random.default_rng(seed).integers(0, 1 << 32, (ROWS, words_of(VOCABULARY)), dtype=np.uint32)
    masks[3] = 0
    masks[3, 77] = 1 << 5
    return masks


def on_host(logits: torch.Tensor, masks: Words, masked: list[int]) -> list[int]:
    """Where forbidden tokens have no logit, in the sampler without masks."""
    shaped = logits.clone()
    for row in masked:
        shaped[row][torch.from_numpy(~allowed_of(masks[row], VOCABULARY))] = float("-inf")
    sampler = Sampler(ROWS, VOCABULARY, torch.device("cpu"))
    for slot, wish in enumerate(WISHES):
        sampler.start(slot, np.array([1], np.int32), 1, wish)
    return sampler.sample(shaped, np.arange(ROWS, dtype=np.int32), np.full(ROWS, 9)).tokens.tolist()


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "as a graph"])
def test_masked_rows_of_a_real_vocabulary_are_drawn_as_the_host_draws_them(captured: bool) -> None:
    from baton.executor.cuda.masks import MaskTable, MaskUploads
    from baton.executor.cuda.sampling import DeviceSampler, SamplingMode

    device = torch.device("cuda")
    logits = torch.randn((ROWS, VOCABULARY), generator=torch.Generator().manual_seed(5)) * 4
    sampler = DeviceSampler(ROWS, VOCABULARY, ROWS, device)
    for slot, wish in enumerate(WISHES):
        sampler.start(slot, wish)
    uploads = MaskUploads(MaskTable.of(ROWS, VOCABULARY, ROWS, device), device)
    there, slots = logits.to(device), torch.arange(ROWS, dtype=torch.int32, device=device)
    positions, out = torch.full_like(slots, 9), torch.zeros_like(slots)

    def draw() -> None:
        sampler.draw(there, slots, positions, out, SamplingMode.CUTS, uploads.table)

    draw()
    graph = torch.cuda.CUDAGraph()
    if captured:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            draw()
    for seed in range(3):
        masks, masked = random_masks(seed), [row for row in range(ROWS) if (row + seed) % 3]
        uploads.send(masks[masked], np.array(masked), np.array(masked))
        there.copy_(logits)  # a draw applies its masks to them
        graph.replay() if captured else draw()
        uploads.done()
        given, wanted = out.tolist(), on_host(logits, masks, masked)
        assert given == wanted, [(row, WISHES[row]) for row in range(ROWS) if given[row] != wanted[row]]


@dataclass
class Taken:
    """How decodes were computed, and which steps the host drew."""

    replayed: int = 0
    plain: int = 0
    by_host: int = 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    from baton.executor.cuda.runner import LogitRows, ModelRunner
    from baton.executor.cuda.step import StepRunner

    noted, replayed, plain, by_host = Taken(), ModelRunner._replayed, ModelRunner._decode, StepRunner._draw_on_host

    def note_replayed(runner: ModelRunner, size: object) -> LogitRows:
        noted.replayed += isinstance(size, int)
        return replayed(runner, size)  # type: ignore[arg-type]

    def note_plain(runner: ModelRunner, sequences: int) -> LogitRows:
        noted.plain += 1
        return plain(runner, sequences)

    def note_host(stepper: StepRunner, *arguments: object) -> object:
        noted.by_host += 1
        return by_host(stepper, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "_replayed", note_replayed)
    monkeypatch.setattr(ModelRunner, "_decode", note_plain)
    monkeypatch.setattr(StepRunner, "_draw_on_host", note_host)
    return noted


@pytest.fixture(autouse=True)
def _masks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner of these tests counts a token a step."""
    wait_for_masks(monkeypatch)


SOURCES = [ScriptedSource(seed, int(str(SHAPES[MODEL]["vocab_size"]))).text() for seed in (3, 4)]


def mixed_wishes() -> list[Sampling]:
    """Every other one is constrained."""
    constraints = [Constraint("scripted", "1", source) for source in SOURCES]
    wishes = [replace(Sampling(seed=row), **CUTS[row % len(CUTS)]) for row in range(SLOTS)]
    return [replace(wish, constraint=constraints[row // 2 % 2]) if row % 2 else wish for row, wish in enumerate(wishes)]


def outputs_of(executor: Executor) -> list[list[int]]:
    planner = Planner(executor, depth=2)
    for row, wish in enumerate(mixed_wishes()):
        planner.add([row + 1, 7, row + 1, 7, row + 1], NEW_TOKENS, sampling=wish)
    return planner.run()


@pytest.mark.parametrize("burst", [1, 3], ids=["without drafts", "with drafts"])
def test_a_batch_half_constrained_replays_its_graphs_and_yields_the_tokens_of_the_host(
    taken: Taken, monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    from baton.executor.cuda.sampling import DeviceSampler

    shape = ExecutorShape(slots=SLOTS, blocks=64, block_size=16, context_tokens=128, burst=burst)
    proposer = NgramProposer(drafts=burst - 1, ngram_min=1, ngram_max=3) if burst > 1 else NaiveProposer()
    made = on_cuda(MODEL, shape, invariant=True, proposer=proposer, backends=lambda _: [ScriptedBackend()])
    with closing(made) as executor:
        taken.replayed = taken.plain = taken.by_host = 0
        given = outputs_of(executor)
        assert taken.by_host == 0
        assert taken.plain == 0, "every decode is a graph, whatever is beside it"
        assert taken.replayed >= (NEW_TOKENS - 1) // burst, "the first token is drawn from a chunk"
    made = on_cuda(MODEL, shape, invariant=True, proposer=proposer, backends=lambda _: [ScriptedBackend()])
    with closing(made) as executor:
        monkeypatch.setattr(DeviceSampler, "needs_host", lambda *_: True)
        wanted = outputs_of(executor)
        assert taken.by_host > 0
    assert_alike(given, wanted)
    for row in range(1, SLOTS, 2):
        assert fits(SOURCES[row // 2 % 2], given[row])


def test_rows_without_a_constraint_get_the_tokens_of_a_batch_without_constraints() -> None:
    shape = ExecutorShape(slots=SLOTS, blocks=64, block_size=16, context_tokens=128)
    with closing(on_cuda(MODEL, shape, invariant=True, backends=lambda _: [ScriptedBackend()])) as executor:
        mixed = outputs_of(executor)
    with closing(on_cuda(MODEL, shape, invariant=True)) as executor:
        planner = Planner(executor, depth=2)
        for row, wish in enumerate(mixed_wishes()):
            if not row % 2:
                planner.add([row + 1, 7, row + 1, 7, row + 1], NEW_TOKENS, sampling=wish)
        free = planner.run()
    assert_alike(mixed[::2], free)
