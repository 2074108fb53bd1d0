"""Checks of a submission that could never run, made before any request of its group is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.config import WorkerConfig
from baton.core.engine.request import RequestId, Submission
from baton.core.errors import Refusal, RefusalCode


def refuse_group(group: Sequence[Submission], config: WorkerConfig) -> Refusal | None:
    """The first reason to refuse a group as a whole; None if there is none."""
    seen: list[RequestId] = []
    for submission in group:
        refusal = _refuse(submission, config) or _refuse_name(submission, seen)
        if refusal:
            return refusal
        seen.append(submission.request_id)
    if len(group) > config.waiting_max:
        text = f"the body asks for {len(group)} sequences; the queue takes at most {config.waiting_max}"
        return Refusal(RefusalCode.GROUP_TOO_LARGE, text)
    return None


def _refuse_name(submission: Submission, seen: Sequence[RequestId]) -> Refusal | None:
    if submission.request_id in seen:
        return Refusal(RefusalCode.DUPLICATE_ID, f"the request id {submission.request_id!r} is used twice")
    if submission.leader is not None and submission.leader not in seen:
        return Refusal(RefusalCode.DUPLICATE_ID, f"the leader {submission.leader!r} does not come before its follower")
    return None


def _refuse(submission: Submission, config: WorkerConfig) -> Refusal | None:
    prompt, asked = len(submission.prompt), submission.max_tokens
    if prompt == 0:
        return Refusal(RefusalCode.EMPTY_PROMPT, "the prompt is empty")
    if len(submission.generated) and (refusal := _refuse_continuation(submission)):
        return refusal
    if refusal := refuse_constraint(submission, config.constraint_backends):
        return refusal
    wanted = submission.known_tokens + 1 if asked is None else prompt + asked
    made_of = f"{prompt} in the prompt" + ("" if asked is None else f" and {asked} to generate (max_tokens)")
    if wanted > config.context_tokens:
        text = f"{wanted} tokens ({made_of}) are more than the context length of {config.context_tokens}"
        return Refusal(RefusalCode.CONTEXT_EXCEEDED, text)
    if wanted > config.pool_tokens:
        text = (
            f"{wanted} tokens ({made_of}) are more than the whole KV pool of {config.pool_tokens} "
            f"({config.blocks} blocks of {config.block_size})"
        )
        return Refusal(RefusalCode.POOL_EXCEEDED, text)
    return None


def _refuse_continuation(submission: Submission) -> Refusal | None:
    """Why no token can follow the outputs generated elsewhere."""
    generated, asked, sampling = submission.generated, submission.max_tokens, submission.sampling
    if asked is not None and len(generated) >= asked:
        text = f"{len(generated)} tokens were generated elsewhere, and max_tokens is {asked}"
        return Refusal(RefusalCode.NOTHING_LEFT, text)
    if int(generated[-1]) in sampling.stop_token_ids and len(generated) > sampling.min_tokens:
        return Refusal(RefusalCode.NOTHING_LEFT, "what was generated elsewhere ends with a stop token")
    return None


def refuse_constraint(submission: Submission, backends: tuple[tuple[str, str], ...]) -> Refusal | None:
    """Why the constraint cannot be enforced with these backends, each a name and a version.

    Another version takes a request from its beginning. One in mid-answer it refuses: it may find another next token than
    the version that began it. One that may be continued here has this instance's version when it comes here
    (`executor.constraints.version_skew`).
    """
    constraint = submission.sampling.constraint
    if constraint is None:
        return None
    versions = [version for name, version in backends if name == constraint.backend]
    if not versions:
        text = f"this instance cannot enforce constraints of {constraint.backend}"
        return Refusal(RefusalCode.NO_BACKEND, text)
    if len(submission.generated) and constraint.began_under not in versions:
        text = f"the answer began under {constraint.backend} {constraint.began_under}, and this instance has {versions[0]}"
        return Refusal(RefusalCode.OTHER_BACKEND_VERSION, text)
    return None
