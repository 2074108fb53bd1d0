"""Requests that continue elsewhere wait, up to a time limit, until their KV is stored or will not be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.core.engine.prefix import Key
from baton.core.engine.request import Serial
from baton.core.tiers.outcomes import Departed, Outcome


@dataclass(slots=True)
class _Departure:
    keys: set[Key]
    until_us: int


class Departures:
    def __init__(self, limit_us: int, outcomes: list[Outcome]) -> None:
        self._limit_us = limit_us
        self._outcomes = outcomes
        self._departures: dict[Serial, _Departure] = {}

    def __len__(self) -> int:
        return len(self._departures)

    def deadlines(self) -> Iterator[int]:
        return (departure.until_us for departure in self._departures.values())

    def depart(self, serial: Serial, keys: Sequence[Key], now_us: int) -> None:
        """Emit Departed when the store has these keys or will not get them, at the latest after the time limit."""
        self._departures[serial] = _Departure(set(keys), now_us + self._limit_us)

    def forget(self, serial: Serial) -> None:
        """Emit no Departed for it."""
        del self._departures[serial]

    def settle(self, key: Key) -> None:
        """The store has this key, or will not get it."""
        for serial, departure in list(self._departures.items()):
            departure.keys.discard(key)
            if not departure.keys:
                self._depart_now(serial)

    def expire(self, now_us: int) -> None:
        for serial in [serial for serial, departure in self._departures.items() if departure.until_us <= now_us]:
            self._depart_now(serial)

    def give_up(self) -> None:
        """The store is not available: end every wait."""
        for serial in list(self._departures):
            self._depart_now(serial)

    def _depart_now(self, serial: Serial) -> None:
        del self._departures[serial]
        self._outcomes.append(Departed(serial))
