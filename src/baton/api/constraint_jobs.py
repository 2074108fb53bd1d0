"""What is to be compiled, or asked of a constraint, for one request; encoded for the process that does it.

The same request makes the same bytes, which name it in caches.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from baton.api.constraints.answer_grammar import answer_grammar
from baton.api.constraints.wanted import CallChoice, ConstraintKind, NamedCall, WantedConstraint, WantedTool
from baton.api.parsers.choosing import AnswerFormat, ReasoningParserChoice, ToolParserChoice

JOB_BYTES_MAX = 512 << 10
"""Of an encoded job. The grammar that it makes is about as long or longer, and bounded too."""


class MaskJob(Struct, frozen=True, forbid_unknown_fields=True, tag="mask"):
    """Compute the digest of the mask of a constraint after these outputs, if the process has this backend and version."""

    backend: str
    version: str
    source: str
    outputs: tuple[int, ...]

    def encode(self) -> bytes:
        return _encode(self)


class ConstraintJob(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="constraint"):
    kind: ConstraintKind | None = None
    """None: only calls or reasoning are constrained."""
    value: object = None
    field: str = ""
    tools: tuple[WantedTool, ...] = ()
    tool_choice: str = "auto"
    named_tool: str | None = None
    parallel: bool = True
    tool_parser: ToolParserChoice = ToolParserChoice.NONE
    reasoning_parser: ReasoningParserChoice = ReasoningParserChoice.NONE
    begins_inside_reasoning: bool = False
    thinking_tokens_max: int | None = None

    def encode(self) -> bytes:
        return _encode(self)

    def grammar(self, special_tokens: Mapping[str, int]) -> str | None:
        """The source of the constraint. `special_tokens`: text → id of the tokenizer's added tokens. Raises
        ConstraintRefused."""
        return answer_grammar(
            wanted=None if self.kind is None else WantedConstraint(self.kind, self.value, self.field),
            tools=self.tools,
            tool_choice=self._choice(),
            parallel=self.parallel,
            answer_format=AnswerFormat(self.tool_parser, self.reasoning_parser),
            special_tokens=special_tokens,
            begins_inside_reasoning=self.begins_inside_reasoning,
            thinking_tokens_max=self.thinking_tokens_max,
        )

    def _choice(self) -> CallChoice:
        if self.named_tool is not None:
            return NamedCall(self.named_tool)
        return "required" if self.tool_choice == "required" else "auto"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ConstraintJob | MaskJob).decode


def decode_job(payload: bytes) -> ConstraintJob | MaskJob:
    """Raises a ValueError for what is no job."""
    job: ConstraintJob | MaskJob = _decode(payload)
    return job
