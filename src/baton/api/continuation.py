"""Continuing an answer that another instance began, for a router that proved itself and sends the tokens so far.

Owns the checks of those tokens and what becomes of each choice: it is submitted with them, or is complete already and only
ends. Texts continue where the client's ends (`ChoiceReader.continue_after`). A stream has what the client lacks; an answer
that is not streamed is the whole one, unless the router says that characters of it were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from baton.api.engine import EngineInfo
from baton.api.errors import ApiError, invalid
from baton.api.schema import ContinuationFields, GenerateBody
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import FinishReason, RequestId, Submission, frozen_tokens

IDS, SENT = "generated_token_ids", "sent_characters"


class RequestProofs(Protocol):
    """Checks that the sender of an HTTP request holds the cluster key."""

    @property
    def header(self) -> str: ...

    def why_not(self, method: str, path: str, body: bytes, proof: str) -> str | None:
        """Why the header's value is no proof for this request; None when it is one, which uses it up."""


def bad_proof(header: str, reason: str) -> ApiError:
    return invalid(header, f"{header} does not hold: {reason}", "bad_cluster_proof")


@dataclass(frozen=True, slots=True)
class BegunChoices:
    """The choices of one body, where some may have begun elsewhere."""

    group: list[Submission]
    """Those that an engine is to run."""
    readers: list[ChoiceReader]
    over: Mapping[int, FinishReason] = field(default_factory=dict)
    """Those that are complete already, by index."""


def begin(
    body: GenerateBody, group: list[Submission], make_readers: Callable[[], list[ChoiceReader]], info: EngineInfo
) -> BegunChoices:
    if not isinstance(body, ContinuationFields) or body.generated_token_ids is None:
        if isinstance(body, ContinuationFields) and body.sent_characters is not None:
            raise invalid(SENT, f"'{SENT}' needs '{IDS}'")
        return BegunChoices(group, make_readers())
    ids, readers = body.generated_token_ids, make_readers()
    sent = _sent_of(body, len(group))
    if body.sent_characters is not None and any(reader.has_parts for reader in readers):
        raise invalid(SENT, f"'{SENT}' cannot be given for answers with tools or reasoning, whose text is not all content")
    if any(ids) and any(one.sampling.prompt_logprobs is not None for one in group):
        raise invalid(
            IDS, f"'{IDS}' cannot be given with log-probabilities of the prompt, which came before the first token"
        )
    if len(ids) != len(group):
        raise invalid(IDS, f"'{IDS}' is for {len(ids)} choices; this body has {len(group)}")
    over: dict[int, FinishReason] = {}
    for index, (submission, tokens) in enumerate(zip(group, ids, strict=True)):
        ended = _check_tokens(submission, tokens, info, index)
        shown = readers[index].continue_after(tokens, sent[index])
        if (had := sent[index]) is not None and had > shown:
            _check_sent(make_readers()[index], tokens, had, index)
        if ended is not None or readers[index].stopped_by_string:
            over[index] = ended or FinishReason.STOP
    return BegunChoices(_continued(group, ids, over), readers, over)


def _sent_of(body: ContinuationFields, choices: int) -> Sequence[int | None]:
    sent = body.sent_characters
    if sent is None:
        streams = isinstance(body, GenerateBody) and body.stream
        return [None if streams else 0] * choices
    if len(sent) != choices:
        raise invalid(SENT, f"'{SENT}' is for {len(sent)} choices; this body has {choices}")
    return sent


def _check_tokens(submission: Submission, tokens: Sequence[int], info: EngineInfo, index: int) -> FinishReason | None:
    """How the answer ended with these tokens; None when it goes on."""
    for token in tokens:
        if token >= info.vocabulary:
            raise invalid(IDS, f"'{IDS}' has token id {token}; the vocabulary has {info.vocabulary} ids")
    limit, limited_by = _tokens_max(submission, info)
    if len(tokens) > limit:
        raise invalid(
            IDS, f"'{IDS}' has {len(tokens)} tokens for choice {index}, more than the {limit} that {limited_by} allows"
        )
    sampling = submission.sampling
    stops = [at for at, token in enumerate(tokens) if token in sampling.stop_token_ids and at >= sampling.min_tokens]
    if stops and stops[0] < len(tokens) - 1:
        raise invalid(IDS, f"'{IDS}' of choice {index} goes on after the stop token {tokens[stops[0]]}")
    if stops:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) == limit else None


def _tokens_max(submission: Submission, info: EngineInfo) -> tuple[int, str]:
    if submission.max_tokens is not None:
        return submission.max_tokens, "max_tokens"
    return max(0, min(info.context_tokens, info.blocks * info.block_size) - len(submission.prompt)), "the context"


def _check_sent(reader: ChoiceReader, tokens: tuple[int, ...], sent: int, index: int) -> None:
    """Text that is held back here (half a stop string) may have been sent elsewhere; more than all of it cannot."""
    reader.continue_after(tokens, 0)
    most = len(reader.cancel().text)
    if sent > most:
        raise invalid(SENT, f"'{SENT}' of choice {index} is {sent}; its tokens have {most} characters")


def _continued(
    group: Sequence[Submission], ids: Sequence[Sequence[int]], over: Mapping[int, FinishReason]
) -> list[Submission]:
    """The choices that go on. The first of them with a prompt leads the others with the same prompt."""
    leaders: dict[RequestId, RequestId] = {}
    running = []
    for index, submission in enumerate(group):
        if index in over:
            continue
        prompt = submission.request_id if submission.leader is None else submission.leader
        leader = leaders.setdefault(prompt, submission.request_id)
        running.append(
            replace(
                submission,
                leader=None if leader == submission.request_id else leader,
                generated=frozen_tokens(ids[index]),
            )
        )
    return running
