"""Requests of clients in a fuzzed world and how each client behaves: drawn from the seed, one random stream per request.

Owns only the draw. Each request has its own stream, so leaving some requests out (when a failure is shrunk) does not change
the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.request import Constraint, RequestId, Sampling, Submission, frozen_tokens
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource
from baton.sim.faults import FaultRates, log_uniform_us

VOCABULARY = 32
"""Small, so that stop tokens, token 0 among them, are drawn often."""
TEMPLATES = 4
UNLIMITED_SHARE = 0.05
STOP_STRING_SHARE = 0.15
LOGPROBS = (None, None, None, None, 0, 2)
"""Alternatives for each token; None: no log-probabilities."""
PROMPT_LOGPROBS = (None, 0, 3)
"""The same for tokens of the prompt; the first choice reports them."""
CONSTRAINED_SHARE, ALLOWED_SHARE, BAD_WORDS_SHARE = 0.5, 0.6, 0.7
"""In a world with restricted requests: so many have a constraint; up to so many allowed tokens; up to so many bad words."""
SALTS = (b"", b"", b"", b"tenant")


@dataclass(frozen=True, slots=True)
class ClientRequest:
    index: int
    prompt: tuple[int, ...]
    choices: int
    sampling: Sampling
    max_tokens: int | None
    """None: up to the context length."""
    salt: bytes
    priority: int
    impossible: bool
    think_us: int
    """Pause after the user's previous request."""
    patience_us: int | None
    """Time until the client disconnects; None: it waits for the end."""
    stop_after: int | None
    """The number of tokens after which the client finds a stop string."""
    reads_every_us: int | None
    """Interval at which a slow client reads one burst; None: it reads at once."""

    def group(self, before: tuple[int, ...], now_us: int) -> tuple[Submission, ...]:
        """`before`: the tokens of the user's conversation so far."""
        prompt = frozen_tokens(np.array(before + self.prompt, dtype=np.int32))
        leader = RequestId(f"{self.index}.0")
        return tuple(
            Submission(
                request_id=RequestId(f"{self.index}.{choice}"),
                prompt=prompt,
                sampling=_choice(self.sampling, choice),
                max_tokens=self.max_tokens,
                salt=self.salt,
                priority=self.priority,
                leader=leader if choice else None,
                arrived_us=now_us + choice,
            )
            for choice in range(self.choices)
        )


def _choice(sampling: Sampling, choice: int) -> Sampling:
    asked = None if choice else sampling.prompt_logprobs  # the first choice reports them
    return msgspec.structs.replace(sampling, choice=choice, prompt_logprobs=asked)


def draw_ask(stream: random.Random, index: int, config: WorkerConfig, rates: FaultRates, seed: int) -> ClientRequest:
    """Draw one request. All values are drawn even if unused, so that a fault class left out does not change the rest."""
    longest = config.sequence_tokens_max
    prompt_tokens = stream.randint(1, min(24, max(1, longest // 2)))
    room = longest - prompt_tokens
    max_tokens = stream.choice((*(stream.randint(1, min(12, room)) for _ in range(4)), stream.randint(1, room)))
    prompt = _prompt(stream, prompt_tokens, seed)
    sampling = Sampling(
        seed=stream.randrange(1 << 32),
        temperature=stream.choice((0.0, 1.0)),
        stop_token_ids=tuple(sorted(stream.sample(range(VOCABULARY), stream.choice((0, 0, 1, 2))))),
        min_tokens=stream.choice((0, 0, 0, min(3, max_tokens))),
    )
    choices = stream.choice((1, 1, 1, 1, 2, 3)) if config.waiting_max >= 3 else 1
    leaves, patience_us = stream.random(), log_uniform_us(stream, 200, 300_000)
    reads_slowly, reads_every_us = stream.random(), stream.randrange(5_000, 60_000)
    finds_stop, stop_after = stream.random(), stream.randint(1, 8)
    nonsense, kind = stream.random(), stream.randrange(4)
    ask = ClientRequest(
        index=index,
        prompt=prompt,
        choices=choices,
        sampling=sampling,
        max_tokens=None if stream.random() < UNLIMITED_SHARE else max_tokens,
        salt=stream.choice(SALTS),
        priority=stream.choice((0, 0, 0, 1, 5)),
        impossible=False,
        think_us=stream.randrange(40_000),
        patience_us=patience_us if leaves < rates.disconnect else None,
        stop_after=stop_after if finds_stop < STOP_STRING_SHARE else None,
        reads_every_us=reads_every_us if reads_slowly < rates.slow_reader else None,
    )
    logprobs = stream.choice(LOGPROBS)
    ask = ask if logprobs is None else replace(ask, sampling=msgspec.structs.replace(sampling, logprobs=logprobs))
    return _made_impossible(ask, kind, longest) if nonsense < rates.nonsense else ask


def restricted(stream: random.Random, ask: ClientRequest) -> ClientRequest:
    """The same request, perhaps with a constraint, allowed tokens or bad words. They permit a token everywhere."""
    kind, seed = stream.random(), stream.randrange(1 << 32)
    allowed = tuple(sorted(stream.sample(range(VOCABULARY), 12)))
    words = tuple(tuple(stream.randrange(VOCABULARY) for _ in range(stream.randint(1, 2))) for _ in range(6))
    sampling = ask.sampling
    if kind < CONSTRAINED_SHARE:
        source = ScriptedSource(seed, VOCABULARY, sampling.stop_token_ids).text()
        constraint = Constraint(ScriptedBackend.name, ScriptedBackend.version, source)
        sampling = msgspec.structs.replace(sampling, constraint=constraint, min_tokens=0)
    elif kind < ALLOWED_SHARE:
        sampling = msgspec.structs.replace(sampling, allowed_token_ids=allowed, min_tokens=0)
    elif kind < BAD_WORDS_SHARE:
        sampling = msgspec.structs.replace(sampling, bad_words=words)
    return replace(ask, sampling=sampling)


def with_prompt_logprobs(ask: ClientRequest, stream: random.Random) -> ClientRequest:
    """Drawn from a stream of its own: it changes nothing else of a world."""
    asked = stream.choice(PROMPT_LOGPROBS)
    return ask if asked is None else replace(ask, sampling=msgspec.structs.replace(ask.sampling, prompt_logprobs=asked))


def _made_impossible(ask: ClientRequest, kind: int, longest: int) -> ClientRequest:
    tokens, max_tokens = ((0, 4), (longest, 1), (1, longest + 1), (longest + 3, 2))[kind]
    return replace(ask, prompt=(3,) * tokens, max_tokens=max_tokens, impossible=True)


def _prompt(stream: random.Random, tokens: int, seed: int) -> tuple[int, ...]:
    """Prompts share beginnings, so that the prefix cache gets hits."""
    shared = stream.randint(0, tokens)
    base = seed + stream.randrange(TEMPLATES) * 17
    begins = tuple((base + at * at) % VOCABULARY for at in range(shared))
    return begins + tuple(stream.randrange(VOCABULARY) for _ in range(tokens - shared))


def probe_ask(index: int, prompt: tuple[int, ...] = (1, 2, 3)) -> ClientRequest:
    """A plain request that must be answered in full."""
    return ClientRequest(
        index=index,
        prompt=prompt,
        choices=1,
        sampling=Sampling(seed=index, temperature=0.0),
        max_tokens=3,
        salt=b"",
        priority=0,
        impossible=False,
        think_us=0,
        patience_us=None,
        stop_after=None,
        reads_every_us=None,
    )
