"""Which parsers a model's answers need: named by the operator, or told by the chat template.

A new family is a file beside this one and a line in `TOOL_PARSERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from baton.api.detokenise import Detokenizer
from baton.api.parsers import deepseek, glm, gpt_oss, hermes, llama3, mistral, pythonic, qwen3_coder, thinking
from baton.api.parsers.argument_values import ToolSchemas
from baton.api.parsers.calls_or_content import CallsOrContentParser
from baton.api.parsers.parts import AnswerParser, PlainParser
from baton.api.reasoning_tokens import ReasoningCounter


class ToolParserChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3-json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    DEEPSEEK = "deepseek"
    GLM = "glm"
    GPT_OSS = "gpt-oss"
    QWEN3_CODER = "qwen3-coder"


class ReasoningParserChoice(StrEnum):
    AUTO = "auto"
    NONE = "none"
    THINK = "think"
    GPT_OSS = "gpt-oss"


@dataclass(frozen=True, slots=True)
class ToolFamily:
    make: Callable[[ToolSchemas], AnswerParser]
    markers: tuple[str, ...]
    """Texts that its parser must see, though they be control tokens."""
    signs: tuple[str, ...]
    """A chat template with all of these is one of this family; none: no template tells."""
    trigger: str | None = None
    """The marker that begins the first call where calls are constrained; None: the beginning of the answer tells."""

    def is_told_by(self, template: str) -> bool:
        return bool(self.signs) and all(sign in template for sign in self.signs)


TOOL_PARSERS = {
    # The first whose signs a template has: some have those of Hermes too.
    ToolParserChoice.GPT_OSS: ToolFamily(gpt_oss.GptOssParser, gpt_oss.MARKERS, ("<|channel|>", "functions")),
    ToolParserChoice.DEEPSEEK: ToolFamily(deepseek.DeepSeekParser, deepseek.MARKERS, (deepseek.OPEN,), deepseek.AROUND[0]),
    ToolParserChoice.GLM: ToolFamily(glm.GlmParser, glm.MARKERS, ("<arg_key>",), glm.OPEN),
    ToolParserChoice.QWEN3_CODER: ToolFamily(
        qwen3_coder.Qwen3CoderParser,
        qwen3_coder.MARKERS,
        (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),
        qwen3_coder.OPEN,
    ),
    ToolParserChoice.MISTRAL: ToolFamily(mistral.MistralParser, mistral.MARKERS, (mistral.CALLS,), mistral.CALLS),
    ToolParserChoice.HERMES: ToolFamily(hermes.HermesParser, hermes.MARKERS, (hermes.OPEN,), hermes.OPEN),
    ToolParserChoice.LLAMA3_JSON: ToolFamily(llama3.Llama3Parser, llama3.MARKERS, ("header", '"parameters"')),
    ToolParserChoice.PYTHONIC: ToolFamily(pythonic.PythonicParser, pythonic.MARKERS, ()),
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of a model are written."""

    tools: ToolParserChoice = ToolParserChoice.NONE
    reasoning: ReasoningParserChoice = ReasoningParserChoice.NONE

    @property
    def has_short_ids(self) -> bool:
        """Templates of Mistral accept ids of calls only if they are nine letters and digits."""
        return self.tools is ToolParserChoice.MISTRAL

    def reasoning_counter(self, detokenizer: Detokenizer, begins_inside: bool) -> ReasoningCounter | None:
        """For one answer; None: reasoning is not told from the rest."""
        match self.reasoning:
            case ReasoningParserChoice.THINK:
                return ReasoningCounter(detokenizer, thinking.OPEN, (thinking.CLOSE,), begins_inside)
            case ReasoningParserChoice.GPT_OSS:
                return ReasoningCounter(detokenizer, gpt_oss.REASONING, gpt_oss.ANSWERS, begins_inside=False)
            case _:
                return None

    def markers(self, has_tools: bool) -> frozenset[str]:
        """Control tokens whose text is needed to find the parts of an answer."""
        found: set[str] = set()
        if has_tools and self.tools in TOOL_PARSERS:
            found |= set(TOOL_PARSERS[self.tools].markers)
        if self.reasoning is ReasoningParserChoice.THINK:
            found |= set(thinking.MARKERS)
        if self.reasoning is ReasoningParserChoice.GPT_OSS:
            found |= set(gpt_oss.MARKERS)
        return frozenset(found)

    def parser(
        self, tools: ToolSchemas, begins_inside: bool, calls_or_content: bool = False, keeps_space: bool = False
    ) -> AnswerParser | None:
        """For one answer; None: all of it is content.

        `begins_inside`: the prompt ends within reasoning. `calls_or_content`: behind reasoning, it is all calls or all
        content. `keeps_space`: white space behind the separator of reasoning belongs to the content.
        """
        if self.reasoning is ReasoningParserChoice.GPT_OSS:
            return gpt_oss.GptOssParser(tools, calls_or_content)
        inner = self._tool_parser(tools, calls_or_content)
        if self.reasoning is ReasoningParserChoice.NONE:
            return inner
        return thinking.ThinkingParser(inner or PlainParser(), begins_inside, keeps_space)

    def _tool_parser(self, tools: ToolSchemas, calls_or_content: bool) -> AnswerParser | None:
        family = TOOL_PARSERS.get(self.tools) if tools else None
        if family is None:
            return None
        if self.tools is ToolParserChoice.GPT_OSS:
            return gpt_oss.GptOssParser(tools, calls_or_content)
        parser = family.make(tools)
        return parser if family.trigger is None or not calls_or_content else CallsOrContentParser(parser, family.trigger)


PLAIN_ANSWERS = AnswerFormat()


def answer_format(template: str, tools: ToolParserChoice, reasoning: ReasoningParserChoice) -> AnswerFormat:
    """What was chosen; where that is AUTO, what the chat template tells."""
    if tools is ToolParserChoice.AUTO:
        tools = next((name for name, family in TOOL_PARSERS.items() if family.is_told_by(template)), ToolParserChoice.NONE)
    if reasoning is ReasoningParserChoice.AUTO:
        reasoning = _reasoning_of(template)
    return AnswerFormat(tools, reasoning)


def _reasoning_of(template: str) -> ReasoningParserChoice:
    if "<|channel|>" in template:
        return ReasoningParserChoice.GPT_OSS
    return ReasoningParserChoice.THINK if thinking.CLOSE in template else ReasoningParserChoice.NONE
