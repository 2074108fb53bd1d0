"""What a request may cost at most, and what a key has open: units of choices × answer tokens × (1 + log-probabilities).

A prompt counts as often as the answer repeats it: a token is one unit in an echoed text and one in `prompt_token_ids`, and
1 + log-probabilities in each list of them. A unit is about what the front end keeps and writes for one token. Pure; counts
what it is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.api.engine import UNKNOWN_CONTEXT, EngineInfo
from baton.api.errors import ApiError, refused
from baton.api.schema import ChatBody, CompletionBody
from baton.core.engine.request import Submission
from baton.core.errors import Refusal, RefusalCode


def cost_of(group: Sequence[Submission], info: EngineInfo, prompt_units: int = 0) -> int:
    """Units of one request. An answer without a limit may be as long as the context allows.

    `prompt_units`: of what the answer repeats of its prompts.
    """
    return prompt_units + sum(_answer_tokens(one, info) * (1 + (one.sampling.logprobs or 0)) for one in group)


def prompt_units_of(body: ChatBody | CompletionBody, prompts: Sequence[Sequence[int]]) -> int:
    """Units of what an answer repeats of its prompts: a completion in every choice, a chat once beside its choices."""
    copies = (body.n or 1) if isinstance(body, CompletionBody) else 1
    return copies * _units_of_a_prompt_token(body) * sum(len(prompt) for prompt in prompts)


def _units_of_a_prompt_token(body: ChatBody | CompletionBody) -> int:
    """In one copy of the prompt. A completion with both kinds of log-probabilities has them twice."""
    units = 1 if body.return_token_ids else 0
    lists = [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo:
        units += 1
        lists.append(body.logprobs)
    return units + sum(1 + count for count in lists if count is not None)


def _answer_tokens(submission: Submission, info: EngineInfo) -> int:
    if submission.max_tokens is not None:
        return submission.max_tokens
    # A router without instances does not know the context; the instance that comes will bound the answer.
    return 1 if info.context_tokens == UNKNOWN_CONTEXT else max(1, info.context_tokens - len(submission.prompt))


class RequestCosts:
    def __init__(self, request_max: int, tenant_max: int) -> None:
        self._request_max = request_max
        self._tenant_max = tenant_max
        self._open: dict[str, int] = {}

    def open(self, tenant: str, units: int) -> None:
        """Count a request; raises a 400 when it costs too much, a 429 when its tenant has too much open."""
        if units > self._request_max:
            message = (
                f"The request may cost {units} units (choices × answer tokens × (1 + log-probabilities), and "
                "prompt tokens in the same way as often as the answer repeats them); "
                f"at most {self._request_max} are allowed. Ask for fewer choices, tokens or log-probabilities"
            )
            raise ApiError(400, message, param="max_tokens", code="request_too_costly")
        held = self._open.get(tenant, 0)
        if held and held + units > self._tenant_max:
            message = f"answers of {held} units of this key are open, {units} more asked for; it may have {self._tenant_max}"
            raise refused(Refusal(RefusalCode.RATE_LIMITED, message, 1), None)
        self.resume(tenant, units)

    def resume(self, tenant: str, units: int) -> None:
        """Count a request that was accepted before; it is not refused."""
        self._open[tenant] = self._open.get(tenant, 0) + units

    def close(self, tenant: str, units: int) -> None:
        left = self._open[tenant] - units
        if left:
            self._open[tenant] = left
        else:
            del self._open[tenant]

    def held(self, tenant: str) -> int:
        return self._open.get(tenant, 0)
