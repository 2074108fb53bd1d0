"""How a router names its work: (request, choice, attempt).

    request   what a client asked for in one HTTP request; a router's number, below 0 where an earlier router had taken it
    choice    one of the request's sequences, by its index
    attempt   the nth time that choices of the request went to an instance, from 1; choices that travel together share it

docs/design/identity.md lists the numbers that other processes have for the same work.
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
