"""The n-th token depends on its row, its slot's wishes and the tokens before it, and on nothing else; draws are fair."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.engine.request import Sampling, Tokens
from baton.executor.gumbel_noise import exact_log, hashes, noise_stream, row_keys
from baton.executor.sampling import Sampler

CPU = torch.device("cpu")
PROMPT = np.array([1, 2, 3, 2], dtype=np.int32)

samplings = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 15),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 2, 30]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((0, 2.0), (7, -100.0))]),
    stop_token_ids=st.sampled_from([(), (0, 5)]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 2]),
)


def rows_of_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 2


def started(vocabulary: int, *wishes: Sampling, tokens: Tokens = PROMPT) -> Sampler:
    sampler = Sampler(len(wishes), vocabulary, CPU)
    for slot, sampling in enumerate(wishes):
        sampler.start(slot, tokens, len(PROMPT), sampling)
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, slots: npt.ArrayLike, positions: npt.ArrayLike) -> list[int]:
    at = np.asarray(positions, dtype=np.int64)
    return sampler.sample(logits, np.asarray(slots, dtype=np.int32), at).tokens.tolist()


@settings(max_examples=60, deadline=None)
@given(wishes=st.lists(samplings, min_size=2, max_size=7), vocabulary=st.sampled_from([10, 64, 130]), data=st.data())
def test_a_row_alone_is_the_same_row_in_any_batch_and_order(
    wishes: list[Sampling], vocabulary: int, data: st.DataObject
) -> None:
    logits = rows_of_logits(len(wishes), vocabulary, data.draw(st.integers(0, 1000)))
    order = data.draw(st.permutations(range(len(wishes))))
    positions = np.full(len(wishes), len(PROMPT))
    together = draw(started(vocabulary, *wishes), logits[list(order)], order, positions)
    alone = [draw(started(vocabulary, *wishes), logits[[slot]], [slot], [len(PROMPT)])[0] for slot in order]
    assert together == alone


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(49_152, torch.float32), (50_001, torch.float32), (50_001, torch.float64)]
)
def test_a_row_of_a_large_vocabulary_alone_is_the_same_in_a_batch(vocabulary: int, dtype: torch.dtype) -> None:
    cuts = ({}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.2}, {"top_k": 3000})
    wishes = [replace(Sampling(seed=n), **cut) for n, cut in enumerate(cuts * 2)]
    logits = rows_of_logits(len(wishes), vocabulary, 1).to(dtype)
    sampler = started(vocabulary, *wishes)
    together = draw(sampler, logits, range(len(wishes)), np.full(len(wishes), 9))
    alone = [draw(sampler, logits[[slot]], [slot], [9])[0] for slot in range(len(wishes))]
    assert together == alone


@settings(max_examples=50, deadline=None)
@given(sampling=samplings, stay=st.integers(0, 12), seed=st.integers(0, 1000))
def test_a_restart_with_the_outputs_so_far_is_as_if_never_interrupted(sampling: Sampling, stay: int, seed: int) -> None:
    logits = rows_of_logits(12, 20, seed)
    whole = started(20, sampling)
    outputs = [draw(whole, logits[[n]], [0], [len(PROMPT) + n])[0] for n in range(12)]
    again = started(20, sampling, tokens=np.concatenate([PROMPT, np.array(outputs[:stay], dtype=np.int32)]))
    rest = [draw(again, logits[[n]], [0], [len(PROMPT) + n])[0] for n in range(stay, 12)]
    assert outputs[stay:] == rest


@settings(max_examples=50, deadline=None)
@given(
    stays=st.lists(st.tuples(st.integers(0, 2), samplings, st.booleans()), min_size=2, max_size=8), seed=st.integers(0, 99)
)
def test_a_slot_in_use_again_keeps_nothing_of_who_was_there(stays: list[tuple[int, Sampling, bool]], seed: int) -> None:
    logits = rows_of_logits(4, 30, seed)
    used = Sampler(3, 30, CPU)
    for slot, sampling, stops_after in stays:
        used.start(slot, PROMPT, len(PROMPT), sampling)
        ours = [draw(used, logits[[n]], [slot], [len(PROMPT) + n])[0] for n in range(4)]
        fresh = started(30, sampling)
        assert ours == [draw(fresh, logits[[n]], [0], [len(PROMPT) + n])[0] for n in range(4)]
        if stops_after:
            used.stop(slot)


@settings(max_examples=40, deadline=None)
@given(wishes=st.lists(samplings, min_size=2, max_size=3), seed=st.integers(0, 1000))
def test_several_rows_of_a_slot_in_one_call_are_the_rows_one_by_one(wishes: list[Sampling], seed: int) -> None:
    logits = rows_of_logits(3 * len(wishes), 25, seed)
    slots = np.repeat(np.arange(len(wishes)), 3)
    positions = np.tile(np.arange(3), len(wishes)) + len(PROMPT)
    together = draw(started(25, *wishes), logits, slots, positions)
    one_by_one = started(25, *wishes)
    assert together == [draw(one_by_one, logits[[n]], [slots[n]], [positions[n]])[0] for n in range(len(slots))]


@settings(max_examples=40, deadline=None)
@given(sampling=samplings, accepted=st.integers(1, 3), seed=st.integers(0, 1000))
def test_drafts_that_were_not_accepted_are_forgotten(sampling: Sampling, accepted: int, seed: int) -> None:
    logits = rows_of_logits(8, 25, seed)
    first = len(PROMPT)
    drafting = started(25, sampling)
    outputs = draw(drafting, logits[:4], [0] * 4, range(first, first + 4))[:accepted]
    after = draw(drafting, logits[4:], [0] * 4, range(first + accepted, first + accepted + 4))
    replayed = started(25, sampling, tokens=np.concatenate([PROMPT, np.array(outputs, dtype=np.int32)]))
    assert after == draw(replayed, logits[4:], [0] * 4, range(first + accepted, first + accepted + 4))


def test_a_forgotten_draft_weighs_on_no_later_token() -> None:
    # Each time a token is put out it loses 1, so the first two take turns; a draft counted twice would break the turn.
    logits = torch.tensor([10.0, 9.2, 0.0]).repeat(4, 1)
    sampler = started(3, Sampling(seed=0, temperature=0, frequency_penalty=1.0))
    assert draw(sampler, logits, [0] * 4, range(4, 8)) == [0, 1, 0, 1]
    assert draw(sampler, logits, [0] * 4, range(5, 9)) == [1, 0, 1, 0]
    assert draw(sampler, logits, [0] * 4, range(6, 10)) == [0, 1, 0, 1]


def test_it_does_not_matter_in_how_many_pieces_a_batch_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = [Sampling(seed=n, top_k=(0, 5)[n % 2], top_p=(1.0, 0.8)[n // 2 % 2]) for n in range(40)]
    logits = rows_of_logits(40, 100, 1)
    whole = draw(started(100, *wishes), logits, range(40), np.full(40, 4))
    monkeypatch.setattr("baton.executor.sampling.DRAW_ELEMENTS", 700)
    monkeypatch.setattr("baton.executor.token_choice._RACE_ELEMENTS_CPU", 300)
    assert draw(started(100, *wishes), logits, range(40), np.full(40, 4)) == whole


def test_seed_choice_and_position_each_change_the_draws() -> None:
    flat = torch.zeros((200, 50))
    positions = np.arange(1, 201)

    def stream(sampling: Sampling, shift: int = 0) -> list[int]:
        return draw(started(50, sampling), flat, [0] * 200, positions + shift)

    base = Sampling(seed=1)
    others = [
        stream(Sampling(seed=2)),
        stream(Sampling(seed=-1)),
        stream(Sampling(seed=1 + 2**32)),
        stream(replace(base, choice=1)),
        stream(base, shift=1),
        stream(base, shift=2**32),
    ]
    assert stream(base) == stream(base)
    for other in others:
        agreeing = sum(a == b for a, b in zip(stream(base), other, strict=True))
        assert agreeing < 20  # 4 expected by chance
    assert stream(Sampling(seed=-1)) == stream(Sampling(seed=2**64 - 1))


def chi_square(drawn: npt.ArrayLike, shares: npt.NDArray[np.float64]) -> float:
    counts = np.bincount(np.asarray(drawn), minlength=len(shares))
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("over", ["positions", "seeds", "choices"])
def test_frequencies_follow_the_softmax(temperature: float, over: str) -> None:
    draws = 20_000 if over == "positions" else 4_000
    logits = torch.tensor([2.0, -1.0, 0.0, 0.5, 1.0, 1.0, -2.0, 0.3, 0.0, 1.5])
    shares = torch.softmax(logits.double() / temperature, -1).numpy()
    slots = np.zeros(draws, dtype=np.int32) if over == "positions" else np.arange(draws, dtype=np.int32)
    sampler = Sampler(draws, 10, CPU)
    for n in range(1 if over == "positions" else draws):
        keyed = Sampling(seed=n if over == "seeds" else 7, choice=n if over == "choices" else 0, temperature=temperature)
        sampler.start(n, PROMPT, len(PROMPT), keyed)
    positions = np.arange(draws) if over == "positions" else np.full(draws, 11)
    drawn = draw(sampler, logits.repeat(draws, 1), slots, positions)
    assert chi_square(drawn, shares) < 30  # 9 degrees of freedom: 1 in 2,000 seeds would exceed it


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.3}])
def test_frequencies_follow_the_softmax_of_what_a_cut_leaves(cut: dict[str, float]) -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 0.5, 1.0, 1.1, -2.0, 0.3, 0.1, 1.5])
    left = [0, 9, 5] if "top_p" in cut else [0, 9, 5, 4]
    shares = torch.softmax(logits[left].double(), -1).numpy()
    drawn = draw(started(10, replace(Sampling(seed=3), **cut)), logits.repeat(20_000, 1), [0] * 20_000, range(20_000))
    assert set(drawn) == set(left)
    assert chi_square([left.index(token) for token in drawn], shares) < 22


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (0, 64, 128, 192), (0, 65_536, 131_072, 196_608), (5, 700, 49_151, 30_000)])
def test_the_noise_of_four_tokens_comes_in_every_order_alike(ids: tuple[int, ...]) -> None:
    streams = np.full(100_000, noise_stream(1, 0), dtype=np.uint64)
    keys = row_keys(streams, np.arange(100_000, dtype=np.int64), CPU)
    order = hashes(torch.tensor(ids, dtype=torch.int32), keys).argsort(dim=1).numpy()
    places = {permutation: n for n, permutation in enumerate(itertools.permutations(range(4)))}
    drawn = [places[row] for row in map(tuple, order.tolist())]
    assert chi_square(drawn, np.full(24, 1 / 24)) < 55  # 23 degrees of freedom


def test_our_logarithm_is_right_and_the_same_at_every_place() -> None:
    x = torch.cat(
        [torch.logspace(-40, 3, 5_000, dtype=torch.float64), 1 - torch.logspace(-10, -0.01, 5_000, dtype=torch.float64)]
    )
    torch.testing.assert_close(exact_log(x), x.log(), rtol=1e-14, atol=1e-15)
    whole = exact_log(x)
    for start in range(1, 12):
        assert torch.equal(exact_log(x[start : start + 37]), whole[start : start + 37])
