"""From a checked body to submissions: one for each prompt and choice, all in one group.

Owns the defaults (request, then operator, then the model's generation_config, then neutral), the checks that need the
engine's facts (context, vocabulary), the seed and the salt. Pure: the random seed, the time and the ids are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from msgspec.structs import replace

from baton.api.engine import UNKNOWN_CONTEXT, EngineInfo
from baton.api.errors import ApiError, invalid
from baton.api.sampling_defaults import SamplingDefaults, first_given
from baton.api.schema import ChatBody, CompletionBody, GenerateBody
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.errors import RefusalCode

_GREEDY_BELOW = 1e-5
"""Below this a temperature is greedy: dividing by it would overflow the logits."""
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """The tenant and id of a request."""

    tenant: str
    request_id: str

    def choice_id(self, index: int) -> RequestId:
        """Id unique in the engine, since two tenants may use the same request id. Request ids contain no colon."""
        owner = f"{self.tenant}:" if self.tenant else ""
        return RequestId(f"{owner}{self.request_id}:{index}")


def salt_of(owner: str, cache_salt: str | None) -> bytes:
    """Salt of prefix cache keys. Equal for the same tenant or group and the same `cache_salt`; KV is shared only then."""
    if not owner and cache_salt is None:
        return b""
    inner = b"" if cache_salt is None else blake2b(cache_salt.encode(), digest_size=16).digest()
    return blake2b(owner.encode() + b"\0" + inner, digest_size=16, person=b"baton-kv-salt").digest()


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits and defaults applied to every body."""

    info: EngineInfo
    eos_ids: frozenset[int]
    defaults: SamplingDefaults
    kv_owners: Mapping[str, str] = field(default_factory=dict)
    """Tenant → group, for tenants that share KV."""


def group_of(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Sequence[int]],
    policy: RequestRules,
    asker: RequestOwner,
    random_seed: int,
    arrived_us: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> list[Submission]:
    """Choice j of prompt i is submission i × n + j; its leader is choice 0 of the same prompt.

    Each arrives a microsecond after the one before it, so that they have the same order on every instance.
    """
    max_tokens = max_tokens_of(body)
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise invalid(
            "min_tokens", f"'min_tokens' is {body.min_tokens}, more than the {max_tokens} tokens the answer may have"
        )
    for prompt in prompts:
        check_prompt(prompt, max_tokens, policy.info, body.prompt_field)
    n = body.n or 1
    seed = random_seed if body.seed is None else body.seed & _SEED_MASK
    samplings = [sampling_of(body, policy, seed, choice, bad_words) for choice in range(n)]
    samplings[0] = replace(samplings[0], prompt_logprobs=prompt_logprobs_of(body))  # once for all choices of a prompt
    owner = policy.kv_owners.get(asker.tenant, asker.tenant)
    salt, priority = salt_of(owner, body.cache_salt), body.priority or 0
    group = []
    for i, prompt in enumerate(prompts):
        tokens, length = frozen_tokens(prompt), _answer_tokens(body, len(prompt), policy)
        leader = asker.choice_id(i * n)
        group += [
            Submission(
                asker.choice_id(i * n + j),
                tokens,
                sampling,
                length,
                salt,
                priority,
                leader if j else None,
                arrived_us=arrived_us + i * n + j,
            )
            for j, sampling in enumerate(samplings)
        ]
    return group


def max_tokens_of(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, ChatBody):
        return first_given(body.max_completion_tokens, body.max_tokens)
    return body.max_tokens


def _answer_tokens(body: ChatBody | CompletionBody, prompt_tokens: int, policy: RequestRules) -> int | None:
    """The answer's limit: the client's, or the default one as far as the context has room for it."""
    asked, default = max_tokens_of(body), policy.defaults.max_tokens
    if asked == 0:
        return 1  # drawn, since every request draws, and not shown
    if asked is not None or default is None or policy.info.context_tokens == UNKNOWN_CONTEXT:
        return asked
    return min(max(default, body.min_tokens or 0), policy.info.context_tokens - prompt_tokens)


def check_prompt(prompt: Sequence[int], max_tokens: int | None, info: EngineInfo, field: str) -> None:
    if not prompt:
        raise invalid(field, f"'{field}' is empty", RefusalCode.EMPTY_PROMPT)
    if max(prompt) >= info.vocabulary:
        raise invalid(field, f"'{field}' has token id {max(prompt)}; the vocabulary has {info.vocabulary} ids")
    wanted = len(prompt) + max(1, max_tokens or 1)
    if wanted > info.context_tokens:
        raise over_context(len(prompt), max_tokens, info, field)


def over_context(tokens: int, max_tokens: int | None, info: EngineInfo, field: str, at_least: bool = False) -> ApiError:
    """`at_least`: the prompt was not encoded, since its bytes tell that it has so many tokens or more."""
    has = f"at least {tokens}" if at_least else f"{tokens}"
    asked = "at least 1" if max_tokens is None else f"{max_tokens}"
    message = f"The context has {info.context_tokens} tokens; '{field}' has {has} and the answer {asked}"
    return invalid(field, message, RefusalCode.CONTEXT_EXCEEDED)


def sampling_of(
    body: ChatBody | CompletionBody,
    policy: RequestRules,
    seed: int,
    choice: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> Sampling:
    defaults = policy.defaults
    temperature = first_given(body.temperature, defaults.temperature, 1.0) or 0.0
    return Sampling(
        seed=seed,
        choice=choice,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=max(0, first_given(body.top_k, defaults.top_k) or 0),
        top_p=first_given(body.top_p, defaults.top_p) or 1.0,
        min_p=first_given(body.min_p, defaults.min_p) or 0.0,
        repetition_penalty=first_given(body.repetition_penalty, defaults.repetition_penalty) or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_in_vocabulary_biases(body, policy.info),
        stop_token_ids=_stop_token_ids(body, policy),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs_of(body),
        allowed_token_ids=_allowed_token_ids(body, policy.info),
        bad_words=bad_words,
    )


def logprobs_of(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def prompt_logprobs_of(body: ChatBody | CompletionBody) -> int | None:
    """The alternatives that a prompt's tokens need: those asked for, or those of an answer that repeats its prompt."""
    echoed = body.logprobs if isinstance(body, CompletionBody) and body.echo else None
    asked = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    return max(asked, default=None)


def _in_vocabulary_biases(body: GenerateBody, info: EngineInfo) -> tuple[tuple[int, float], ...]:
    for token_id, _ in body.logit_bias:
        _check_id(token_id, info, "logit_bias")
    return body.logit_bias


def _stop_token_ids(body: GenerateBody, policy: RequestRules) -> tuple[int, ...]:
    for token_id in body.stop_token_ids:
        _check_id(token_id, policy.info, "stop_token_ids")
    eos = frozenset[int]() if body.ignore_eos else policy.eos_ids
    return tuple(sorted(eos | frozenset(body.stop_token_ids)))


def _allowed_token_ids(body: GenerateBody, info: EngineInfo) -> tuple[int, ...]:
    if body.allowed_token_ids:
        _check_id(body.allowed_token_ids[-1], info, "allowed_token_ids")
    return body.allowed_token_ids


def _check_id(token_id: int, info: EngineInfo, field: str) -> None:
    if token_id >= info.vocabulary:
        raise invalid(field, f"'{field}' has token id {token_id}; the vocabulary has {info.vocabulary} ids")
