"""Engines with a tiny model of bytes, and answers that must match a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from baton.core.config import WorkerConfig
from baton.core.engine.request import Constraint, RequestId, Sampling, Submission, frozen_tokens
from baton.executor.constraints.llguidance_backend import NAME, VERSION
from baton.executor.cpu.executor import NAIVE, TorchCpuExecutor
from baton.executor.drafts import DraftProposer
from baton.node.engine_setup import constraint_backends
from baton.node.scripted_text import BYTE_VOCABULARY, byte_tokenizer
from tests.support.guessing import Listening

EOS = BYTE_VOCABULARY - 1
BACKENDS = ((NAME, VERSION),)
TOKENIZER = byte_tokenizer()
PERSON = {
    "type": "object",
    "properties": {
        "surname": {"type": "string", "maxLength": 6},
        "favourite_colour": {"enum": ["red", "green", "blueish"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["surname", "favourite_colour", "age", "tags"],
    "additionalProperties": False,
}


def schema(value: object) -> Constraint:
    source = LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False})
    return Constraint(NAME, VERSION, source)


def regex(pattern: str) -> Constraint:
    return Constraint(NAME, VERSION, LLMatcher.grammar_from_regex(pattern))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def text_of(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode([token for token in tokens if token != EOS])


def ask(
    prompt: str,
    sampling: Sampling,
    max_tokens: int = 96,
    *,
    generated: Sequence[int] = (),
    request_id: str = "r",
    priority: int = 0,
) -> Submission:
    return Submission(
        RequestId(request_id), frozen_tokens(ids_of(prompt)), sampling, max_tokens, priority=priority,
        generated=frozen_tokens(np.array(generated, dtype=np.int32)),
    )  # fmt: skip


def engine(
    folder: Path,
    *,
    proposer: DraftProposer = NAIVE,
    burst: int = 1,
    constrained_burst: int = 0,
    backends: tuple[tuple[str, str], ...] = BACKENDS,
    **sizes: int,
) -> Listening:
    shape = {"slots": 3, "blocks": 96, "block_size": 8, "step_tokens": 48, "depth": 2, **sizes}
    executor = TorchCpuExecutor.load(
        folder, dtype="float64", slots=shape["slots"], blocks=shape["blocks"], block_size=shape["block_size"],
        context_tokens=256, burst=burst, proposer=proposer, constrained_burst=constrained_burst,
        backends=lambda vocabulary: constraint_backends(folder, vocabulary),
    )  # fmt: skip
    config = WorkerConfig(
        **shape, context_tokens=256, burst=burst, constrained_burst=constrained_burst, constraint_backends=backends
    )
    return Listening(config, executor)
