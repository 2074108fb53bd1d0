"""Errors of Baton itself (a broken law) and of the client (a refusal). Failures of the outside world are events.

BatonError
├── InvariantViolated        a law is broken; never caught to continue
│   └── IllegalTransition    a phase was asked to move along an edge that does not exist
├── SetupError               what the operator asked for cannot be had; starting again does not help
└── Refused                  a request cannot be served; always reported to the client
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BatonError(Exception):
    """Root of every exception that Baton raises on purpose."""


class InvariantViolated(BatonError):
    """A law does not hold. Raised instead of `assert`, which `python -O` removes."""


class IllegalTransition(InvariantViolated):
    """A state machine got a move that its table does not have for its state."""


EXIT_SETUP = 2
"""The exit code of a command that a SetupError or wrong options ended: a supervisor must not start it again."""


class SetupError(BatonError):
    """What the operator asked for cannot be had, however often it is tried: a setting, a model, a file. One sentence that
    names it and says what to do."""


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
    """The outputs generated elsewhere are already the whole answer."""
    NO_INSTANCE = "no_instance"
    """The router has no instance for it."""
    NO_BACKEND = "constraint_unsupported"
    """The instance has no backend that could enforce the constraint of the answer."""
    OTHER_BACKEND_VERSION = "constraint_version"
    """The answer has begun under another version of the backend, which may allow other tokens."""
    RATE_LIMITED = "rate_limited"
    """The tenant has used up its rate."""


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
