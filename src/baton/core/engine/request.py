"""A request: what the client asked for (immutable) and which phase it is in (one field, one table).

Each choice of `n > 1` is a request of its own. Its siblings name choice 0 as their `leader` and share its prompt blocks.

    WAITING ──admit──▶ RUNNING_PREFILL ──prefill planned──▶ RUNNING_DECODE ──finish──▶ FINISHED
      │ ▲                   │                                   │                       ▲ ▲
      │ │                   └────────── order to stop ──────────┤ (or, from decode only,│ │
      │ │                                                       │  to yield)            │ │
      │ │                                                       ▼                       │ │
      │ └─────────────── ack of a preemption ───────────── PREEMPTING ── ack of an end ─┘ │
      │                                                         └── finish in flight ─────┤
      └─────────────────────────────────── abort ─────────────────────────────────────────┘

Where one instance prefills for another, the request is in a phase of its own on each:

    P   RUNNING_PREFILL ──last chunk planned──▶ HANDING_OVER ──order to stop──▶ PREEMPTING
    D   WAITING ──blocks leased──▶ RECEIVING ──adopt──▶ RUNNING_DECODE
                                       └──order to stop──▶ PREEMPTING    until the transfer is fenced: the ack

Where KV of it lies in host memory, that is copied into its blocks before it runs:

    WAITING ──blocks taken, copy ordered──▶ RESTORING ──admit──▶ RUNNING_PREFILL
                                                └──order to stop──▶ PREEMPTING    until the copy is over or fenced: the ack

A request whose row the executor does not know (held for a prefill that was not granted, or adopted and not begun)
finishes at once.

A phase says what the scheduler will plan *next* for the request: a prefill whose last chunk is planned, though still in
flight, is decoding. PREEMPTING means that the executor (or, before it knew of the row, the transfer) was ordered to let go
of the slot and has not acknowledged it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Annotated, NewType

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from baton.core.bounds import (
    ALLOWED_TOKENS_MAX,
    ALTERNATIVES_MAX,
    BAD_WORD_TOKENS_MAX,
    CONSTRAINT_CHARS_MAX,
    FLOAT_MAX,
    INT32_MAX,
    LISTED_MAX,
    MASK_DIGEST_BYTES,
    MOVE_US_PER_TOKEN_MAX,
    PROMPT_ALTERNATIVES_MAX,
    REQUEST_ID_CHARS_MAX,
    SALT_BYTES_MAX,
    Address,
    Count,
    Finite,
    Long,
    Name,
    NotNegative,
    Share,
)
from baton.core.state_machine import FastEnum

RequestId = NewType("RequestId", str)
Serial = NewType("Serial", int)
"""A worker's number for an accepted request; never reused while the worker runs."""

Tokens = npt.NDArray[np.int32]
Prompt = np.ndarray[tuple[int], np.dtype[np.int32]]
"""Tokens, as a type of its own: the encoding of a group leaves out a follower's prompt."""

NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
NO_TOKENS.setflags(write=False)


class Phase(IntEnum):
    WAITING = 0
    RUNNING_PREFILL = 1
    RUNNING_DECODE = 2
    RECEIVING = 3
    RESTORING = 4
    HANDING_OVER = 5
    PREEMPTING = 6
    FINISHED = 7


class Move(FastEnum):
    """Events that move a request from one phase to another."""

    ADMIT = "admit"
    PREFILL_PLANNED = "prefill planned"
    LEASE = "blocks leased"
    RESTORE = "copy from host ordered"
    ADOPT = "adopt"
    HAND_OVER = "prefill planned, to be handed over"
    PREEMPT = "order to yield"
    ORDER_STOP = "order to stop"
    ACK_PREEMPTION = "preemption acknowledged"
    ACK_END = "end acknowledged"
    FINISH = "finish"


TRANSITIONS: dict[tuple[Phase, Move], Phase] = {
    (Phase.WAITING, Move.ADMIT): Phase.RUNNING_PREFILL,
    (Phase.WAITING, Move.FINISH): Phase.FINISHED,
    (Phase.WAITING, Move.LEASE): Phase.RECEIVING,
    (Phase.WAITING, Move.RESTORE): Phase.RESTORING,
    (Phase.RESTORING, Move.ADMIT): Phase.RUNNING_PREFILL,
    (Phase.RESTORING, Move.ORDER_STOP): Phase.PREEMPTING,
    (Phase.RESTORING, Move.FINISH): Phase.FINISHED,
    (Phase.RUNNING_PREFILL, Move.PREFILL_PLANNED): Phase.RUNNING_DECODE,
    (Phase.RUNNING_PREFILL, Move.HAND_OVER): Phase.HANDING_OVER,
    (Phase.RUNNING_PREFILL, Move.ORDER_STOP): Phase.PREEMPTING,
    (Phase.RUNNING_PREFILL, Move.FINISH): Phase.FINISHED,
    (Phase.RUNNING_DECODE, Move.ORDER_STOP): Phase.PREEMPTING,
    (Phase.RUNNING_DECODE, Move.PREEMPT): Phase.PREEMPTING,
    (Phase.RUNNING_DECODE, Move.FINISH): Phase.FINISHED,
    (Phase.RECEIVING, Move.ADOPT): Phase.RUNNING_DECODE,
    (Phase.RECEIVING, Move.ORDER_STOP): Phase.PREEMPTING,
    (Phase.RECEIVING, Move.FINISH): Phase.FINISHED,
    (Phase.HANDING_OVER, Move.ORDER_STOP): Phase.PREEMPTING,
    (Phase.PREEMPTING, Move.FINISH): Phase.FINISHED,
    (Phase.PREEMPTING, Move.ACK_PREEMPTION): Phase.WAITING,
    (Phase.PREEMPTING, Move.ACK_END): Phase.FINISHED,
}


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """Scheduler and executor disagreed about this request; it may be retried."""
    RESCHEDULE = "pd_reschedule"
    """The attempt ended here with everything generated so far; it may continue elsewhere."""
    CONSTRAINT_FAILED = "constraint_failed"
    """The matcher of its constraint gave up, such as at a limit of its own. It would elsewhere too."""


class MaskReference(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """The mask of one version of a backend in the middle of an answer. A version with the same mask may continue it."""

    version: Name
    outputs: Count
    """The mask is the one after this many outputs."""
    digest: Annotated[bytes, Meta(max_length=MASK_DIGEST_BYTES)]
    """Empty: no instance with that mask is left, so every version may continue the answer that permits its outputs."""


class Constraint(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """What an answer must match. Its matcher is derived from this and the delivered tokens, and never travels."""

    backend: Name
    """The name of what compiles and matches it, such as `llguidance`."""
    version: Name | MaskReference
    """Of the backend that compiled it in the front end. Another version may mask other tokens; in the middle of an answer, a
    router that was refused for that says what to compare."""
    source: Annotated[str, Meta(max_length=CONSTRAINT_CHARS_MAX)]
    """The grammar in the backend's own form."""

    @property
    def began_under(self) -> str:
        """The version whose masks the answer has followed so far."""
        return self.version if isinstance(self.version, str) else self.version.version


_BadWord = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=BAD_WORD_TOKENS_MAX)]


class Sampling(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Sampling parameters. The defaults leave the distribution unmodified.

    Draws are keyed by (seed, choice, position), never by a running generator, so that the n-th token does not depend
    on batching, preemption or moves.
    """

    seed: int
    choice: Count = 0
    temperature: NotNegative = 1.0
    """0 is greedy."""
    top_k: Count = 0
    """0 keeps every candidate."""
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=FLOAT_MAX)] = 1.0
    """Over prompt and outputs, as in `transformers`."""
    presence_penalty: Finite = 0.0
    """Over outputs only, as in the OpenAI API."""
    frequency_penalty: Finite = 0.0
    logit_bias: Annotated[tuple[tuple[Count, Finite], ...], Meta(max_length=LISTED_MAX)] = ()
    stop_token_ids: Annotated[tuple[Count, ...], Meta(max_length=LISTED_MAX)] = ()
    """Includes the end-of-text ids, unless the client asked to ignore them."""
    min_tokens: Count = 0
    """No stop token may be drawn before this many outputs."""
    logprobs: Annotated[int, Meta(ge=0, le=ALTERNATIVES_MAX)] | None = None
    """Alternatives to report for each chosen token; None reports no log-probabilities."""
    constraint: Constraint | None = None
    allowed_token_ids: Annotated[tuple[Count, ...], Meta(max_length=ALLOWED_TOKENS_MAX)] = ()
    """The only tokens that may be drawn; empty: all."""
    bad_words: Annotated[tuple[_BadWord, ...], Meta(max_length=LISTED_MAX)] = ()
    """Sequences of tokens that the outputs never contain: their last token is not drawn after the others."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=PROMPT_ALTERNATIVES_MAX)] | None = None
    """Alternatives to report for each token of the prompt but the first; None reports none. They come before the first
    output or with it, so that a request with outputs has reported them."""

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens may never be drawn, whatever the logits are."""
        return bool(self.allowed_token_ids or self.bad_words) or self.constraint is not None


def named_tokens(sampling: Sampling) -> Iterator[int]:
    """Every token id that sampling parameters name."""
    yield from sampling.stop_token_ids
    yield from (token for token, _ in sampling.logit_bias)
    yield from sampling.allowed_token_ids
    for word in sampling.bad_words:
        yield from word


_Id = Annotated[RequestId, Meta(max_length=REQUEST_ID_CHARS_MAX)]


class Submission(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, eq=False, gc=False):
    """One choice of a client's request, as submitted to a worker. Never changes after acceptance."""

    request_id: _Id
    prompt: Prompt
    sampling: Sampling
    max_tokens: Long | None = None
    salt: Annotated[bytes, Meta(max_length=SALT_BYTES_MAX)] = b""
    """KV is shared only between requests with the same salt (tenant, and the client's own `cache_salt`)."""
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] = 0
    """Lower numbers go first, and are never preempted for a higher number."""
    leader: _Id | None = None
    """The choice whose prompt blocks this one shares; it comes earlier in the same group."""
    generated: Tokens = NO_TOKENS
    """Outputs that the client already has, from instances that ran it before; they count towards `max_tokens`."""
    prefill_at: Address = ""
    """The peer to prefill it, if the sender has chosen one; empty: any."""
    arrived_us: Long = 0
    """Unix time at which a front end took it, set once: among equal priorities, the earlier goes first everywhere. Choices
    of one client's request are one microsecond apart."""
    preemptions: Long = 0
    """How often it was preempted on instances that ran it before; with those here they count towards `max_preemptions`."""
    resumes_in_place: bool = False
    """Never end it for want of blocks: preempted, it returns to this instance's own queue, whatever `on_preempt` says."""
    prefills_in_place: bool = False
    """Ask no peer for its prefill: it is computed where it decodes."""
    move_us_per_token: Annotated[float, Meta(ge=0, le=MOVE_US_PER_TOKEN_MAX)] | None = None
    """How long moves after a preemption take, as the sending router has last measured; None: it has measured none."""

    @property
    def known(self) -> Tokens:
        """All tokens it starts with: the prompt, then the outputs generated elsewhere."""
        return np.concatenate((self.prompt, self.generated)) if len(self.generated) else self.prompt

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def seniority(self) -> tuple[int, int]:
        """Its place in every queue: the lowest goes first. The same at every instance and router."""
        return self.priority, self.arrived_us


class PromptLogprobs(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, eq=False, gc=False):
    """Log-probabilities of consecutive tokens of one row's prompt, one line per token, each given the tokens before it."""

    row: int
    """Index into the result's rows."""
    begin: int
    """Position of the first of these tokens in the prompt; at least 1, since nothing precedes the first token."""
    chosen: npt.NDArray[np.float32]
    """[tokens]"""
    ranks: npt.NDArray[np.int32]
    """[tokens]: 1 for the most likely token of the vocabulary"""
    top_ids: npt.NDArray[np.int32]
    """[tokens, alternatives], by falling probability"""
    top: npt.NDArray[np.float32]
    """[tokens, alternatives]"""

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.begin + len(self.chosen)


def frozen_tokens(tokens: npt.ArrayLike) -> Tokens:
    """A private, read-only int32 copy, which no caller can change."""
    array = np.array(tokens, dtype=np.int32, copy=True).reshape(-1)
    array.setflags(write=False)
    return array
