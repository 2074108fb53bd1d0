"""The instance's book of what it does for a router: whose the requests are, what came of them, how long they are kept.

    messages = relay.opened(now)         a session is there: who we are, everything that is held, and that this was all
    out      = relay.heard(message, now) what the router says: orders for the engine, answers for the router
    out      = relay.take(message, now)  what the engine says of requests that are a router's
    relay.lost(reason, now)              the session is over; what is open goes on, and is kept for a while

The session is in one state (AWAY, JOINING, SERVING, TURNED_AWAY), and so is each choice that a router has placed here:

    ASKED ──── accepted ───▶ OPEN ───── ended ─────▶ ENDED ──┐
      │  └── refused ──▶ gone  │ dropped                     │ dropped
      │ dropped                ▼                             ▼
      └──▶ DROPPED ──acc.──▶ UNWANTED ─── ended ──────────▶ gone

Dropped is what the router cancelled or told us to forget, what it has placed here again under the same request id (the later
attempt counts), what it could not be told of, and everything once the grace after a lost session is over. What is dropped
and open is cancelled.

A place that the engine has not answered when its session is lost is kept: answered before the next session opens, it is
among what is held, and a router that was started anew may find its client's request in it. Still unanswered when the next
session opens, it has no serial by which the router could be told of it: it is dropped.

Promises: within a session the router hears of each place one answer and of each choice that it placed or was told of every
row, in order, none twice, up to its end; what `opened` says of a choice and the rows after it are its whole history. A name
of a prefix is said once in a session. Memory is bounded: choices that are open by CHOICES_MAX and their own limits, what has
ended by count and bytes, oldest out first.

It trusts its engine and not the router: what a router says is checked, so that it cannot harm the engine or the clients of
this instance's own HTTP address. It has no clock, socket or task in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import numpy as np

from baton.core.engine.prefix import KEY_BYTES
from baton.core.errors import Refusal, RefusalCode
from baton.core.state_machine import StateMachine
from baton.wire.engine_messages import (
    AcceptedAs,
    Cancel,
    Drain,
    Pulse,
    RefusedWith,
    StepOutput,
    StopAt,
    Submit,
    TellNames,
    ToEngine,
    WireEnded,
    WireError,
    WireGauges,
    WireHandovers,
    WireLogprobs,
    WireSubmission,
    refused,
)
from baton.wire.router_messages import (
    HELD_BYTES_MAX,
    KEYS_A_BEAT_MAX,
    NOTES_A_BEAT_MAX,
    Beat,
    Forget,
    FromInstance,
    FromRouter,
    HeldGroup,
    HeldLine,
    Join,
    Leaving,
    Neighbours,
    Place,
    Settled,
    TurnedAway,
    UnknownToken,
    Welcome,
    checked_group,
    held_bytes,
)

FIRST_ROUTED_TICKET = 1 << 40
"""Its tickets start here; those of the front end's own desk are below."""
CHOICES_MAX = 1 << 14
"""That a router may have open here; the engine's own queue is shorter."""
ENDED_CHOICES_MAX = 4096
ENDED_BYTES_MAX = 64 << 20
"""Of the choices that have ended and that the router has not told us to forget."""
GROUP_BYTES_MAX = 32 << 20
"""A held group must travel as one frame."""

NO_GAUGES = WireGauges(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, WireHandovers(0, 0, 0, 0, 0, 0, 0))


class InstanceSessionState(Enum):
    """Of the session."""

    AWAY = "no session"
    JOINING = "joining"
    SERVING = "serving"
    TURNED_AWAY = "turned away"


class InstanceSessionMove(Enum):
    OPEN = "opened"
    WELCOME = "welcomed"
    TURN_AWAY = "turned away"
    LOSE = "lost"


SESSION_TRANSITIONS: dict[tuple[InstanceSessionState, InstanceSessionMove], InstanceSessionState] = {
    (InstanceSessionState.AWAY, InstanceSessionMove.OPEN): InstanceSessionState.JOINING,
    (InstanceSessionState.AWAY, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.JOINING, InstanceSessionMove.WELCOME): InstanceSessionState.SERVING,
    (InstanceSessionState.JOINING, InstanceSessionMove.TURN_AWAY): InstanceSessionState.TURNED_AWAY,
    (InstanceSessionState.JOINING, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.SERVING, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
    (InstanceSessionState.TURNED_AWAY, InstanceSessionMove.LOSE): InstanceSessionState.AWAY,
}

TELLING = (InstanceSessionState.SERVING, InstanceSessionState.JOINING)
"""What comes after the held groups were said follows them, whether or not the answer is there yet."""


class HeldState(Enum):
    """Of a choice."""

    ASKED = "asked"
    DROPPED = "dropped"
    """Not answered, and not wanted any more."""
    OPEN = "open"
    UNWANTED = "unwanted"
    """Cancelled; nothing is kept of it."""
    ENDED = "ended"
    GONE = "gone"


class HeldMove(Enum):
    ACCEPT = "accepted"
    REFUSE = "refused"
    END = "ended"
    DROP = "dropped"


TRANSITIONS: dict[tuple[HeldState, HeldMove], HeldState] = {
    (HeldState.ASKED, HeldMove.ACCEPT): HeldState.OPEN,
    (HeldState.ASKED, HeldMove.REFUSE): HeldState.GONE,
    (HeldState.ASKED, HeldMove.DROP): HeldState.DROPPED,
    (HeldState.DROPPED, HeldMove.ACCEPT): HeldState.UNWANTED,
    (HeldState.DROPPED, HeldMove.REFUSE): HeldState.GONE,
    (HeldState.OPEN, HeldMove.END): HeldState.ENDED,
    (HeldState.OPEN, HeldMove.DROP): HeldState.UNWANTED,
    (HeldState.UNWANTED, HeldMove.END): HeldState.GONE,
    (HeldState.ENDED, HeldMove.DROP): HeldState.GONE,
}

KEPT = (HeldState.OPEN, HeldState.ENDED)


@dataclass(slots=True)
class SessionEffects:
    """What is to be done, in this order of fields."""

    orders: list[ToEngine] = field(default_factory=list)
    says: list[FromInstance] = field(default_factory=list)
    neighbours: tuple[str, ...] | None = None
    """Who prefills for this instance now; None: as before."""
    drain: bool = False
    """The router wants this instance to take nothing new."""
    welcomed: Welcome | None = None
    turned_away: str | None = None
    """The router does not want us, and why; the session is to be closed."""
    fenced: str | None = None
    """It never will: a later life of this name is there."""


@dataclass(slots=True, eq=False)
class _Group:
    order: int
    """Our ticket at the engine."""
    ticket: int
    """The router's, in the session that placed it."""
    place: Place
    session: int
    lines: list[_Line] = field(default_factory=list)
    left: int = 0
    """Lines that are not gone."""


@dataclass(slots=True, eq=False)
class _Line:
    """One choice and its history."""

    group: _Group
    at: int
    """Its place in the group."""
    session: int
    """The last one in which the router knew of it."""
    state: HeldState = HeldState.ASKED
    serial: int = -1
    """The engine's, once it is accepted."""
    tokens: bytearray = field(default_factory=bytearray)
    counts: array[int] | None = None
    """Of each row; kept only where log-probabilities were asked for: they come by row."""
    logprobs: list[WireLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    ended: WireEnded | None = None

    @property
    def asked(self) -> WireSubmission:
        return self.group.place.group[self.at]

    def note(self, item: WireLogprobs) -> None:
        if self.counts is not None:
            self.logprobs.append(WireLogprobs(len(self.counts) - 1, item.chosen, item.top_ids, item.top))

    def history_bytes(self) -> int:
        logprobs = sum(len(item.chosen) + len(item.top_ids) + len(item.top) for item in self.logprobs)
        return len(self.tokens) + logprobs

    def held(self) -> HeldLine:
        count = len(self.tokens) // 4
        counts = array("i", [count] if count else []) if self.counts is None else self.counts
        return HeldLine(
            self.at, self.serial, counts.tobytes(), bytes(self.tokens), tuple(self.logprobs), self.cached_tokens, self.ended
        )


def _place_bytes(place: Place) -> int:
    prompts = sum(len(item.prompt or b"") + len(item.generated) for item in place.group)
    return len(place.origin) + prompts + 512 * len(place.group)


def _held_group(place: Place, kept: list[_Line]) -> HeldGroup:
    return HeldGroup(place.group, place.choices, place.body_choices, place.origin, tuple(line.held() for line in kept))


class _Names:
    """Names of prefixes that wait for a beat. They start with the engine's answer to TellNames: what came before is void."""

    def __init__(self) -> None:
        self.void()

    def void(self) -> None:
        self._begun = False
        self._fresh = False
        self._named: dict[bytes, None] = {}
        self._forgotten: dict[bytes, None] = {}

    def add(self, pulse: Pulse) -> None:
        if pulse.fresh:
            self._begun = self._fresh = True
            self._named, self._forgotten = {}, {}
        if not self._begun:
            return
        for key in _keys(pulse.forgotten):
            self._named.pop(key, None)
            self._forgotten[key] = None
        for key in _keys(pulse.named):
            self._forgotten.pop(key, None)
            self._named[key] = None

    def take(self) -> tuple[bool, bytes, bytes]:
        fresh, self._fresh = self._fresh, False
        return fresh, _taken(self._named), _taken(self._forgotten)


def _keys(data: bytes) -> Iterator[bytes]:
    return (data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))


def _taken(keys: dict[bytes, None]) -> bytes:
    """As many as a beat may have; the others wait for the next."""
    taken = list(keys)[:KEYS_A_BEAT_MAX] if len(keys) > KEYS_A_BEAT_MAX else list(keys)
    for key in taken:
        del keys[key]
    return b"".join(taken)


class InstanceSessions:
    def __init__(self, join: Join, grace_us: int = 10_000_000) -> None:
        self._join = join
        self._grace_us = grace_us
        self._standing = InstanceSessionState.AWAY
        self._states = StateMachine(TRANSITIONS, "a choice")
        self._standings = StateMachine(SESSION_TRANSITIONS, "a session")
        self._session = 0
        self._lost_us: int | None = None
        """Since when no router has known of what is held; None while one does."""
        self._draining = join.draining
        self._next_ticket = FIRST_ROUTED_TICKET
        self._asked: dict[int, _Group] = {}
        """By our ticket: what the engine has not answered."""
        self._groups: dict[int, _Group] = {}
        """By our ticket: everything of which something is not gone."""
        self._open: dict[int, _Line] = {}
        """By serial: what the engine has not ended, unwanted ones included."""
        self._ended: dict[int, _Line] = {}
        """By serial, in the order in which they ended."""
        self._ended_bytes = 0
        self._named: dict[str, _Line] = {}
        """By request id: the last attempt."""
        self._mute = 0
        """How many of `_open` the router of this session does not know of."""
        self._unsent: list[ToEngine] = []
        """Orders that came of opening a session: they go out with the router's first word."""
        self._gauges = NO_GAUGES
        self._computing = False
        self._names = _Names()
        self._notes: list[tuple[int, str, int]] = []
        """(serial, phase, when)"""

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def standing(self) -> InstanceSessionState:
        return self._standing

    def moves(self) -> dict[tuple[HeldState, HeldMove], int]:
        """How often each transition of a choice was taken."""
        return self._states.moves()

    def turns(self) -> dict[tuple[InstanceSessionState, InstanceSessionMove], int]:
        """How often each transition of the session was taken."""
        return self._standings.moves()

    @property
    def open_requests(self) -> int:
        """Choices that the engine has not ended, or not answered."""
        return len(self._open) + sum(len(group.lines) for group in self._asked.values())

    @property
    def kept_choices(self) -> int:
        """Choices of which a router will be told when it is there again."""
        return sum(line.state in KEPT for group in self._groups.values() for line in group.lines)

    @property
    def held_choices(self) -> int:
        """Choices of which something is kept."""
        return sum(len(group.lines) for group in self._groups.values())

    def opened(self, now_us: int) -> list[FromInstance]:  # noqa: ARG002
        """The first messages of a session. Everything that `take` says from here on comes after them."""
        self._turn(InstanceSessionMove.OPEN)
        self._session += 1
        for group in self._asked.values():
            self._drop_all(group.lines)
        held, total = list[FromInstance](), 0
        for group in list(self._groups.values()):
            kept = [line for line in group.lines if line.state in KEPT]
            if not kept:
                continue
            message = _held_group(group.place, kept)
            size = held_bytes(message)
            if size > GROUP_BYTES_MAX or total + size > HELD_BYTES_MAX:
                self._unsent += self._drop_all(kept)
                continue
            total += size
            held.append(message)
            for line in kept:
                line.session = self._session
        self._mute = sum(line.session != self._session for line in self._open.values())
        join = msgspec.structs.replace(self._join, draining=self._draining)
        return [join, *held, Settled()]

    def lost(self, reason: str, now_us: int) -> None:  # noqa: ARG002
        """The session is over. A second loss, or one before the welcome, does not make the grace longer."""
        self._turn(InstanceSessionMove.LOSE)
        self._names.void()
        self._notes.clear()
        if self._lost_us is None:
            self._lost_us = now_us

    def next_deadline(self) -> int | None:
        if self._standing is not InstanceSessionState.AWAY or self._lost_us is None or not self._groups:
            return None
        return self._lost_us + self._grace_us

    def tick(self, now_us: int) -> SessionEffects:
        deadline = self.next_deadline()
        if deadline is None or now_us < deadline:
            return SessionEffects()
        self._lost_us = None
        lines = [line for group in self._groups.values() for line in group.lines]
        return SessionEffects(orders=[*self._flushed(), *self._drop_all(lines)])

    def leave(self) -> list[FromInstance]:
        """This instance was told to stop: nothing new, please."""
        said, self._draining = self._draining, True
        return [Leaving()] if not said and self._standing in TELLING else []

    def _turn(self, turn: InstanceSessionMove) -> None:
        self._standing = self._standings.after(self._standing, turn)

    def _move(self, line: _Line, move: HeldMove) -> HeldState:
        line.state = self._states.after(line.state, move)
        return line.state

    def _flushed(self) -> list[ToEngine]:
        orders, self._unsent = self._unsent, []
        return orders

    # ── what the router says ─────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, message: FromRouter, now_us: int) -> SessionEffects:  # noqa: ARG002
        """A WireError means that the router broke the rules; the book is then as it was."""
        match message:
            case Welcome():
                return self._welcomed(message)
            case TurnedAway(reason, fenced):
                return self._turned_away(reason, fenced)
            case _ if self._standing is not InstanceSessionState.SERVING:
                raise WireError(f"{type(message).__name__} to an instance that is {self._standing.value}")
            case Place():
                return self._place(message)
            case Cancel(serial):
                return SessionEffects(orders=self._dropped([serial]))
            case Forget(serials):
                return SessionEffects(orders=self._dropped(serials))
            case StopAt(serial):
                return SessionEffects(orders=[message] if self._is_wanted(serial) else [])
            case Neighbours(addresses):
                return SessionEffects(neighbours=addresses)
            case Drain():
                self._draining = True
                return SessionEffects(drain=True)

    def _welcomed(self, message: Welcome) -> SessionEffects:
        if self._standing is not InstanceSessionState.JOINING:
            raise WireError(f"a welcome to an instance that is {self._standing.value}")
        self._turn(InstanceSessionMove.WELCOME)
        self._grace_us = message.orphan_grace_us
        self._lost_us = None
        return SessionEffects(orders=[*self._flushed(), TellNames()], welcomed=message)

    def _turned_away(self, reason: str, fenced: bool) -> SessionEffects:
        if self._standing is not InstanceSessionState.JOINING:
            raise WireError(f"an instance that is {self._standing.value} was turned away")
        self._turn(InstanceSessionMove.TURN_AWAY)
        return SessionEffects(orders=self._flushed(), turned_away=reason, fenced=reason if fenced else None)

    def _place(self, place: Place) -> SessionEffects:
        if any(group.ticket == place.ticket and group.session == self._session for group in self._asked.values()):
            raise WireError(f"ticket {place.ticket} waits for its answer already")
        try:
            checked_group(place.group, self._join.vocabulary)
        except UnknownToken as error:
            return SessionEffects(says=[refused(place.ticket, Refusal(RefusalCode.NOT_IN_VOCABULARY, str(error)))])
        if self.open_requests + len(place.group) > CHOICES_MAX:
            refusal = Refusal(RefusalCode.QUEUE_FULL, f"{CHOICES_MAX} choices of this router are open here", 1)
            return SessionEffects(says=[refused(place.ticket, refusal)])
        older = [line for item in place.group if (line := self._named.get(item.request_id)) is not None]
        orders = self._drop_all(older)
        group = _Group(self._next_ticket, place.ticket, place, self._session, left=len(place.group))
        self._next_ticket += 1
        for at, item in enumerate(place.group):
            counts = None if item.sampling.logprobs is None else array("i")
            line = self._named[item.request_id] = _Line(group, at, self._session, counts=counts)
            group.lines.append(line)
        self._asked[group.order] = self._groups[group.order] = group
        return SessionEffects(orders=[*orders, Submit(group.order, place.group)])

    def _is_wanted(self, serial: int) -> bool:
        line = self._open.get(serial)
        return line is not None and line.state is HeldState.OPEN

    def _dropped(self, serials: Iterable[int]) -> list[ToEngine]:
        """Of serials that are not here any more, or never were a router's, nothing comes."""
        lines = (self._open.get(serial) or self._ended.get(serial) for serial in serials)
        return self._drop_all([line for line in lines if line is not None])

    def _drop_all(self, lines: Sequence[_Line]) -> list[ToEngine]:
        """The orders that end what is open of them."""
        orders: list[ToEngine] = []
        for line in lines:
            before = line.state
            if not self._states.allows(before, HeldMove.DROP):
                continue  # it is on its way out already
            after = self._move(line, HeldMove.DROP)
            if self._named.get(line.asked.request_id) is line:
                del self._named[line.asked.request_id]
            if after is HeldState.UNWANTED:
                orders.append(Cancel(line.serial))
            if before is HeldState.ENDED:
                self._ended_bytes -= self._weight(self._ended.pop(line.serial))
            if after is HeldState.GONE:
                self._gone(line)
        return orders

    def _gone(self, line: _Line) -> None:
        group = line.group
        group.left -= 1
        if not group.left:
            del self._groups[group.order]

    # ── what the engine says ─────────────────────────────────────────────────────────────────────────────────────────────

    def owns_ticket(self, ticket: int) -> bool:
        return ticket >= FIRST_ROUTED_TICKET

    def split(self, output: StepOutput) -> tuple[StepOutput | None, StepOutput | None]:
        """What is a router's, and what is the own desk's: almost always all of it is the one or the other."""
        ours = self._open
        if not ours:
            return None, output
        serials = _serials(output)
        mine = [serial in ours for serial in serials]
        rows, ends = sum(mine), sum(end.serial in ours for end in output.ended)
        if not rows and not ends:
            return None, output
        if rows == len(serials) and ends == len(output.ended):
            return output, None
        theirs = [not row for row in mine]
        return (
            _part(output, serials, mine, [end for end in output.ended if end.serial in ours]),
            _part(output, serials, theirs, [end for end in output.ended if end.serial not in ours]),
        )

    def take(self, message: AcceptedAs | RefusedWith | StepOutput, now_us: int) -> SessionEffects:  # noqa: ARG002
        match message:
            case StepOutput():
                return self._came(message)
            case AcceptedAs(ticket, serials):
                return self._accepted(self._answered(ticket), serials)
            case RefusedWith(ticket):
                return self._refused(self._answered(ticket), message)

    def _answered(self, ticket: int) -> _Group:
        group = self._asked.pop(ticket, None)
        if group is None:
            raise WireError(f"the engine answered ticket {ticket}, which waits for no answer")
        return group

    def _accepted(self, group: _Group, serials: tuple[int, ...]) -> SessionEffects:
        if len(serials) != len(group.lines):
            raise WireError(f"{len(group.lines)} choices were accepted as {len(serials)} requests")
        orders: list[ToEngine] = []
        for line, serial in zip(group.lines, serials, strict=True):
            line.serial = serial
            self._open[serial] = line
            if self._move(line, HeldMove.ACCEPT) is HeldState.UNWANTED:
                orders.append(Cancel(serial))
        if group.session != self._session:
            self._mute += len(group.lines)
        return SessionEffects(orders, [AcceptedAs(group.ticket, serials)] if self._knows(group) else [])

    def _refused(self, group: _Group, answer: RefusedWith) -> SessionEffects:
        for line in group.lines:
            self._move(line, HeldMove.REFUSE)
            if self._named.get(line.asked.request_id) is line:
                del self._named[line.asked.request_id]
            self._gone(line)
        knows = self._knows(group)
        return SessionEffects(says=[msgspec.structs.replace(answer, ticket=group.ticket)] if knows else [])

    def _knows(self, group: _Group) -> bool:
        """Whether the router of this session waits for the answer."""
        return self._standing in TELLING and group.session == self._session

    def _came(self, output: StepOutput) -> SessionEffects:
        serials = _serials(output)
        said: list[FromInstance] = []
        if self._standing in TELLING:
            told = output if not self._mute else self._audible(output, serials)
            said = [] if told is None else [told]
        self._write_down(output, serials)
        return SessionEffects(says=said)

    def _audible(self, output: StepOutput, serials: list[int]) -> StepOutput | None:
        """What the router of this session knows of."""
        lines, session = self._open, self._session
        rows = [lines[serial].session == session for serial in serials]
        ended = [end for end in output.ended if lines[end.serial].session == session]
        return _part(output, serials, rows, ended) if any(rows) or ended else None

    def _write_down(self, output: StepOutput, serials: list[int]) -> None:
        lines, tokens, at = self._open, output.tokens, 0
        counts: list[int] = np.frombuffer(output.counts, dtype="<i4").tolist()
        for serial, count in zip(serials, counts, strict=True):
            line, upto = lines[serial], at + 4 * count
            line.tokens += tokens[at:upto]
            at = upto
            if line.counts is not None:
                line.counts.append(count)
        for item in output.logprobs:
            lines[serials[item.row]].note(item)
        for serial, cached in output.started:
            if serial in lines:
                lines[serial].cached_tokens = cached
        for end in output.ended:
            self._end(lines.pop(end.serial), end)

    def _end(self, line: _Line, end: WireEnded) -> None:
        if line.session != self._session:
            self._mute -= 1
        if self._move(line, HeldMove.END) is HeldState.GONE:
            self._gone(line)
            return
        line.ended = end
        self._ended[line.serial] = line
        self._ended_bytes += self._weight(line)
        while len(self._ended) > ENDED_CHOICES_MAX or self._ended_bytes > ENDED_BYTES_MAX:
            self._drop_all([next(iter(self._ended.values()))])

    def _weight(self, line: _Line) -> int:
        return line.history_bytes() + _place_bytes(line.group.place)

    # ── beats ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def feel(self, pulse: Pulse, now_us: int) -> None:
        """The engine's pulse, once for each: the next beat says it."""
        self._gauges, self._computing = pulse.gauges, pulse.computing
        if self._standing is not InstanceSessionState.SERVING:
            return
        self._names.add(pulse)
        self._notes += [(serial, phase, now_us - ago) for serial, phase, ago in pulse.notes if self._has(serial)]
        del self._notes[:-NOTES_A_BEAT_MAX]

    def beat(self, pulse: Pulse | None, silent_us: int, now_us: int) -> Beat | None:
        """A sign of life for the router; None where there is none. `pulse` is one that was not given before."""
        if pulse is not None:
            self.feel(pulse, now_us)
        if self._standing is not InstanceSessionState.SERVING:
            return None
        fresh, named, forgotten = self._names.take()
        notes = tuple((serial, phase, max(0, now_us - at_us)) for serial, phase, at_us in self._notes)
        self._notes.clear()
        return Beat(self._gauges, max(0, silent_us), self._computing, fresh, named, forgotten, notes)

    def _has(self, serial: int) -> bool:
        return serial in self._open or serial in self._ended


def _serials(output: StepOutput) -> list[int]:
    serials: list[int] = np.frombuffer(output.serials, dtype="<i8").tolist()
    return serials


def _part(output: StepOutput, serials: list[int], rows: list[bool], ended: list[WireEnded]) -> StepOutput:
    """Some of the rows of a step, and these ends."""
    mask = np.array(rows, dtype=bool)
    counts = np.frombuffer(output.counts, dtype="<i4")
    tokens = np.frombuffer(output.tokens, dtype="<i4")[np.repeat(mask, counts)]
    places = np.cumsum(mask) - 1
    taken = {serial for serial, row in zip(serials, rows, strict=True) if row}
    return StepOutput(
        np.frombuffer(output.serials, dtype="<i8")[mask].tobytes(),
        counts[mask].tobytes(),
        tokens.tobytes(),
        tuple(
            WireLogprobs(int(places[item.row]), item.chosen, item.top_ids, item.top)
            for item in output.logprobs
            if rows[item.row]
        ),
        tuple((serial, cached) for serial, cached in output.started if serial in taken),
        tuple(ended),
        output.gauges,
    )
