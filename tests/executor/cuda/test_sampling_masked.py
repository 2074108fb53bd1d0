"""Rows with a mask are drawn on the device as the host's sampler draws them, beside rows without one."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from msgspec.structs import replace

from baton.core.engine.request import Constraint, Sampling
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import Words, allowed_of, words_of
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource
from baton.executor.cuda.masks import NO_MASK, MaskTable, permit_something
from baton.executor.cuda.sampling import DeviceSampler, SamplingMode
from baton.executor.drafts import drafts_of
from baton.executor.sampling import Sampler

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, CHUNK = 150, 64
"""The last word of a mask is not full, and neither is the last chunk."""
OPEN = Constraint("scripted", "1", ScriptedSource(5, VOCABULARY, (3,)).text())
FORCED = Constraint("scripted", "1", ScriptedSource(6, VOCABULARY, (3,)).text())
"""Of which the first permits about half of the tokens at the beginning, the second one token."""
WISHES = [
    Sampling(seed=1, temperature=0.0, constraint=OPEN),
    Sampling(seed=2, temperature=0.0),
    Sampling(seed=3, temperature=1.0, constraint=OPEN),
    Sampling(seed=4, temperature=0.8, top_k=7, constraint=OPEN),
    Sampling(seed=5, temperature=1.2, top_p=0.7),
    Sampling(seed=6, temperature=1.2, top_p=0.7, constraint=OPEN),
    Sampling(seed=7, temperature=0.9, top_k=90, top_p=0.9, min_p=0.02, constraint=OPEN),
    Sampling(seed=8, temperature=1.0, top_k=5, constraint=FORCED),
    Sampling(seed=9, temperature=0.0, constraint=FORCED),
]


def mask_of(constraint: Constraint, *outputs: int) -> Words:
    matcher = ScriptedBackend().compile(constraint.source).matcher()
    assert all(matcher.consume(token) for token in outputs)
    words = np.zeros(words_of(VOCABULARY), dtype=np.uint32)
    matcher.mask(words)
    return words


def table_of(masks: list[Words | None], rows_max: int) -> MaskTable:
    """The masks at the entries of a table in falling order, so that an entry is not the row it is for."""
    table = MaskTable.of(rows_max, VOCABULARY, rows_max, DEVICE)
    table.entries.fill_(0)
    for row, mask in enumerate(masks):
        if mask is not None:
            table.entries[rows_max - 1 - row] = torch.from_numpy(mask.view(np.int32))
            table.rows[row] = rows_max - 1 - row
    return table


def device_sampler(wishes: list[Sampling]) -> DeviceSampler:
    with patch("baton.executor.cuda.sampling.CHUNK", CHUNK):
        sampler = DeviceSampler(len(wishes), VOCABULARY, 2 * len(wishes), DEVICE)
    for slot, wish in enumerate(wishes):
        sampler.start(slot, wish)
    return sampler


def draw(
    sampler: DeviceSampler, logits: torch.Tensor, slots: list[int], positions: list[int], masks: MaskTable | None
) -> list[int]:
    named = np.array(slots, dtype=np.int32)
    out = torch.empty(len(slots), dtype=torch.int32, device=DEVICE)
    at = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    with np.errstate(all="ignore"):
        sampler.draw(logits.to(DEVICE), torch.from_numpy(named).to(DEVICE), at, out, sampler.mode_of(named), masks)
    return out.tolist()


def host_sampler(wishes: list[Sampling]) -> Sampler:
    sampler = Sampler(len(wishes), VOCABULARY, CPU, CompiledConstraints([ScriptedBackend()]))
    for slot, wish in enumerate(wishes):
        sampler.start(slot, np.array([1], dtype=np.int32), 1, wish)
    return sampler


def on_host(logits: torch.Tensor, wishes: list[Sampling]) -> list[int]:
    sampler, rows = host_sampler(wishes), len(wishes)
    sampled = sampler.sample(logits, np.arange(rows, dtype=np.int32), np.ones(rows, dtype=np.int64))
    sampler.close()
    assert not sampled.failed
    return sampled.tokens.tolist()


def logits_of(kind: str, rows: int) -> torch.Tensor:
    stream = torch.Generator().manual_seed(7)
    logits = torch.randn((rows, VOCABULARY), generator=stream) * 3
    some = torch.rand((rows, VOCABULARY), generator=stream) < 0.6
    match kind:
        case "broken":
            logits[some] = math.nan
        case "hopeless":
            logits[:] = -math.inf
            logits[some] = math.nan
        case "infinite":
            logits[some] = math.inf
        case "hopeless where permitted":
            logits[:, allowed_of(mask_of(OPEN), VOCABULARY).copy()] = -math.inf
    return logits


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("broken", "hopeless", "infinite")]


@pytest.mark.parametrize("kind", ["smooth", "hopeless where permitted", *SLOW])
def test_masked_and_unmasked_rows_are_drawn_as_the_host_draws_them(kind: str) -> None:
    logits, rows = logits_of(kind, len(WISHES)), list(range(len(WISHES)))
    masks = [None if wish.constraint is None else mask_of(wish.constraint) for wish in WISHES]
    drawn = draw(device_sampler(WISHES), logits, rows, [1] * len(rows), table_of(masks, 2 * len(rows)))
    assert drawn == on_host(logits, WISHES)
    assert drawn == on_host(logits.double(), WISHES), "and as in float64"
    for token, mask in zip(drawn, masks, strict=True):
        assert mask is None or allowed_of(mask, VOCABULARY)[token]


def test_the_constraints_of_these_tests_permit_half_and_one() -> None:
    assert 50 < allowed_of(mask_of(OPEN), VOCABULARY).sum() < 100
    assert allowed_of(mask_of(FORCED), VOCABULARY).sum() == 1


def test_a_mask_that_permits_everything_changes_no_draw_in_any_mode() -> None:
    plain = [replace(wish, constraint=None) for wish in WISHES]
    logits, rows = logits_of("smooth", len(plain)), list(range(len(plain)))
    everything = np.full(words_of(VOCABULARY), 0xFFFFFFFF, dtype=np.uint32)
    sampler = device_sampler(plain)
    wanted = draw(sampler, logits, rows, [1] * len(rows), None)
    assert draw(sampler, logits, rows, [1] * len(rows), table_of([everything] * len(rows), len(rows))) == wanted
    assert draw(sampler, logits, rows, [1] * len(rows), table_of([None] * len(rows), len(rows))) == wanted


def test_rows_behind_drafts_have_a_mask_each() -> None:
    wish = Sampling(seed=3, temperature=1.0, constraint=OPEN)
    first = int(np.flatnonzero(allowed_of(mask_of(OPEN), VOCABULARY))[4])
    second = int(np.flatnonzero(allowed_of(mask_of(OPEN, first), VOCABULARY))[0])
    logits = logits_of("smooth", 3)
    host = host_sampler([wish])
    slots = np.zeros(3, dtype=np.int32)
    host.prepare(slots[:1], np.array([1]), drafts_of([[first, second]]))
    wanted = host.sample(logits, slots, np.array([1, 2, 3])).tokens.tolist()
    host.close()
    masks: list[Words | None] = [mask_of(OPEN), mask_of(OPEN, first), mask_of(OPEN, first, second)]
    assert draw(device_sampler([wish, wish]), logits, [0, 0, 0], [1, 2, 3], table_of(masks, 4)) == wanted


def test_a_mask_without_a_token_of_the_vocabulary_is_found() -> None:
    masks = np.zeros((3, words_of(VOCABULARY)), dtype=np.uint32)
    masks[0, -1] = 1 << (VOCABULARY % 32)
    masks[1, -1] = 1 << (VOCABULARY % 32 - 1)
    assert permit_something(masks, VOCABULARY).tolist() == [False, True, False]
    assert permit_something(masks[:, :4], 128).tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        ({}, False),
        ({"presence_penalty": 0.5}, True),
        ({"logit_bias": ((1, 2.0),)}, True),
        ({"bad_words": ((4, 5),)}, True),
        ({"logprobs": 1}, True),
    ],
)
def test_a_constraint_alone_does_not_need_the_host(asked: dict[str, object], needs: bool) -> None:
    sampler = DeviceSampler(1, VOCABULARY, 1, DEVICE)
    sampler.start(0, Sampling(seed=0, constraint=OPEN, **asked))  # type: ignore[arg-type]
    assert sampler.needs_host(np.zeros(1, dtype=np.int32)) is needs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on CUDA only")
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_a_captured_draw_follows_the_masks_that_come_later(mode: SamplingMode) -> None:
    cuts = {SamplingMode.GREEDY: {"temperature": 0.0}, SamplingMode.ALL: {}, SamplingMode.CUTS: {"top_k": 30}}
    wishes = [replace(Sampling(seed=n, constraint=OPEN), **cuts[mode]) for n in range(4)]
    sampler, table = device_sampler(wishes), table_of([None] * 4, 8)
    logits = logits_of("smooth", 4).to(DEVICE)
    slots = torch.arange(4, dtype=torch.int32, device=DEVICE)
    positions, out = torch.ones_like(slots), torch.zeros_like(slots)
    sampler.draw(logits, slots, positions, out, mode, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.draw(logits, slots, positions, out, mode, table)
    for constraint in (OPEN, FORCED):
        mask = torch.from_numpy(mask_of(constraint).view(np.int32))
        table.entries[:4] = mask.to(DEVICE)
        table.rows[:4] = torch.tensor([0, NO_MASK, 2, 3], dtype=torch.int32)
        graph.replay()
        asked = [replace(wish, constraint=None if n == 1 else constraint) for n, wish in enumerate(wishes)]
        assert out.tolist() == on_host(logits.cpu(), asked)
