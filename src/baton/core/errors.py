"""Errors of three kinds: ours (a broken law), the client's (a refusal), the world's (an event, not an exception).

BatonError
├── InvariantViolated        a law of ours is broken; never caught to carry on
│   └── IllegalTransition    a phase was asked to move along an edge that does not exist
└── Refused                  the client asked for what cannot be; always reaches the client
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BatonError(Exception):
    """Root of every exception that Baton raises on purpose."""


class InvariantViolated(BatonError):
    """A law of ours does not hold. Raised instead of `assert`, which `python -O` removes."""


class IllegalTransition(InvariantViolated):
    """A state machine was driven along an edge that its table does not have."""


class RefusalCode(StrEnum):
    """Why a request was not accepted. The API maps these to HTTP statuses."""

    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_EXCEEDED = "context_length_exceeded"
    POOL_EXCEEDED = "kv_pool_exceeded"
    NOT_IN_VOCABULARY = "not_in_vocabulary"
    QUEUE_FULL = "queue_full"
    GROUP_TOO_LARGE = "group_too_large"
    TOO_MANY_CHOICES = "too_many_choices"
    """More than its tenant may ever have open."""
    DUPLICATE_ID = "duplicate_id"
    DRAINING = "draining"
    WRONG_ROLE = "wrong_role"
    NOTHING_LEFT = "nothing_left"
    """What was generated elsewhere is the whole answer already."""
    NO_INSTANCE = "no_instance"
    """A router has nobody to give it to."""
    RATE_LIMITED = "rate_limited"
    """The tenant has used up what it may."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal as a value: it crosses processes before it becomes an exception."""

    code: RefusalCode
    message: str
    retry_after_s: int | None = None


class Refused(BatonError):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
