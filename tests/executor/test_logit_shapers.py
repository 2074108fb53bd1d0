"""Allowed tokens, bad words and masks: what is drawn is permitted, whatever the logits are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baton.core.engine.request import Constraint, Sampling, Tokens
from baton.core.errors import InvariantViolated
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource, allowed_after, fits
from baton.executor.drafts import drafts_of
from baton.executor.sampling import Sampler

VOCABULARY = 40
CPU = torch.device("cpu")
SOURCE = ScriptedSource(5, VOCABULARY, (3,)).text()
CONSTRAINT = Constraint("scripted", "1", SOURCE)
WISHES = [
    Sampling(seed=1, temperature=0.0, constraint=CONSTRAINT),
    Sampling(seed=2, constraint=CONSTRAINT, top_k=4),
    Sampling(seed=3, constraint=CONSTRAINT, top_p=0.4, logit_bias=((1, 1e30),)),
    Sampling(seed=4, constraint=CONSTRAINT, presence_penalty=2.0, min_p=0.5),
]
SPOILT = {
    "sound": lambda: torch.randn(1, VOCABULARY, dtype=torch.float64),
    "all NaN": lambda: torch.full((1, VOCABULARY), math.nan),
    "all -inf": lambda: torch.full((1, VOCABULARY), -math.inf),
    "some NaN": lambda: torch.randn(1, VOCABULARY).masked_fill_(torch.rand(1, VOCABULARY) < 0.7, math.nan),
    "+inf": lambda: torch.full((1, VOCABULARY), math.inf),
}


def sampler_of(slots: int = 1) -> Sampler:
    return Sampler(slots, VOCABULARY, CPU, CompiledConstraints([ScriptedBackend()]))


def tokens_of(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def one(sampler: Sampler, logits: torch.Tensor, position: int, slot: int = 0) -> int:
    sampled = sampler.sample(logits, np.array([slot], dtype=np.int32), np.array([position]))
    assert sampled.failed == ()
    return int(sampled.tokens[0])


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("wish", WISHES, ids=["greedy", "top-k", "top-p", "penalised"])
def test_a_constrained_row_chooses_inside_its_mask_whatever_its_logits_are(wish: Sampling, kind: str) -> None:
    torch.manual_seed(1)
    sampler, outputs = sampler_of(), list[int]()
    sampler.start(0, tokens_of(7), 1, wish)
    for position in range(1, 12):
        outputs.append(one(sampler, SPOILT[kind](), position))
        assert outputs[-1] in allowed_after(SOURCE, outputs[:-1], VOCABULARY)
    assert fits(SOURCE, outputs)
    sampler.close()


@pytest.mark.parametrize("kind", SPOILT)
def test_only_allowed_tokens_are_drawn_and_bad_words_are_never_completed(kind: str) -> None:
    torch.manual_seed(2)
    sampler = sampler_of()
    sampler.start(0, tokens_of(1), 1, Sampling(seed=1, allowed_token_ids=(1, 2, 5), bad_words=((2,), (1, 1), (5, 5, 1))))
    outputs = [one(sampler, SPOILT[kind](), position) for position in range(1, 60)]
    assert set(outputs) == {1, 5}
    told = "".join(map(str, outputs))
    assert "11" not in told
    assert "551" not in told


def test_a_bad_word_that_begins_in_the_prompt_is_none() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 9] = 5.0
    sampler = sampler_of()
    sampler.start(0, tokens_of(8), 1, Sampling(seed=1, temperature=0.0, bad_words=((8, 9),)))
    assert one(sampler, logits, 1) == 9
    sampler.start(0, tokens_of(4, 8), 1, Sampling(seed=1, temperature=0.0, bad_words=((8, 9),)))
    assert one(sampler, logits, 2) == 0


def test_where_nothing_is_permitted_the_row_fails_and_the_others_do_not() -> None:
    sampler = sampler_of(3)
    sampler.start(0, tokens_of(1), 1, Sampling(seed=1, allowed_token_ids=(5,), bad_words=((5,),)))
    sampler.start(1, tokens_of(1), 1, Sampling(seed=1, constraint=Constraint("scripted", "1", "no source")))
    sampler.start(2, tokens_of(1), 1, Sampling(seed=1, constraint=CONSTRAINT))
    sampled = sampler.sample(torch.randn(3, VOCABULARY), np.arange(3, dtype=np.int32), np.ones(3, dtype=np.int64))
    assert sampled.failed == (0, 1)
    assert int(sampled.tokens[2]) in allowed_after(SOURCE, [], VOCABULARY)
    sampler.close()


def test_a_slot_in_which_nothing_was_permitted_fails_again_at_its_next_position() -> None:
    """An executor that plans ahead may ask once more before it learns of the failure."""
    first = allowed_after(SOURCE, [], VOCABULARY)
    sampler = sampler_of()
    sampling = Sampling(seed=1, constraint=CONSTRAINT, bad_words=tuple((token,) for token in first))
    sampler.start(0, tokens_of(1), 1, sampling)
    for position in (1, 2):
        slots, positions = np.zeros(1, dtype=np.int32), np.array([position])
        assert sampler.sample(torch.randn(1, VOCABULARY), slots, positions).failed == (0,)
    sampler.close()


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_rows_behind_drafts_are_masked_after_the_drafts_and_only_what_stands_is_consumed(wrong_at: int | None) -> None:
    torch.manual_seed(3)
    plain, drafting, wish = sampler_of(), sampler_of(), WISHES[0]
    logits = [torch.randn(1, VOCABULARY, dtype=torch.float64) for _ in range(9)]
    for sampler in (plain, drafting):
        sampler.start(0, tokens_of(7), 1, wish)
    wanted = [one(plain, row, position) for position, row in enumerate(logits, start=1)]
    drafts = wanted[:4]
    if wrong_at is not None:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCABULARY
    drafting.prepare(np.zeros(1, dtype=np.int32), np.array([1]), drafts_of([drafts]))
    drawn = drafting.sample(torch.cat(logits[:5]), np.zeros(5, dtype=np.int32), np.arange(1, 6))
    stood = 5 if wrong_at is None else wrong_at + 1
    assert drawn.tokens[:stood].tolist() == wanted[:stood]
    rest = [one(drafting, row, position) for position, row in enumerate(logits[stood:], start=stood + 1)]
    assert rest == wanted[stood:]
    plain.close()
    drafting.close()


def test_a_gap_in_what_a_matcher_was_told_is_noticed() -> None:
    sampler = sampler_of()
    sampler.start(0, tokens_of(7), 1, WISHES[0])
    with pytest.raises(InvariantViolated, match="its matcher has 0 tokens"):
        one(sampler, torch.randn(1, VOCABULARY), 3)
    sampler.close()
