"""Constraints by xgrammar, a second backend to compare with. An extra: `pip install baton-serve[xgrammar]`.

The source is a JSON schema if it begins with a brace, else a grammar in xgrammar's EBNF.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from baton.executor.constraints.contract import ConstraintError, Words, set_bits, words_of

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher

NAME = "xgrammar"
COMPILER_THREADS = 2


class XgrammarMatcher:
    def __init__(self, matcher: GrammarMatcher, stops: list[int], words: int) -> None:
        self._matcher = matcher
        self._stops = stops
        self._words = words

    def mask(self, out: Words) -> None:
        if self._matcher.is_terminated():
            set_bits(out, self._stops)
            return
        wide = np.full((1, self._words), -1, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(wide)
        out[:] = wide.view(np.uint32)[0, : len(out)]

    def consume(self, token: int) -> bool:
        if self._matcher.is_terminated():
            return token in self._stops
        return bool(self._matcher.accept_token(token))

    def copy(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._matcher.fork(), self._stops, self._words)

    def forced_tokens(self) -> list[int]:
        """None: it knows forced text, not how a tokenizer cuts it."""
        return []

    @property
    def is_stopped(self) -> bool:
        words = np.zeros(self._words, dtype=np.uint32)
        self.mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return set(allowed.tolist()) <= set(self._stops)


class _XgrammarConstraint:
    def __init__(self, compiled: CompiledGrammar, stops: list[int], words: int) -> None:
        self._compiled = compiled
        self._stops = stops
        self._words = words

    def matcher(self) -> XgrammarMatcher:
        from xgrammar import GrammarMatcher

        return XgrammarMatcher(GrammarMatcher(self._compiled), self._stops, self._words)


class XgrammarBackend:
    name = NAME

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_ids: Sequence[int]) -> None:
        """Raises ConstraintError where xgrammar is not installed."""
        try:
            self.version = version("xgrammar")
        except PackageNotFoundError:
            raise ConstraintError("xgrammar is not installed; pip install 'baton-serve[xgrammar]' installs it") from None
        from xgrammar import GrammarCompiler, TokenizerInfo

        size = tokenizer.get_vocab_size(with_added_tokens=True)
        vocab = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        told = TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
        info = TokenizerInfo(
            [piece for piece, _ in vocab], told["vocab_type"], vocab_size=max(vocabulary, size),
            stop_token_ids=list(eos_ids), add_prefix_space=told["add_prefix_space"],
        )  # fmt: skip
        self._stops = list(eos_ids)
        self._words = words_of(max(vocabulary, size))
        self._compiler: GrammarCompiler = GrammarCompiler(info, max_threads=COMPILER_THREADS, cache_enabled=False)

    def compile(self, source: str) -> _XgrammarConstraint:
        try:
            if source.lstrip().startswith("{"):
                json.loads(source)
                compiled = self._compiler.compile_json_schema(source, any_whitespace=False)
            else:
                compiled = self._compiler.compile_grammar(source)
        except (RuntimeError, ValueError) as error:
            raise ConstraintError(f"xgrammar cannot compile it: {str(error)[:200]}") from error
        return _XgrammarConstraint(compiled, self._stops, self._words)
