from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.api.detokenise import ByteDetokenizer, WindowDetokenizer
from baton.api.model_text import ModelText
from tests.api.tokenizers_made_here import byte_fallback, byte_level, metaspace

BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback()
FALLBACK_BARE = byte_fallback(strips=False)
METASPACE = metaspace()


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The same ids in bursts of these sizes, over and over."""
    bursts, at = [], 0
    while at < len(ids):
        size = cuts[len(bursts) % len(cuts)]
        bursts.append(ids[at : at + size])
        at += size
    return bursts


def streamed(text: ModelText, ids: list[int], cuts: list[int], context: list[int]) -> str:
    detokenizer = text.detokenizer(context)
    return "".join([detokenizer.push(burst) for burst in cut(ids, cuts)]) + detokenizer.flush()


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(ids=ids_of(BYTE_LEVEL), cuts=CUTS)
def test_byte_level_deltas_are_the_full_decode_for_any_ids(ids: list[int], cuts: list[int]) -> None:
    full = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert streamed(ModelText(BYTE_LEVEL), ids, cuts, []) == full


@given(sentence=st.text(max_size=40), cuts=CUTS, strips=st.booleans())
def test_byte_fallback_deltas_are_the_full_decode_of_any_text(sentence: str, cuts: list[int], strips: bool) -> None:
    tokenizer = FALLBACK if strips else FALLBACK_BARE
    ids = tokenizer.encode(sentence.replace(" ", "▁"), add_special_tokens=False).ids
    assert streamed(ModelText(tokenizer), ids, cuts, []) == tokenizer.decode(ids)


@given(ids=ids_of(FALLBACK), one=CUTS, other=CUTS)
def test_byte_fallback_gives_the_same_text_for_any_ids_however_they_are_cut(
    ids: list[int], one: list[int], other: list[int]
) -> None:
    text = ModelText(FALLBACK)
    assert streamed(text, ids, one, []) == streamed(text, ids, other, []) == text.decode(ids, skip_special=True)


@given(ids=ids_of(METASPACE), cuts=CUTS)
def test_window_deltas_are_the_full_decode(ids: list[int], cuts: list[int]) -> None:
    assert streamed(ModelText(METASPACE), ids, cuts, []) == METASPACE.decode(ids)


@given(sentence=st.text(max_size=40), cuts=CUTS)
@settings(max_examples=50)
def test_the_window_is_right_for_byte_level_and_fallback_text_too(sentence: str, cuts: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, FALLBACK):
        ids = tokenizer.encode(sentence.replace(" ", "▁") if tokenizer is FALLBACK else sentence).ids
        detokenizer = WindowDetokenizer(lambda some, tok=tokenizer: tok.decode(list(some)), frozenset(), ())
        deltas = [detokenizer.push(burst) for burst in cut(ids, cuts)]
        assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids)


@given(prompt=ids_of(METASPACE), ids=ids_of(METASPACE))
def test_a_continuation_has_the_space_that_joins_it_to_its_prompt(prompt: list[int], ids: list[int]) -> None:
    whole = METASPACE.decode(prompt + ids)
    assert METASPACE.decode(prompt) + streamed(ModelText(METASPACE), ids, [1], prompt) == whole


def test_sentencepiece_drops_the_first_space_of_a_text_and_keeps_that_of_a_continuation() -> None:
    text, ids = ModelText(FALLBACK), [FALLBACK.token_to_id("▁hello"), FALLBACK.token_to_id("▁world")]
    assert streamed(text, ids, [1], []) == "hello world"
    assert streamed(text, ids, [1], [FALLBACK.token_to_id("a")]) == " hello world"


@pytest.mark.parametrize("char", ["é", "你", "🙂"])
def test_a_character_in_several_tokens_comes_whole_or_not_at_all(char: str) -> None:
    for tokenizer, first in ((BYTE_LEVEL, 0), (FALLBACK, 1)):
        detokenizer = ModelText(tokenizer).detokenizer()
        *partial, last = [first + byte for byte in char.encode()]
        assert [detokenizer.push([i]) for i in partial] == [""] * len(partial)
        assert detokenizer.push([last]) == char
        assert detokenizer.flush() == ""


def test_a_character_that_is_never_completed_is_replaced_at_the_end_and_not_before() -> None:
    detokenizer = ModelText(BYTE_LEVEL).detokenizer()
    assert detokenizer.push([0xE4, 0xBD]) == ""
    assert detokenizer.flush() == "�"


def test_special_tokens_are_skipped_within_a_character_and_shown_on_request() -> None:
    text, end = ModelText(BYTE_LEVEL), BYTE_LEVEL.token_to_id("<|end|>")
    ids = [0xC3, end, 0xA9]
    assert text.decode(ids, skip_special=True) == "é"
    assert "<|end|>" in text.decode(ids, skip_special=False)


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert ModelText(BYTE_LEVEL).decode([104, 5000, 105]) == "hi"


def test_the_decoder_decides_which_way_is_used() -> None:
    assert isinstance(ModelText(BYTE_LEVEL).detokenizer(), ByteDetokenizer)
    assert isinstance(ModelText(FALLBACK).detokenizer(), ByteDetokenizer)
    assert isinstance(ModelText(METASPACE).detokenizer(), WindowDetokenizer)


def test_the_window_stays_bounded_when_nothing_ever_becomes_readable() -> None:
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        some = list(ids)  # type: ignore[call-overload]
        longest = max(longest, len(some))
        return BYTE_LEVEL.decode(some)

    detokenizer = WindowDetokenizer(decode, frozenset(), ())
    text = "".join(detokenizer.push([0xFF]) for _ in range(500)) + detokenizer.flush()
    assert text == "�" * 500
    assert longest <= 32
