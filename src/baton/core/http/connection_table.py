"""Decides which connections of clients stay open: so many in all, and so many of one address.

    open ──▶ waiting ──begin──▶ busy ──wait──▶ waiting …          waiting: no whole request has come since the last answer
         └─▶ spare: all others are busy ──promote──▶ waiting

A waiting connection gives way where the table is full: the one that waits longest is closed for a new one. So whoever only
holds connections (idle ones, headers and bodies that never end, answers that are not read) keeps nobody out. A busy one
stays. Where all are busy a new one gets a spare place, which is for a quick question alone: who asks for more is promoted,
or refused while there is no room.

Has no socket: `Connection` is whatever the caller tells connections apart by.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class NoRoom(StrEnum):
    """Why a connection is not taken."""

    IN_ALL = "too_many_connections"
    FROM_ADDRESS = "too_many_from_address"


@dataclass(frozen=True, slots=True)
class Admitted(Generic[ConnectionT]):
    instead_of: ConnectionT | None
    """A waiting connection that is no longer in the table; the caller closes it."""
    is_spare: bool = False
    """In a spare place."""


class ConnectionTable(Generic[ConnectionT]):
    def __init__(self, most: int, most_per_address: int | None = None, spare: int = 0) -> None:
        """`spare` places come on top of `most`."""
        self.most = most
        self._spare_most = spare
        self._most_per_address = most_per_address
        self._address_of: dict[ConnectionT, str | None] = {}
        """All open connections. None: not counted by address."""
        self._waiting: dict[ConnectionT, None] = {}
        """Longest first; without those in spare places."""
        self._spare: dict[ConnectionT, None] = {}
        self._spare_waiting: dict[ConnectionT, None] = {}
        """Longest first."""
        self._by_address: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def __iter__(self) -> Iterator[ConnectionT]:
        return iter(self._address_of)

    def open(self, one: ConnectionT, address: str | None) -> Admitted[ConnectionT] | NoRoom:
        """Take a new connection. With an address it is counted there; one that is not admitted is not in the table."""
        if address is not None and not self.charge(address):
            return NoRoom.FROM_ADDRESS
        outcome = self._make_room()
        if isinstance(outcome, NoRoom):
            outcome = self._make_spare_room()
        if isinstance(outcome, NoRoom):
            self._give_back(address)
            return outcome
        self._address_of[one] = address
        if outcome.is_spare:
            self._spare[one] = self._spare_waiting[one] = None
        else:
            self._waiting[one] = None
        return outcome

    def promote(self, one: ConnectionT) -> Admitted[ConnectionT] | NoRoom:
        """Move a connection from its spare place to an ordinary one, where it has another to give way if need be."""
        outcome = self._make_room()
        if isinstance(outcome, Admitted):
            del self._spare[one]
            self._spare_waiting.pop(one, None)
            self._waiting[one] = None
        return outcome

    def _make_room(self) -> Admitted[ConnectionT] | NoRoom:
        if len(self._address_of) - len(self._spare) < self.most:
            return Admitted(None)
        given_way = self._shed_first(self._waiting)
        return NoRoom.IN_ALL if given_way is None else Admitted(given_way)

    def _make_spare_room(self) -> Admitted[ConnectionT] | NoRoom:
        if len(self._spare) < self._spare_most:
            return Admitted(None, is_spare=True)
        given_way = self._shed_first(self._spare_waiting)
        return NoRoom.IN_ALL if given_way is None else Admitted(given_way, is_spare=True)

    def shed(self) -> ConnectionT | None:
        """Take the connection that waits longest out of the table."""
        longest = self._shed_first(self._waiting)
        return self._shed_first(self._spare_waiting) if longest is None else longest

    def _shed_first(self, waiting: dict[ConnectionT, None]) -> ConnectionT | None:
        longest = next(iter(waiting), None)
        if longest is not None:
            self.close(longest)
        return longest

    def begin(self, one: ConnectionT) -> None:
        """A whole request has come; from here on the connection does not give way."""
        self._waiting.pop(one, None)
        self._spare_waiting.pop(one, None)

    def wait(self, one: ConnectionT) -> None:
        """The request is answered."""
        if one in self._address_of:
            (self._spare_waiting if one in self._spare else self._waiting)[one] = None

    def is_spare(self, one: ConnectionT) -> bool:
        return one in self._spare

    def close(self, one: ConnectionT) -> None:
        """Forget a connection; one that is not in the table is ignored, since it was shed or never admitted."""
        self._waiting.pop(one, None)
        self._spare.pop(one, None)
        self._spare_waiting.pop(one, None)
        self._give_back(self._address_of.pop(one, None))

    def charge(self, address: str) -> bool:
        """Count one more for an address, unless it has its share. True: counted, to be given back by `discharge`."""
        count = self._by_address.get(address, 0)
        if self._most_per_address is not None and count >= self._most_per_address:
            return False
        self._by_address[address] = count + 1
        return True

    def discharge(self, address: str) -> None:
        left = self._by_address[address] - 1
        if left:
            self._by_address[address] = left
        else:
            del self._by_address[address]

    def _give_back(self, address: str | None) -> None:
        if address is not None:
            self.discharge(address)
