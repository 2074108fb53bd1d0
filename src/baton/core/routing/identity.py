"""The ids of a router's work: (request, choice, attempt).

    request   one HTTP request of a client; a router's number, below 0 if an earlier router had accepted it
    choice    one of the request's sequences, by its index
    attempt   the nth time that choices of the request went to an instance, from 1; choices that travel together share it

docs/design/identity.md lists the ids that other processes have for the same work.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

RequestNumber = NewType("RequestNumber", int)


class AttemptId(NamedTuple):
    """Choices of one request that travel to one instance together."""

    request: RequestNumber
    attempt: int


class ChoiceAttempt(NamedTuple):
    """One choice of an attempt."""

    request: RequestNumber
    choice: int
    attempt: int

    @property
    def group(self) -> AttemptId:
        return AttemptId(self.request, self.attempt)
