"""The attempts that are open on the prefill side (P) of a hand-over: their states, their order and their transitions.

One transition table says what can happen to an attempt. The messages and orders that follow from it are made elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import islice

from baton.core.engine.plan import Logprobs
from baton.core.engine.prefix import Key
from baton.core.engine.request import Serial, Submission
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Grant, Handover, PeerId
from baton.core.state_machine import FastEnum, StateMachine
from baton.core.tiers.offload import AnyTiers


class PrefillHandoverState(FastEnum):
    QUEUED = "queued"
    OFFERED = "offered"
    """Its slot and blocks are held (on the general path only its serial)."""
    PREFILLING = "prefilling"
    SHIPPING = "shipping"
    """The first token is known; bytes are still being sent."""
    COMMITTED = "committed"
    FENCING = "fencing"
    LEAVING = "leaving"
    """Nothing reads its blocks any more; the executor has to release its slot."""
    OVER = "over"


class PrefillHandoverMove(FastEnum):
    OFFER = "offered"
    GRANTED = "granted"
    PREFILLED = "first token"
    COMMIT = "all sent"
    ADOPTED = "adopted"
    DROP = "given up before the grant"
    GIVE_UP = "given up"
    FENCED = "fenced"
    LEFT = "slot free"


PREFILL_TRANSITIONS: dict[tuple[PrefillHandoverState, PrefillHandoverMove], PrefillHandoverState] = {
    (PrefillHandoverState.QUEUED, PrefillHandoverMove.OFFER): PrefillHandoverState.OFFERED,
    (PrefillHandoverState.QUEUED, PrefillHandoverMove.DROP): PrefillHandoverState.OVER,
    (PrefillHandoverState.OFFERED, PrefillHandoverMove.GRANTED): PrefillHandoverState.PREFILLING,
    (PrefillHandoverState.OFFERED, PrefillHandoverMove.DROP): PrefillHandoverState.OVER,
    (PrefillHandoverState.PREFILLING, PrefillHandoverMove.PREFILLED): PrefillHandoverState.SHIPPING,
    (PrefillHandoverState.PREFILLING, PrefillHandoverMove.GIVE_UP): PrefillHandoverState.FENCING,
    (PrefillHandoverState.SHIPPING, PrefillHandoverMove.COMMIT): PrefillHandoverState.COMMITTED,
    (PrefillHandoverState.SHIPPING, PrefillHandoverMove.GIVE_UP): PrefillHandoverState.FENCING,
    (PrefillHandoverState.COMMITTED, PrefillHandoverMove.ADOPTED): PrefillHandoverState.LEAVING,
    (PrefillHandoverState.COMMITTED, PrefillHandoverMove.GIVE_UP): PrefillHandoverState.FENCING,
    (PrefillHandoverState.FENCING, PrefillHandoverMove.FENCED): PrefillHandoverState.LEAVING,
    (PrefillHandoverState.LEAVING, PrefillHandoverMove.LEFT): PrefillHandoverState.OVER,
}

SOON = (PrefillHandoverState.OFFERED, PrefillHandoverState.PREFILLING)
AHEAD = (PrefillHandoverState.QUEUED, *SOON)
AT_WORK = (PrefillHandoverState.PREFILLING, PrefillHandoverState.SHIPPING)
ENDING = (PrefillHandoverState.FENCING, PrefillHandoverState.LEAVING)


@dataclass(slots=True)
class PrefillHandover:
    """One attempt, as the prefill side knows it."""

    handover: Handover
    submission: Submission
    arrived_us: int
    """When it was asked for here."""
    state: PrefillHandoverState = PrefillHandoverState.QUEUED
    place: tuple[int, int, int] = (0, 0, 0)
    """Its place in the queue: priority, arrival at the first front end, number of the ask here."""
    keys: list[Key] | None = None
    """Block keys of the tokens it starts with; computed when its turn comes, kept while it waits for room."""
    is_prefetched: bool = False
    """The store was asked for the KV it starts with."""
    serial: Serial | None = None
    """The scheduler's serial; set with the offer."""
    row_has_ended: bool = False
    """The scheduler ended the request by itself."""
    grant: Grant | None = None
    renew_us: int = 0
    """Time of the next Renew."""
    shipped_upto: int = 0
    """Blocks of the sequence before this index were ordered to be sent."""
    token: int | None = None
    logprobs: Logprobs | None = None
    checks: bytes | None = None

    @property
    def row(self) -> Serial:
        """The serial of an attempt that must have one."""
        if self.serial is None:
            raise InvariantViolated(f"{self.handover} in {self.state.name} has no row")
        return self.serial


class PrefillHandovers:
    def __init__(self, tiers: AnyTiers) -> None:
        self.queue: dict[Handover, PrefillHandover] = {}
        """Attempts that are QUEUED, in the order in which they were asked for: that of their time limits."""
        self._line: list[PrefillHandover] = []
        """Attempts that are QUEUED, the most senior first."""
        self._asks = 0
        self.active: dict[Handover, PrefillHandover] = {}
        """All other open attempts: those with slots and, on the general path, those that soon have one."""
        self.queued_tokens = 0
        """Tokens of all attempts that are still AHEAD."""
        self._tiers = tiers
        self._open: dict[Handover, PrefillHandover] = {}
        self._by_serial: dict[Serial, PrefillHandover] = {}
        self._states = StateMachine(PREFILL_TRANSITIONS, "a hand-over")

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> tuple[PrefillHandover, ...]:
        return tuple(self._open.values())

    def get(self, handover: Handover) -> PrefillHandover | None:
        return self._open.get(handover)

    def of_serial(self, serial: Serial) -> PrefillHandover | None:
        return self._by_serial.get(serial)

    def of_row(self, serial: int) -> PrefillHandover:
        """The attempt of a row that the scheduler has: every row here belongs to one."""
        return self._by_serial[Serial(serial)]

    def of_peer(self, peer: PeerId) -> list[PrefillHandover]:
        return [entry for entry in self._open.values() if entry.handover.peer == peer]

    def next_to_offer(self, count: int) -> list[PrefillHandover]:
        """The most senior of the queue."""
        return self._line[:count]

    def with_time_limit(self) -> list[PrefillHandover]:
        """The head of the queue, which is due before the rest of it, and the active attempts that are not ending."""
        return [*islice(self.queue.values(), 1), *(entry for entry in self.active.values() if entry.state not in ENDING)]

    def moves(self) -> dict[tuple[PrefillHandoverState, PrefillHandoverMove], int]:
        return self._states.moves()

    def add(self, entry: PrefillHandover) -> None:
        self._open[entry.handover] = self.queue[entry.handover] = entry
        self._asks += 1
        entry.place = (*entry.submission.seniority, self._asks)
        insort(self._line, entry, key=_place)
        self.queued_tokens += entry.submission.known_tokens

    def offer(self, entry: PrefillHandover, serial: Serial) -> None:
        entry.serial = serial
        self._by_serial[serial] = entry
        self.move(entry, PrefillHandoverMove.OFFER)

    def move(self, entry: PrefillHandover, move: PrefillHandoverMove) -> None:
        before, entry.state = entry.state, self._states.after(entry.state, move)
        if before is PrefillHandoverState.QUEUED:
            del self.queue[entry.handover]
            del self._line[bisect_left(self._line, entry.place, key=_place)]
            self._tiers.forget_prefetch(entry.handover)
        if before in AHEAD and entry.state not in AHEAD:
            self.queued_tokens -= entry.submission.known_tokens
        if entry.state is PrefillHandoverState.OFFERED:
            self.active[entry.handover] = entry
        if entry.state is PrefillHandoverState.OVER:
            del self._open[entry.handover]
            self.active.pop(entry.handover, None)
            if entry.serial is not None:
                del self._by_serial[entry.serial]


def _place(entry: PrefillHandover) -> tuple[int, int, int]:
    return entry.place
