"""A transition table that is enforced and counted.

    machine = StateMachine(TRANSITIONS, "a request")
    request.phase = machine.after(request.phase, Move.ADMIT)   # IllegalTransition where the table has no such edge
    machine.moves()                                            # how often each edge was taken

The owner keeps the state itself, one field of one record; one machine counts for all records of its owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from baton.core.errors import IllegalTransition


class FastEnum(Enum):
    """An Enum for keys of tables that are read often. Members are hashed by identity, as they compare; `Enum` calls a
    Python function that hashes the name."""

    __hash__ = object.__hash__


State = TypeVar("State", bound=Enum)
Move = TypeVar("Move", bound=Enum)


class StateMachine(Generic[State, Move]):
    def __init__(self, table: Mapping[tuple[State, Move], State], subject: str) -> None:
        self._table = table
        self._subject = subject
        self._moves = dict.fromkeys(table, 0)

    def allows(self, state: State, move: Move) -> bool:
        return (state, move) in self._table

    def after(self, state: State, move: Move) -> State:
        """Take a transition, count it and return the state it leads to."""
        edge = (state, move)
        after = self._table.get(edge)
        if after is None:
            raise IllegalTransition(f"{self._subject} in {state.name} cannot take the move {move.name}")
        self._moves[edge] += 1
        return after

    def moves(self) -> dict[tuple[State, Move], int]:
        """Number of times each transition of the table was taken; a copy."""
        return dict(self._moves)
