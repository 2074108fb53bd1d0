"""Prepares a client's request: validation, chat template, tokenising, submissions. Runs in a thread: tokenising can be long.

The result depends only on the OriginalRequest, the model and the engine's limits, so another process prepares the same.
Stateless; does not call the engine.
"""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from baton.api.chat_responses import ChatWriter
from baton.api.completion_responses import CompletionWriter, ShownPrompt
from baton.api.continuation import BegunChoices, begin
from baton.api.control_tokens import ControlTokenInText, strings_in
from baton.api.detokenise import Detokenizer
from baton.api.errors import ApiError, invalid, unsupported
from baton.api.messages.body import MessagesBody
from baton.api.messages.writer import MessagesWriter
from baton.api.model_text import ChatEnding, ModelText, TemplateRefused, TextTooLong
from baton.api.original_request import BadOrigin, OriginalRequest
from baton.api.parsers import thinking
from baton.api.parsers.choosing import PLAIN_ANSWERS, AnswerFormat, ReasoningParserChoice, ToolParserChoice
from baton.api.parsers.parts import AnswerParser
from baton.api.paths import CHAT_PATH, COMPLETION_PATH, MESSAGES_PATH, RESPONSES_PATH
from baton.api.prompt_logprobs import PromptTable
from baton.api.reasoning_tokens import ReasoningCounter
from baton.api.request_costs import prompt_units_of
from baton.api.responses import ResponseHeader, ResponseWriter
from baton.api.responses_api.body import ResponsesBody
from baton.api.responses_api.writer import ResponsesWriter
from baton.api.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContinuedChatBody,
    ContinuedCompletionBody,
    GenerateBody,
    Prompt,
    TokenizeBody,
    check_chat,
    check_completion,
    check_prompt_logprobs,
    check_stream_options,
    parse,
)
from baton.api.stop_strings import StopScanner
from baton.api.submissions import RequestOwner, RequestRules, group_of, max_tokens_of, over_context, prompt_logprobs_of
from baton.api.text_reader import ChoiceReader
from baton.api.tool_fields import Tool, is_forced, offered_tools
from baton.api.tracing.request_trace import AskedParameters
from baton.api.wanted_constraints import PreparedConstraint, chat_constraint, completion_constraint
from baton.core.bounds import BAD_WORD_TOKENS_MAX
from baton.core.engine.request import Constraint, FinishReason, Submission

PROMPT_END_TOKENS = 8
"""Tokens at the end of a chat's prompt in which an opening marker of reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    origin: OriginalRequest
    asker: RequestOwner
    arrived_s: float
    """`time.perf_counter` at arrival."""
    group: list[Submission]
    prompt_ids: Sequence[Sequence[int]]
    readers: list[ChoiceReader]
    writer: ResponseWriter
    stream: bool
    include_usage: bool
    """Whether a stream ends with a usage chunk."""
    baton_usage: bool
    """Whether `usage.baton` has the bill."""
    return_token_ids: bool
    prompt_field: str
    prompt_units: int
    """Cost of what the answer repeats of its prompts."""
    over: Mapping[int, FinishReason]
    """Of a continued answer: the choices that are complete already, which are not in the group."""
    asked: AskedParameters
    """For its trace."""
    constraint: PreparedConstraint | None = None
    """To be compiled and given to the group before it is submitted."""
    client: str = "-"
    """The address that the request came from, for the log."""

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return len(self.readers) // len(self.prompt_ids)

    def constrained(self, constraint: Constraint | None) -> PreparedRequest:
        """With this constraint in each submission."""
        if constraint is None:
            return self
        group = [replace(one, sampling=replace(one.sampling, constraint=constraint)) for one in self.group]
        return dataclasses.replace(self, group=group)


@dataclass(frozen=True, slots=True)
class RequestPreparer:
    text: ModelText
    policy: Callable[[], RequestRules]
    """Called for each body, since an engine's limits may change at run time."""
    model_names: tuple[str, ...]
    special_tokens_in_prompts: bool = True
    """Whether the text of a control token in a prompt is that token. In chats, what a client writes never is."""
    answer_format: AnswerFormat = PLAIN_ANSWERS
    """How the model writes reasoning and tool calls in answers to chats."""

    def prepare(self, origin: OriginalRequest, proven: bool = False) -> PreparedRequest:
        """`proven`: the sender holds the cluster key, so the body may continue an answer."""
        if origin.path == CHAT_PATH:
            return self._openai_chat(origin, ContinuedChatBody if proven else ChatBody)
        if origin.path == COMPLETION_PATH:
            return self._completion(origin, ContinuedCompletionBody if proven else CompletionBody)
        if origin.path == MESSAGES_PATH:
            return self._chat(
                origin, parse(origin.raw, MessagesBody).as_chat(), "msg", lambda heading, _: MessagesWriter(heading)
            )
        if origin.path == RESPONSES_PATH:
            body = parse(origin.raw, ResponsesBody)
            return self._chat(origin, body.as_chat(), "resp", lambda heading, _: ResponsesWriter(body, heading))
        raise BadOrigin(f"nothing is prepared for {origin.path}")

    def _openai_chat(self, origin: OriginalRequest, kind: type[ChatBody]) -> PreparedRequest:
        body = parse(origin.raw, kind, (check_stream_options, check_prompt_logprobs, check_chat))

        def writer(heading: ResponseHeader, prompt: PromptTable | None) -> ChatWriter:
            shown = None if prompt is None or body.prompt_logprobs is None else (prompt, body.prompt_logprobs)
            return ChatWriter(heading, self.text.piece, bool(body.logprobs), shown)

        return self._chat(origin, body, "chatcmpl", writer)

    def _chat(
        self,
        origin: OriginalRequest,
        body: ChatBody,
        kind: str,
        writer: Callable[[ResponseHeader, PromptTable | None], ResponseWriter],
    ) -> PreparedRequest:
        """A chat in any dialect. `kind` begins the id of the answer."""
        now_s, asker = time.perf_counter(), RequestOwner(origin.tenant, origin.request_id)
        self.check_model(body.model)
        rules, tools = self.policy(), self._offered(body)
        prompt_ids = [self._context_chat_ids(body, tools, rules)]
        begins_inside = self._ends_in_reasoning(body, prompt_ids[0])
        answers = self._answers(body)
        constraint = chat_constraint(body, tools, answers, begins_inside)
        group = group_of(body, prompt_ids, rules, asker, origin.seed, origin.arrived_us, self._bad_words(body))
        heading = self._heading(kind, body, origin, prompt_ids)
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        wanted = None if constraint is None else constraint.wanted
        flags = (False, False) if wanted is None else (wanted.excludes_calls, wanted.may_begin_with_space)
        parser = partial(answers.parser, schemas, begins_inside, *flags)
        (prompt,) = prompt_tables(body, prompt_ids)
        readers = partial(self._chat_readers, body, group, bool(tools), begins_inside, answers, parser, prompt)
        begun = begin(body, group, readers, rules.info)
        return _prepared(body, origin, now_s, begun, prompt_ids, heading, writer(heading, prompt), constraint)

    def _answers(self, body: ChatBody) -> AnswerFormat:
        """How this answer is written. A call that is forced on a model without a form that can be constrained is a JSON
        object with a name and parameters, as Llama 3 writes it; on one that writes channels it is a message of theirs, since
        the parser of channels sees no other calls."""
        answers = self.answer_format
        if not is_forced(body.tool_choice):
            return answers
        if answers.reasoning is ReasoningParserChoice.GPT_OSS:
            return dataclasses.replace(answers, tools=ToolParserChoice.GPT_OSS)
        if answers.tools in (ToolParserChoice.NONE, ToolParserChoice.PYTHONIC):
            return dataclasses.replace(answers, tools=ToolParserChoice.LLAMA3_JSON)
        return answers

    def _ends_in_reasoning(self, body: ChatBody, prompt_ids: Sequence[int]) -> bool:
        """Whether the answer goes on with reasoning that the template, or the message that is continued, has begun."""
        if body.continue_final_message:
            content = body.messages[-1].content or ""
            return content.rfind(thinking.OPEN) > content.rfind(thinking.CLOSE)
        return self.text.decode(prompt_ids[-PROMPT_END_TOKENS:]).rstrip().endswith(thinking.OPEN)

    def count_tokens(self, body: ChatBody, tokens_max: int) -> int:
        """Tokens of the prompt of a chat."""
        self.check_model(body.model)
        tools = [tool.for_template() for tool in self._offered(body)]
        return len(self.chat_ids(body, body.messages, tokens_max, tools))

    def _completion(self, origin: OriginalRequest, kind: type[CompletionBody]) -> PreparedRequest:
        now_s, asker = time.perf_counter(), RequestOwner(origin.tenant, origin.request_id)
        body = parse(origin.raw, kind, (check_stream_options, check_prompt_logprobs, check_completion))
        self.check_model(body.model)
        rules = self.policy()
        prompt_ids, constraint = self._prompts_ids(body, rules), completion_constraint(body)
        group = group_of(body, prompt_ids, rules, asker, origin.seed, origin.arrived_us, self._bad_words(body))
        heading = self._heading("cmpl", body, origin, prompt_ids)
        shown = [
            self._shown(body, *prompt)
            for prompt in zip(body.prompt, prompt_ids, prompt_tables(body, prompt_ids), strict=True)
        ]
        readers = partial(self._readers, body, group, prompt_ids, shown)
        writer = CompletionWriter(heading, self.text.piece, body.logprobs is not None, shown)
        begun = begin(body, group, readers, rules.info)
        return _prepared(body, origin, now_s, begun, prompt_ids, heading, writer, constraint)

    def _offered(self, body: ChatBody) -> list[Tool]:
        """The tools that the model is told of."""
        tools = offered_tools(body.tools, body.tool_choice)
        if is_forced(body.tool_choice):
            return tools  # the answer is a call whatever the model was told
        if tools and "tools" not in self.text.chat_template:
            raise unsupported("tools", "'tools' is not supported: this model's chat template has no place for them")
        if tools and self.answer_format.tools is ToolParserChoice.NONE:
            raise unsupported("tools", "'tools' is not supported: no --tool-parser reads the calls of this model")
        return tools

    def _bad_words(self, body: GenerateBody) -> tuple[tuple[int, ...], ...]:
        """The token sequences of words that the answer must not have, at the beginning of a text and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in body.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.text.encode(text, add_special_tokens=False, parse_special=False))
                if len(ids) > BAD_WORD_TOKENS_MAX:
                    message = f"'bad_words' has a word of {len(ids)} tokens; at most {BAD_WORD_TOKENS_MAX}"
                    raise invalid("bad_words", message)
                found[ids] = None
        return tuple(ids for ids in found if ids)

    def _context_chat_ids(self, body: ChatBody, tools: Sequence[Tool], rules: RequestRules) -> list[int]:
        context, answer = rules.info.context_tokens, max_tokens_of(body)
        try:
            return self.chat_ids(body, body.messages, context - (answer or 1), [tool.for_template() for tool in tools])
        except TextTooLong as refusal:
            raise over_context(refusal.least_tokens, answer, rules.info, body.prompt_field, at_least=True) from None

    def chat_ids(
        self,
        body: ChatBody | TokenizeBody,
        messages: Sequence[ChatMessage],
        tokens_max: int,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> list[int]:
        """Raises TextTooLong when the messages cannot have so few tokens, before a template or tokenizer works on them.

        Every message counts as a token at least, also where the template leaves some out.
        """
        if len(messages) > tokens_max:
            raise TextTooLong(len(messages))
        self.text.check_length([text for message in messages for text in texts_of(message)], tokens_max)
        self.text.check_length(strings_in(list(tools)), tokens_max)
        extra = self._effort_kwargs(body) | body.chat_template_kwargs | ({"tools": list(tools)} if tools else {})
        forms = (False, True) if any(message.tool_calls for message in messages) else (False,)
        refusal = ""
        for as_text in forms:
            plain = [_plain(message, as_text, self.text.has_absent_contents) for message in messages]
            try:
                return self.text.chat_ids(plain, _ending(body), extra, tokens_max)
            except TemplateRefused as refused:
                refusal = refusal or str(refused)
        raise invalid(body.prompt_field, f"'{body.prompt_field}': {refusal}")

    def _effort_kwargs(self, body: ChatBody | TokenizeBody) -> dict[str, object]:
        """`reasoning_effort` for a template that takes it. To one that can only switch reasoning off, "none" does that."""
        if not isinstance(body, ChatBody) or body.reasoning_effort is None:
            return {}
        if "reasoning_effort" in self.text.chat_template:
            return {"reasoning_effort": body.reasoning_effort}
        if body.reasoning_effort == "none" and "enable_thinking" in self.text.chat_template:
            return {"enable_thinking": False}
        return {}

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.model_names:
            message = f"The model '{model[:200]}' does not exist; this server has '{self.model_names[0]}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _prompts_ids(self, body: CompletionBody, rules: RequestRules) -> list[Sequence[int]]:
        """All are checked before the first is encoded: a body that is refused costs nothing but its bytes."""
        answer = max_tokens_of(body)
        for prompt in body.prompt:
            try:
                self.text.check_length(
                    [prompt] if isinstance(prompt, str) else (), rules.info.context_tokens - (answer or 1)
                )
            except TextTooLong as refusal:
                raise over_context(refusal.least_tokens, answer, rules.info, "prompt", at_least=True) from None
        return [self.prompt_ids(prompt, body.add_special_tokens) for prompt in body.prompt]

    def prompt_ids(self, prompt: Prompt, add_special_tokens: bool | None) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            return self.text.encode(prompt, add_special_tokens is not False, self.special_tokens_in_prompts)
        except ControlTokenInText as refusal:
            raise invalid("prompt", f"'prompt': {refusal}") from None

    def _shown(self, body: CompletionBody, prompt: Prompt, ids: Sequence[int], table: PromptTable | None) -> ShownPrompt:
        if not body.echo:
            return ShownPrompt("", table, listed=body.prompt_logprobs)
        echo = prompt if isinstance(prompt, str) else self.text.decode(prompt, skip_special=True)
        offsets = () if body.logprobs is None else self._offsets(ids, len(echo))
        return ShownPrompt(echo, table, body.logprobs, offsets, body.prompt_logprobs)

    def _offsets(self, ids: Sequence[int], most: int) -> array[int]:
        """The text offset of each token of a prompt; where its tokens have more text than it, no more than its end."""
        detokenizer, offsets, offset = self.text.detokenizer(), array("i"), 0
        for token in ids:
            offsets.append(min(offset, most))
            offset += len(detokenizer.push((token,)))
        return offsets

    def _heading(
        self, kind: str, body: GenerateBody, origin: OriginalRequest, prompt_ids: Sequence[Sequence[int]]
    ) -> ResponseHeader:
        return ResponseHeader(
            id=f"{kind}-{origin.request_id}",
            created_s=origin.created_s,
            model=self.model_names[0],
            include_usage=_includes_usage(body),
            return_token_ids=bool(body.return_token_ids),
            prompt_ids=prompt_ids,
            n=body.n or 1,
            continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
            has_short_call_ids=self.answer_format.has_short_ids,
        )

    def _chat_readers(
        self,
        body: ChatBody,
        group: Sequence[Submission],
        has_tools: bool,
        begins_inside: bool,
        answers: AnswerFormat,
        parser: Callable[[], AnswerParser | None],
        prompt: PromptTable | None,
    ) -> list[ChoiceReader]:
        """A chat answer is a text of its own: its leading space does not continue the prompt, but where it is asked to."""
        context = group[0].prompt.tolist() if body.continue_final_message else ()
        skips, markers = body.skip_special_tokens is not False, answers.markers(has_tools)

        def reader(index: int, submission: Submission) -> ChoiceReader:
            detokenizer = self.text.detokenizer(context, skips, markers)
            counter = answers.reasoning_counter(self.text.detokenizer(context, skips, markers), begins_inside)
            return _reader(body, index, submission, detokenizer, 0, prompt, parser(), counter)

        return [reader(index, submission) for index, submission in enumerate(group)]

    def _readers(
        self,
        body: CompletionBody,
        group: Sequence[Submission],
        contexts: Sequence[Sequence[int]],
        shown: Sequence[ShownPrompt],
    ) -> list[ChoiceReader]:
        n, skips = body.n or 1, body.skip_special_tokens is not False

        def reader(index: int, submission: Submission) -> ChoiceReader:
            prompt = shown[index // n]
            detokenizer = self.text.detokenizer(contexts[index // n], skips)
            return _reader(body, index, submission, detokenizer, len(prompt.echo), prompt.table)

        return [reader(index, submission) for index, submission in enumerate(group)]


def _reader(
    body: GenerateBody,
    index: int,
    submission: Submission,
    detokenizer: Detokenizer,
    offset: int = 0,
    prompt: PromptTable | None = None,
    parser: AnswerParser | None = None,
    reasoning: ReasoningCounter | None = None,
) -> ChoiceReader:
    """`prompt` is for the choice that reports of it."""
    return ChoiceReader(
        index,
        detokenizer,
        StopScanner(body.stop, bool(body.include_stop_str_in_output)) if body.stop else None,
        frozenset(submission.sampling.stop_token_ids),
        submission.sampling.min_tokens,
        offset,
        parser,
        reasoning,
        None if submission.sampling.prompt_logprobs is None else prompt,
        body.max_tokens == 0,
    )


def prompt_tables(body: ChatBody | CompletionBody, prompt_ids: Sequence[Sequence[int]]) -> list[PromptTable | None]:
    """One for each prompt, where log-probabilities of prompts are asked for."""
    asked = prompt_logprobs_of(body) is not None
    return [PromptTable(ids) if asked else None for ids in prompt_ids]


def _prepared(
    body: ChatBody | CompletionBody,
    origin: OriginalRequest,
    now_s: float,
    begun: BegunChoices,
    prompt_ids: Sequence[Sequence[int]],
    heading: ResponseHeader,
    writer: ResponseWriter,
    constraint: PreparedConstraint | None,
) -> PreparedRequest:
    return PreparedRequest(
        origin=origin,
        asker=RequestOwner(origin.tenant, origin.request_id),
        arrived_s=now_s,
        group=begun.group,
        prompt_ids=prompt_ids,
        readers=begun.readers,
        writer=writer,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        baton_usage=bool(body.baton_usage),
        return_token_ids=bool(body.return_token_ids),
        prompt_field=body.prompt_field,
        prompt_units=prompt_units_of(body, prompt_ids),
        over=begun.over,
        asked=_asked(body, heading),
        constraint=constraint,
    )


def _asked(body: ChatBody | CompletionBody, heading: ResponseHeader) -> AskedParameters:
    return AskedParameters(
        operation="chat" if isinstance(body, ChatBody) else "text_completion",
        model=body.model,
        response_id=heading.id,
        response_model=heading.model,
        stream=bool(body.stream),
        choices=heading.n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        max_tokens=max_tokens_of(body),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
    )


def _ending(body: ChatBody | TokenizeBody) -> ChatEnding:
    if body.continue_final_message:
        return ChatEnding.IN_CONTENT
    return ChatEnding.LAST_MESSAGE if body.add_generation_prompt is False else ChatEnding.GENERATION_PROMPT


def _includes_usage(body: GenerateBody) -> bool:
    """True also when the bill is requested, since the usage chunk has it."""
    return bool(body.baton_usage or (body.stream_options and body.stream_options.include_usage))


def texts_of(message: ChatMessage) -> list[str]:
    """What a client wrote at length: the content, the reasoning, and the arguments of calls."""
    return [
        message.content or "",
        message.reasoning_content or "",
        *(call.function.arguments for call in message.tool_calls or ()),
    ]


def _plain(message: ChatMessage, arguments_as_text: bool, has_absent_contents: bool) -> dict[str, object]:
    """The message for a chat template: without nulls, and with role `system` for `developer`.

    `has_absent_contents`: the template asks whether a message with calls has none.
    """
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, object] = {"role": role, "content": message.content or ""}
    if has_absent_contents and message.tool_calls and not message.content:
        plain["content"] = None
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [call.for_template(arguments_as_text) for call in message.tool_calls]
    return plain
