"""The grammar of a whole answer: reasoning, then constrained content or tool calls, in the form of the model.

    wanted, tools, format of the model  →  one llguidance grammar; None where nothing is constrained

An answer may end exactly where the grammar accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.api.constraints.lark_text import LarkText
from baton.api.constraints.tool_grammars import CallGrammar, OfferedTool, call_grammar, has_call_grammar, offered_tool
from baton.api.constraints.wanted import CallChoice, ConstraintRefused, NamedCall, WantedConstraint, WantedTool
from baton.api.constraints.wanted_content import content_rule
from baton.api.parsers import gpt_oss, llama3, thinking
from baton.api.parsers.choosing import PLAIN_ANSWERS, TOOL_PARSERS, AnswerFormat, ReasoningParserChoice, ToolParserChoice

GRAMMAR_CHARS_MAX = 512 << 10
NO_TOKENS: Mapping[str, int] = {}
THINKING_FIELD = "thinking_tokens_max"
AFTER_REASONING = r"/[ \n]{0,3}/"
"""Where the answer itself does not begin with white space; otherwise a fixed separator, which the parser takes away."""


def answer_grammar(
    wanted: WantedConstraint | None = None,
    tools: Sequence[WantedTool] = (),
    tool_choice: CallChoice | None = None,
    parallel: bool = True,
    answer_format: AnswerFormat = PLAIN_ANSWERS,
    special_tokens: Mapping[str, int] = NO_TOKENS,
    begins_inside_reasoning: bool = False,
    thinking_tokens_max: int | None = None,
) -> str | None:
    """`special_tokens`: text → id of the tokenizer's added tokens. Raises ConstraintRefused."""
    if wanted is None and thinking_tokens_max is None and not (tools and _has_rules(tools, tool_choice, parallel)):
        return None
    lark = LarkText(special_tokens)
    answer = _AnswerRules(lark, answer_format, tools, tool_choice, parallel)
    body = answer.body(wanted)
    if answer.is_gpt_oss:
        start = _in_channels(lark, body, thinking_tokens_max)
    elif answer_format.reasoning is ReasoningParserChoice.THINK:
        has_space = wanted is not None and wanted.may_begin_with_space
        space = lark.literal(thinking.SEPARATOR) if has_space else lark.terminal(AFTER_REASONING)
        start = _behind_thinking(lark, space, body, begins_inside_reasoning, thinking_tokens_max)
    else:
        if thinking_tokens_max is not None:
            raise ConstraintRefused(THINKING_FIELD, "", "this model's answers have no reasoning that can be told apart")
        start = body
    written = lark.written(start)
    if len(written) > GRAMMAR_CHARS_MAX:
        field = wanted.field if wanted is not None else "tools"
        raise ConstraintRefused(field, "", f"the grammar has more than {GRAMMAR_CHARS_MAX} characters")
    return written


def _has_rules(tools: Sequence[WantedTool], choice: CallChoice | None, parallel: bool) -> bool:
    """Whether something is asked of the calls."""
    is_forced = choice is not None and choice not in ("auto", "none")
    return is_forced or not parallel or any(tool.strict for tool in tools)


class _AnswerRules:
    """What may follow the reasoning."""

    def __init__(
        self, lark: LarkText, form: AnswerFormat, tools: Sequence[WantedTool], choice: CallChoice | None, is_parallel: bool
    ) -> None:
        self._lark = lark
        self._family = form.tools
        self._trigger = TOOL_PARSERS[form.tools].trigger if form.tools in TOOL_PARSERS else None
        self._tools = tools
        self._choice = choice
        self._is_parallel = is_parallel
        family_writes_channels = bool(tools) and form.tools is ToolParserChoice.GPT_OSS
        self.is_gpt_oss = form.reasoning is ReasoningParserChoice.GPT_OSS or family_writes_channels

    def body(self, wanted: WantedConstraint | None) -> str:
        content = None if wanted is None else content_rule(self._lark, wanted)
        if not self._tools or self._choice == "none":
            return self._final(content or self._lark.text_without(()))
        is_asked = content is not None or _has_rules(self._tools, self._choice, self._is_parallel)
        if not is_asked and not has_call_grammar(self._family):
            return self._final(self._lark.text_without(()))  # only the reasoning is bounded
        offered = self._offered()
        calls = call_grammar(self._lark, self._family, offered)
        if self._choice in (None, "auto"):
            return self._content_or_calls(calls, content)
        return self._calls(calls)

    def _offered(self) -> list[OfferedTool]:
        """All of the tools, or the one that is named. With a call that is forced, all schemas are kept."""
        is_forced = self._choice not in (None, "auto")
        named = self._choice.name if isinstance(self._choice, NamedCall) else None
        chosen = [(at, tool) for at, tool in enumerate(self._tools) if named in (None, tool.name)]
        if not chosen:
            raise ConstraintRefused("tool_choice", "", f"'tool_choice' names {named!r}, which is none of the tools")
        return [offered_tool(tool, at, is_forced or bool(tool.strict)) for at, tool in chosen]

    def _calls(self, calls: CallGrammar) -> str:
        trigger = "" if self._trigger is None else f"{self._lark.literal(self._trigger)} "
        is_parallel = self._is_parallel and bool(calls.further)
        return self._lark.rule(trigger + calls.calls(is_parallel))

    def _content_or_calls(self, calls: CallGrammar, content: str | None) -> str:
        if content is not None or self.is_gpt_oss or self._trigger is None:
            free = self._final(content or self._free_content())
            return self._lark.rule(f"{free} | {self._calls(calls)}")
        lead = self._lark.text_up_to(self._trigger)
        is_parallel = self._is_parallel and bool(calls.further)
        text = self._lark.text_without([self._trigger])
        return self._lark.rule(f"{text} | {lead} {calls.calls(is_parallel)}")

    def _free_content(self) -> str:
        if self.is_gpt_oss:
            return self._lark.text_without(gpt_oss.MARKERS)
        # Llama: an answer that begins with a brace, or with the tag, is a call.
        tag = llama3.TAG[:2]
        return self._lark.terminal(rf"/[ \t\r\n]*([^ \t\r\n{{{tag[0]}]|{tag[0]}[^{tag[1]}])(?s:.*)|[ \t\r\n]*/")

    def _final(self, content: str) -> str:
        if not self.is_gpt_oss:
            return content
        return self._lark.rule(f"{self._lark.literal(f'{gpt_oss.CHANNEL}final{gpt_oss.MESSAGE}')} {content}")


def _behind_thinking(lark: LarkText, space: str, body: str, begins_inside: bool, tokens_max: int | None) -> str:
    """Reasoning must come where the prompt began it; otherwise it may."""
    if tokens_max is None:
        reasoning = lark.text_up_to(thinking.CLOSE)
    elif lark.is_token(thinking.CLOSE):
        reasoning = lark.text_up_to_within(thinking.CLOSE, tokens_max)
    else:
        raise ConstraintRefused(THINKING_FIELD, "", f"this tokenizer has no token {thinking.CLOSE}")
    if begins_inside:
        return f"{reasoning} {space} {body}"
    return f"({lark.literal(thinking.OPEN)} {reasoning} {space})? {body}"


def _in_channels(lark: LarkText, body: str, tokens_max: int | None) -> str:
    """Messages of the channel `analysis` before the answer or call; one where thinking is limited."""
    opening = lark.literal(f"{gpt_oss.CHANNEL}analysis{gpt_oss.MESSAGE}")
    behind = lark.literal(f"{gpt_oss.START}assistant")
    end = gpt_oss.ENDS[0]
    if tokens_max is None:
        return f"({lark.rule(f'{opening} {lark.text_up_to(end)} {behind}')})* {body}"
    if not lark.is_token(end):
        raise ConstraintRefused(THINKING_FIELD, "", f"this tokenizer has no token {end}")
    return f"({opening} {lark.text_up_to_within(end, tokens_max)} {behind})? {body}"
