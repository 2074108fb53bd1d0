"""Constraints by llguidance: JSON schemas, regular expressions and context-free grammars over a model's tokens.

The source is what `llguidance.LLMatcher` takes: `{"grammars": […]}` as JSON, or Lark text. Matchers are copied, never rolled
back, which is wrong for grammars that name tokens. Compiling and masking release the GIL.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from baton.executor.constraints.contract import ConstraintError, Words, set_bits, words_of
from baton.executor.constraints.llguidance_grammars import NAME, VERSION, compiled, matching_tokenizer, read_eos_ids


class LlguidanceMatcher:
    def __init__(self, matcher: LLMatcher, stops: list[int], words: int, known: Words | None = None) -> None:
        """`known`: its mask, where somebody has computed it."""
        self._matcher = matcher
        self._stops = stops
        self._words = words
        self._known = known

    def mask(self, out: Words) -> None:
        if self._known is not None:
            out[:] = self._known[: len(out)]
            return
        if self._matcher.is_stopped():
            self._raise_error()
            set_bits(out, self._stops)
            return
        wide = out if len(out) == self._words else np.empty(self._words, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(wide.ctypes.data, wide.nbytes)
        self._raise_error()
        out[:] = wide[: len(out)]

    def keep_mask(self) -> None:
        """Compute the mask, for this matcher and its copies until they go on."""
        known = np.zeros(self._words, dtype=np.uint32)
        self.copy().mask(known)
        self._known = known

    def consume(self, token: int) -> bool:
        if self._matcher.is_stopped():
            self._raise_error()
            return token in self._stops
        taken = self._matcher.try_consume_tokens([token])
        self._raise_error()
        if taken == 1:
            self._known = None
        return taken == 1

    def copy(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._stops, self._words, self._known)

    def forced_tokens(self) -> list[int]:
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    @property
    def is_stopped(self) -> bool:
        return self._matcher.is_stopped()

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())


class _LlguidanceConstraint:
    """Has the mask of the beginning: the first mask is often the dearest, and the end of a prefill waits for it."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._beginning = LlguidanceMatcher(matcher, list(tokenizer.eos_tokens), words_of(tokenizer.vocab_size))
        with contextlib.suppress(ConstraintError):  # which a request learns when it asks for that mask
            self._beginning.keep_mask()

    def matcher(self) -> LlguidanceMatcher:
        return self._beginning.copy()


class LlguidanceBackend:
    name = NAME
    version = VERSION

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_folder(cls, folder: Path, vocabulary: int) -> LlguidanceBackend:
        """Raises ConstraintError where the folder has no tokenizer that llguidance can use."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConstraintError(f"{folder.name} has no tokenizer.json")
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        return cls(matching_tokenizer(tokenizer, vocabulary, read_eos_ids(folder, tokenizer)))

    def compile(self, source: str) -> _LlguidanceConstraint:
        return _LlguidanceConstraint(compiled(self._tokenizer, source), self._tokenizer)
