"""Prepares a client's request: validation, chat template, tokenising, submissions. Runs in a thread: tokenising can be long.

The result depends only on the OriginalRequest, the model and the engine's limits, so another process prepares the same.
Stateless; does not call the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from baton.api.chat_responses import ChatWriter
from baton.api.completion_responses import CompletionWriter
from baton.api.continuation import BegunChoices, begin
from baton.api.errors import ApiError, invalid
from baton.api.model_text import ModelText, TemplateRefused
from baton.api.original_request import BadOrigin, OriginalRequest
from baton.api.responses import ResponseHeader, ResponseWriter
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
    check_stream_options,
    parse,
)
from baton.api.stop_strings import StopScanner
from baton.api.submissions import RequestOwner, RequestRules, group_of
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import FinishReason, Submission

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


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
    over: Mapping[int, FinishReason]
    """Of a continued answer: the choices that are complete already, which are not in the group."""


@dataclass(frozen=True, slots=True)
class RequestPreparer:
    text: ModelText
    policy: Callable[[], RequestRules]
    """Called for each body, since an engine's limits may change at run time."""
    model_names: tuple[str, ...]

    def prepare(self, origin: OriginalRequest, proven: bool = False) -> PreparedRequest:
        """`proven`: the sender holds the cluster key, so the body may continue an answer."""
        if origin.path == CHAT_PATH:
            return self._chat(origin, ContinuedChatBody if proven else ChatBody)
        if origin.path == COMPLETION_PATH:
            return self._completion(origin, ContinuedCompletionBody if proven else CompletionBody)
        raise BadOrigin(f"nothing is prepared for {origin.path}")

    def _chat(self, origin: OriginalRequest, kind: type[ChatBody]) -> PreparedRequest:
        now_s, asker = time.perf_counter(), RequestOwner(origin.tenant, origin.request_id)
        body = parse(origin.raw, kind, (check_stream_options, check_chat))
        self.check_model(body.model)
        prompt_ids = [self.chat_ids(body, body.messages)]
        rules = self.policy()
        group = group_of(body, prompt_ids, rules, asker, origin.seed, origin.arrived_us)
        heading = self._heading("chatcmpl", body, origin, prompt_ids)
        # A chat answer is a text of its own, so its leading space does not continue the prompt.
        readers = partial(self._readers, body, group, [()], offsets=[0])
        writer = ChatWriter(heading, self.text.piece, bool(body.logprobs))
        return _prepared(body, origin, now_s, begin(body, group, readers, rules.info), prompt_ids, writer)

    def _completion(self, origin: OriginalRequest, kind: type[CompletionBody]) -> PreparedRequest:
        now_s, asker = time.perf_counter(), RequestOwner(origin.tenant, origin.request_id)
        body = parse(origin.raw, kind, (check_stream_options, check_completion))
        self.check_model(body.model)
        prompt_ids = [self._prompt_ids(prompt, body.add_special_tokens) for prompt in body.prompt]
        rules = self.policy()
        group = group_of(body, prompt_ids, rules, asker, origin.seed, origin.arrived_us)
        heading = self._heading("cmpl", body, origin, prompt_ids)
        echoes = [self._echo(prompt) for prompt in body.prompt] if body.echo else []
        offsets = [len(echo) for echo in echoes] or [0] * len(prompt_ids)
        readers = partial(self._readers, body, group, prompt_ids, offsets)
        writer = CompletionWriter(heading, self.text.piece, body.logprobs is not None, echoes)
        return _prepared(body, origin, now_s, begin(body, group, readers, rules.info), prompt_ids, writer)

    def chat_ids(self, body: ChatBody | TokenizeBody, messages: Sequence[ChatMessage]) -> list[int]:
        try:
            rendered = self.text.render_chat(
                [_plain(message) for message in messages],
                add_generation_prompt=body.add_generation_prompt is not False,
                extra=body.chat_template_kwargs,
            )
        except TemplateRefused as refusal:
            raise invalid("messages", f"'messages': {refusal}") from None
        return self.text.encode(rendered, add_special_tokens=False)  # the template wrote them

    def check_model(self, model: str | None) -> None:
        if model is not None and model not in self.model_names:
            message = f"The model '{model[:200]}' does not exist; this server has '{self.model_names[0]}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _prompt_ids(self, prompt: Prompt, add_special_tokens: bool | None) -> Sequence[int]:
        return self.text.encode(prompt, add_special_tokens is not False) if isinstance(prompt, str) else prompt

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self.text.decode(prompt, skip_special=True)

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
        )

    def _readers(
        self, body: GenerateBody, group: Sequence[Submission], contexts: Sequence[Sequence[int]], offsets: Sequence[int]
    ) -> list[ChoiceReader]:
        n = body.n or 1
        return [
            ChoiceReader(
                index,
                self.text.detokenizer(contexts[index // n], skip_special=body.skip_special_tokens is not False),
                StopScanner(body.stop, bool(body.include_stop_str_in_output)) if body.stop else None,
                frozenset(submission.sampling.stop_token_ids),
                submission.sampling.min_tokens,
                offsets[index // n],
            )
            for index, submission in enumerate(group)
        ]


def _prepared(
    body: ChatBody | CompletionBody,
    origin: OriginalRequest,
    now_s: float,
    begun: BegunChoices,
    prompt_ids: Sequence[Sequence[int]],
    writer: ResponseWriter,
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
        prompt_field="messages" if isinstance(body, ChatBody) else "prompt",
        over=begun.over,
    )


def _includes_usage(body: GenerateBody) -> bool:
    """True also when the bill is requested, since the usage chunk has it."""
    return bool(body.baton_usage or (body.stream_options and body.stream_options.include_usage))


def _plain(message: ChatMessage) -> dict[str, str]:
    """The message for a chat template: without nulls, and with role `system` for `developer`."""
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": message.content or ""}
    return plain if message.name is None else plain | {"name": message.name}
