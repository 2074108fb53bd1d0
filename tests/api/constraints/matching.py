"""A matcher over bytes, for the grammars that `baton.api.constraints` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from baton.api.constraints.answer_grammar import answer_grammar
from baton.api.constraints.wanted import ConstraintKind, WantedConstraint
from baton.api.parsers import deepseek, glm, gpt_oss, hermes, llama3, mistral, thinking

END = "<end of the answer>"
MARKERS = tuple(
    dict.fromkeys(
        marker for family in (deepseek, glm, gpt_oss, hermes, llama3, mistral, thinking) for marker in family.MARKERS
    )
)


@cache
def byte_tokenizer(markers: tuple[str, ...]) -> Tokenizer:
    """One token per byte, and one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, *markers])
    return tokenizer


def token_ids(markers: tuple[str, ...]) -> dict[str, int]:
    return {marker: byte_tokenizer(markers).token_to_id(marker) for marker in markers}


@cache
def _llguidance_tokenizer(markers: tuple[str, ...]) -> LLTokenizer:
    tokenizer = byte_tokenizer(markers)
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(END))


def matcher(source: str | None, markers: tuple[str, ...] = ()) -> LLMatcher:
    assert source is not None
    made = LLMatcher(_llguidance_tokenizer(markers), source, log_level=0, limits=LLParserLimits())
    assert not made.is_error(), made.get_error()
    return made


def is_whole(made: LLMatcher, text: str, markers: tuple[str, ...] = ()) -> bool:
    """Whether an answer with this text may end."""
    tokens = byte_tokenizer(markers).encode(text, add_special_tokens=False).ids
    own = made.deep_copy()
    return bool(own.try_consume_tokens(tokens) == len(tokens) and own.is_accepting())


def next_texts(made: LLMatcher, text: str, markers: tuple[str, ...] = ()) -> Sequence[str]:
    """What may follow, a token each."""
    tokenizer = byte_tokenizer(markers)
    own = made.deep_copy()
    assert own.consume_tokens(tokenizer.encode(text, add_special_tokens=False).ids)
    mask = own.compute_bitmask()
    allowed = [token for token in range(tokenizer.get_vocab_size()) if mask[token // 8] >> token % 8 & 1]
    return [tokenizer.decode([token], skip_special_tokens=False) for token in allowed]


def wanted(kind: ConstraintKind, value: object) -> WantedConstraint:
    return WantedConstraint(kind, value, "field")


def schema_matcher(schema: object) -> LLMatcher:
    return matcher(answer_grammar(wanted(ConstraintKind.JSON_SCHEMA, schema)))


def is_instance(made: LLMatcher, value: object) -> bool:
    return is_whole(made, json.dumps(value, ensure_ascii=False))
