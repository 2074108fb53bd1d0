"""The requests of a chaos run, drawn from a seed.

Both endpoints, streamed and whole, greedy and seeded, one choice and two, penalties, stop strings, characters of several
bytes, log-probabilities, usage. A stop string is taken out of the answer that comes without it, so that it is met.

One in four carries a constraint (`chaos_constraints`), of each kind in turn. These have no stop string, since what it cuts
need not satisfy anything, and no `ignore_eos` and `min_tokens`, which are refused beside a constraint.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from baton.bench.chaos_constraints import AnswerConstraint, ChaosConstraintKind, draw_constraint

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT_CHARS = (10, 260)
OUTPUT_TOKENS = (8, 160)
STOP_CHARS = 2
CONSTRAINED_EVERY = 4
CONSTRAINED_TOKENS = 320
"""Most constrained answers end before; they and the longest prompt fit the tiny model's context."""
_WORDS = (
    "the",
    "baton",
    "goes",
    "from",
    "hand",
    "to",
    "hand",
    "and",
    "nobody",
    "sees",
    "走",
    "火炬",
    "élan",
    "🏃",
    "🏁",
    "∑",
)
KINDS = tuple(ChaosConstraintKind)
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class ChaosCase:
    """One request that is sent repeatedly."""

    number: int
    path: str
    body: Mapping[str, object]
    wants_stop: bool = False
    """Whether a stop string is still to be added."""
    constraint: AnswerConstraint | None = None

    @property
    def is_streamed(self) -> bool:
        return self.body.get("stream") is True

    @property
    def choices(self) -> int:
        n = self.body.get("n", 1)
        return n if isinstance(n, int) else 1

    def stopped_at(self, text: str) -> ChaosCase:
        """The same case with a stop string from the middle of `text`; unchanged when there is no whole character there."""
        middle = len(text) // 2
        found = text[middle : middle + STOP_CHARS]
        if not found or _BROKEN in found:
            return replace(self, wants_stop=False)
        return replace(self, wants_stop=False, body={**self.body, "stop": [found, "never said"]})


def draw_cases(count: int, seed: int, model: str) -> list[ChaosCase]:
    draws = random.Random(seed)
    opening = _prose(draws, 120)  # a third of the prompts begin with this shared prefix
    return [_draw_case(number, draws, model, opening) for number in range(count)]


def _draw_case(number: int, draws: random.Random, model: str, opening: str) -> ChaosCase:
    kind = KINDS[number // CONSTRAINED_EVERY % len(KINDS)] if number % CONSTRAINED_EVERY == 0 else None
    is_chat = draws.random() < 0.5 or kind is ChaosConstraintKind.CALL
    prompt = (opening if draws.random() < 0.33 else "") + _prose(draws, draws.randint(*PROMPT_CHARS))
    body: dict[str, object] = {
        "model": model,
        "max_tokens": draws.randint(*OUTPUT_TOKENS),
        "return_token_ids": True,
        "baton_usage": True,
        "ignore_eos": draws.random() < 0.75,
        **({"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}),
        **_draw_sampling(draws),
    }
    if draws.random() < 0.35:
        body["n"] = 2
    if draws.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if draws.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    case = ChaosCase(number, CHAT if is_chat else COMPLETIONS, body, wants_stop=draws.random() < 0.25)
    return case if kind is None else _constrained(case, kind, draws)


def _constrained(case: ChaosCase, kind: ChaosConstraintKind, draws: random.Random) -> ChaosCase:
    """The same case with a constraint, and without what is refused beside one or would cut it."""
    constraint = draw_constraint(kind, draws, partial(_prose, draws))
    kept = {name: value for name, value in case.body.items() if name not in ("ignore_eos", "min_tokens")}
    body = {**kept, "max_tokens": CONSTRAINED_TOKENS, **constraint.fields(case.path == CHAT)}
    return replace(case, body=body, wants_stop=False, constraint=constraint)


def _draw_sampling(draws: random.Random) -> dict[str, object]:
    if draws.random() < 0.5:
        return {"temperature": 0}
    sampling: dict[str, object] = {"temperature": 0.9, "seed": draws.randrange(1 << 31), "top_p": 0.95}
    if draws.random() < 0.5:
        sampling |= {"presence_penalty": 0.6, "frequency_penalty": 0.3}
    if draws.random() < 0.3:
        sampling["min_tokens"] = 6
    return sampling


def _prose(draws: random.Random, chars: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < chars:
        words.append(draws.choice(_WORDS))
    return " ".join(words) + " "
