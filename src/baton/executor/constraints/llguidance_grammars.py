"""llguidance's tokenizers and compiled grammars, for the backend that serves and for processes that only compile.

Imports no array library: a process that compiles starts sooner and holds less without one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from baton.executor.constraints.constraint_error import ConstraintError

NAME = "llguidance"
VERSION = version("llguidance")
ROW_ITEMS_MAX = 2_000
"""About four for each optional property that may come next. A mask with so many takes some milliseconds."""
_SILENT = 0


def parser_limits() -> LLParserLimits:
    """The limits of every matcher: some hundredths of a second for a mask, and a second to compile.

    They are counts, not times: a matcher gives up at the same token on every machine."""
    return LLParserLimits(
        max_items_in_row=ROW_ITEMS_MAX,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,  # a grammar may be confidential, and logs are not
    )


def matching_tokenizer(tokenizer: Tokenizer, vocabulary: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's view of a tokenizer, byte-level or with pieces as sentencepiece has them.

    `vocabulary`: that of the model, which may be larger than the tokenizer's. `eos_ids`: all tokens that end an answer.
    Raises ConstraintError where llguidance cannot use it, or where no token ends an answer.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ends = [eos for eos in eos_ids if eos < size]
    if not ends:
        raise ConstraintError("the tokenizer has no token that ends an answer")
    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=max(vocabulary, size), eos_token=ends)
    except ValueError as error:
        raise ConstraintError(f"llguidance cannot use the tokenizer: {error}") from error


def read_eos_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """All end-of-text ids that the files of a model folder name, ascending."""
    named = [_read_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    named.append(tokenizer.token_to_id(content) if isinstance(content, str) else None)
    listed = [value if isinstance(value, list) else [value] for value in named]
    return sorted({eos for values in listed for eos in values if isinstance(eos, int)})


def _read_json(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def compiled(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises ConstraintError."""
    matcher = LLMatcher(tokenizer, source, log_level=_SILENT, limits=parser_limits())
    if matcher.is_error():
        raise ConstraintError(matcher.get_error())
    return matcher
