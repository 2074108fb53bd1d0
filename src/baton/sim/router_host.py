"""The router's host: the production RouterSessions and Router, behind one line for each instance, in front of all clients.

Owns the lives of the router and who waits for which body. A life begins with nothing: what its predecessor knew is gone,
less what instances have kept of it. Clients are on machines of their own: they notice a crash at once, and may come back for
what they were in the middle of. It carries out what the switch says; all decisions are the production objects'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.engine.request import Submission
from baton.core.errors import Refusal
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    ChoiceOutcome,
    DeliverTokens,
    FleetChanged,
    RequestDeclined,
    RequestOpened,
    Session,
    TimelineNoted,
    TimelineStage,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.identity import RequestNumber
from baton.core.routing.router import Router
from baton.sim.instance_front_end import ROUTER, line_names
from baton.sim.law_names import LINE_BOUND, STRANGERS, LawBroken
from baton.sim.lines import LineEndpoint, Lines
from baton.sim.router_watcher import RouterWatcher
from baton.sim.world import Alarm, Host, World
from baton.wire.engine_messages import WireError
from baton.wire.router_messages import FromRouter, decode_from_instance, encode_membership
from baton.wire.router_sessions import Act, CloseConnection, RouterSessions, SayToInstance

TOLD = (TimelineStage.PLACED, TimelineStage.PREEMPTED, TimelineStage.MOVED, TimelineStage.ENDED)
"""What the story says of a choice; the rest is in what its instance and its client do."""
OUTBOX_MAX = 2_000
"""Messages that wait for room on one line; an instance that takes none is given up before there are so many."""


class RequestListener(Protocol):
    """Who asked for a body, and hears of it. Each choice is named by its place."""

    def opened(self) -> None: ...

    def declined(self, refusal: Refusal) -> None: ...

    def progress(
        self, place: int, tokens: list[int], begin: int, end: int, cached_tokens: int | None, ended: ChoiceOutcome | None
    ) -> None: ...

    def placed(self, where: str) -> None:
        """The instance to which one choice goes now."""

    def gone(self) -> None:
        """The router is gone, and the connection with it."""


@dataclass(slots=True)
class UnclaimedAnswer:
    """An orphaned body, as it is known by now."""

    body: RequestNumber
    origin: bytes
    tokens: list[list[int] | None]
    """By choice; None: nothing is known of it."""
    cached: list[int | None]
    outcomes: list[ChoiceOutcome | None]


class RouterRequest:
    """A body, as its client holds it: of one life of the router, and of no use after that."""

    def __init__(self, gate: RouterHost, asker: RequestListener) -> None:
        self.body: RequestNumber | None = None
        """None until the router has looked at it."""
        self.asker = asker
        self.is_early = True
        """No instance has accepted it yet."""
        self.is_there = True
        """Whether the client still listens; the router may not know yet that it does not."""
        self._gate = gate
        self._life = gate.host.lives

    @property
    def where(self) -> str:
        return f"the router, as body {self.body}"

    def leave(self) -> bool:
        """The client is gone. Answers whether it hears nothing any more."""
        self.is_there = False
        self._run(self._gate.leave, self)
        return True

    def stop(self, place: int, keep: int) -> None:
        self._run(self._gate.cut, self, place, keep)

    def _run(self, act: Callable[..., None], *arguments: object) -> None:
        if self._life == self._gate.host.lives:
            self._gate.host.run(act, *arguments)


class RouterHost:
    def __init__(
        self,
        world: World,
        lines: Lines,
        config: RouterConfig,
        doors: int,
        secret: bytes,
        book: RouterWatcher | None = None,
        seed: int = 0,
    ) -> None:
        """`doors`: how many instances, and whoever else, may have a line to it."""
        self.host = Host(world, ROUTER)
        self.config = config
        self.book = RouterWatcher() if book is None else book
        self._secret = secret
        self._seed = seed
        self.switch: RouterSessions
        self.lines: list[LineEndpoint] = []
        """Of all lives."""
        self.former: list[RouterSessions] = []
        self.found: dict[bytes, UnclaimedAnswer] = {}
        """Orphans that nobody has come for, by their origin."""
        self.doors: list[RouterLine] = []
        self.kept: dict[tuple[bytes, int], set[int]] = {}
        """By origin and the moment of a crash: which instances were at work on a body."""
        self.disturbed_us = 0
        """When the router last crashed or was woken up."""
        self._lines = lines
        self._doors = doors
        self._unseen: list[RouterRequest] = []
        """What came while the router slept."""
        self._passages: dict[RequestNumber, RouterRequest] = {}
        self._orphans: dict[RequestNumber, UnclaimedAnswer] = {}
        self._by_session: dict[Session, RouterLine] = {}
        self._acts: deque[Act] = deque()
        self._acting = False
        self._alarm = Alarm(self.host, self._tick)
        self._begin()

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def boot_if_down(self) -> None:
        if not self.host.up:
            self.host.restart()
            self._begin()

    def _begin(self) -> None:
        self.switch = RouterSessions(Router(self.config, self._secret, self._seed + self.host.lives), ROUTER)
        self.book.begin(self.host.world.now_us)
        self._alarm = Alarm(self.host, self._tick)
        self.doors = [RouterLine(self, number, self._lines) for number in range(self._doors)]
        self.lines += [door.line for door in self.doors]
        self._note(f"starts life {self.host.lives + 1}")

    def crash(self) -> None:
        if not self.host.up:
            return
        self.book.died()
        now_us = self.host.world.now_us
        if not self.host.paused:  # else it has slept over what became of them
            self.kept.update({(origin, now_us): instances for origin, instances in self.book.kept.items()})
        self.disturbed_us = now_us
        self.former.append(self.switch)
        self.host.resume()
        self.host.crash()
        self._note("is down")
        passages = [*self._passages.values(), *self._unseen]
        self._passages.clear()
        self._unseen.clear()
        self._acts.clear()
        self._orphans.clear()
        self.found.clear()
        self._by_session.clear()
        for passage in passages:
            if passage.is_there:
                passage.asker.gone()

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, group: Sequence[Submission], asker: RequestListener) -> RouterRequest | None:
        """None where there is no router; else it is looked at now, or when the router wakes up."""
        if not self.host.up:
            return None
        passage = RouterRequest(self, asker)
        self._unseen.append(passage)
        self.host.run(self._submit, passage, group)
        return passage

    def serving(self) -> dict[int, bool]:
        """As far as a client can know."""
        return {}

    def _submit(self, passage: RouterRequest, group: Sequence[Submission]) -> None:
        origin = group[0].request_id.encode()
        self._unseen.remove(passage)
        body, acts = self.switch.submit(group[0].salt.decode(), group, origin, self.host.world.now_us)
        passage.body = body
        self._passages[body] = passage
        self.book.asked(body, group, origin, self.host.world.now_us)
        self._carry_out(acts)

    def leave(self, passage: RouterRequest) -> None:
        if passage.body is not None and self._passages.pop(passage.body, None) is not None:
            self.book.left(passage.body)
            self._carry_out(self.switch.leave(passage.body, self.host.world.now_us))

    def cut(self, passage: RouterRequest, place: int, keep: int) -> None:
        if passage.body is not None and passage.body in self._passages:
            self.book.cut(passage.body, place)
            self._carry_out(self.switch.stop_choice(passage.body, place, keep, self.host.world.now_us))

    def claim(self, group: Sequence[Submission], asker: RequestListener) -> tuple[RouterRequest, UnclaimedAnswer] | None:
        """A client comes for what it was in the middle of when an earlier router was lost. None: not known here (yet).

        What was asked for is in the origin, so that choices which no instance has kept can begin anew.
        """
        origin = group[0].request_id.encode()
        found = self.found.pop(origin, None) if self.host.up and not self.host.paused else None
        if found is None:
            return None
        passage = RouterRequest(self, asker)
        passage.body, passage.is_early = found.body, False
        self._passages[found.body] = passage
        self.book.claimed(found.body)
        self._acts.extend(self.switch.claim(found.body, self.host.world.now_us, group))
        self.host.after(0, self._drain)
        return passage, found

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, door: RouterLine) -> Session:
        session = self.switch.connected(self.host.world.now_us)
        self._by_session[session] = door
        self.book.connected(session, door.number)
        return session

    def heard(self, session: Session, frame: bytes) -> None:
        """A frame of an instance, or of whoever has the key of the cluster."""
        now_us = self.host.world.now_us
        try:
            message = decode_from_instance(frame)
            self.book.heard(session, message, now_us)
            acts = self.switch.receive(session, message, now_us)
        except WireError as error:
            self._shut(session, str(error))
            self.lost(session, str(error))
        else:
            self._carry_out(acts)

    def lost(self, session: Session, reason: str) -> None:
        self._by_session.pop(session, None)
        self.book.lost(session)
        self._carry_out(self.switch.lost(session, reason, self.host.world.now_us))

    def forged_by_member(self, door: RouterLine, frame: bytes) -> None:
        """A frame of a member that no member says: it is hung up on, and may join again."""
        session = door.session
        if session is not None:
            self.heard(session, frame)
            # Tokens of a request that the instance had before this session are not told from those of none.
            if session in self._by_session and b"step" not in frame:
                raise LawBroken(STRANGERS, f"instance {door.number} said {frame[:60]!r}, and is still listened to")

    def strangers(self, frames: list[bytes]) -> None:
        """Somebody connects, says this, and hangs up."""
        before = self._lives()
        session = self.switch.connected(self.host.world.now_us)
        for frame in frames:
            try:
                acts = self.switch.receive(session, decode_from_instance(frame), self.host.world.now_us)
            except WireError as error:
                acts = self.switch.lost(session, str(error), self.host.world.now_us)
            self._carry_out(acts)
        self._carry_out(self.switch.lost(session, "it is gone", self.host.world.now_us))
        if self._lives() != before:
            raise LawBroken(STRANGERS, f"{before} were members, and after {frames[:3]} it was {self._lives()}")

    def _lives(self) -> list[tuple[str, int]]:
        return [(view.facts.name, view.facts.incarnation) for view in self.switch.router.views()]

    def knows(self, name: str) -> bool:
        return any(name == known for known, _ in self._lives())

    def wake(self) -> None:
        self.disturbed_us = self.host.world.now_us
        self.book.woke(self.host.world.now_us)
        self.host.resume()
        self._tick()  # before anything that came meanwhile is read

    def drain(self, name: str) -> None:
        """As `baton drain` orders it."""
        self._carry_out(self.switch.drain(name, self.host.world.now_us))

    # ── what the router believes ─────────────────────────────────────────────────────────────────────────────────────────

    def open_at(self) -> dict[Session, int]:
        fleet = self.switch.router.fleet
        return {session: len(member.choices) for session, member in fleet.members.items()}

    def holders(self, key: bytes) -> tuple[Session, ...]:
        return self.switch.router.holders(key)

    # ── the switch ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        deadline = self.switch.next_deadline()
        if deadline is not None and deadline <= self.host.world.now_us:
            self._carry_out(self.switch.tick(self.host.world.now_us))
        else:
            self._alarm.set(deadline)

    def _carry_out(self, acts: Sequence[Act]) -> None:
        """In order. What clients do about what they hear comes after everything that was to be done already."""
        self._acts.extend(acts)
        self._drain()

    def _drain(self) -> None:
        if self._acting:
            return
        self._acting = True
        try:
            while self._acts:
                self._act(self._acts.popleft())
        finally:
            self._acting = False
        self._alarm.set(self.switch.next_deadline())
        self.book.looked(self, self.host.world.now_us)

    def _act(self, act: Act) -> None:
        self.book.acted(act, self.host.world.now_us)
        match act:
            case DeliverTokens(body, choice, tokens, _, cached, outcome):  # by far the most
                self._deliver(body, choice, tokens, cached, outcome)
            case SayToInstance(session, message):
                if session in self._by_session:
                    self._by_session[session].say(message)
            case CloseConnection(session, reason):
                self._shut(session, reason)
            case RequestOpened(body):
                if (passage := self._passages.get(body)) is not None and passage.is_there:
                    passage.is_early = False
                    passage.asker.opened()
            case RequestDeclined(body, refusal):
                if (passage := self._passages.pop(body, None)) is not None and passage.is_there:
                    passage.asker.declined(refusal)
            case UnclaimedFound(body, origin, delivered, _, cached, outcomes):
                tokens_known = [None if tokens is None else list(tokens) for tokens in delivered]
                found = UnclaimedAnswer(body, origin, tokens_known, list(cached), list(outcomes))
                self.found[origin] = self._orphans[body] = found
            case UnclaimedDropped(body):
                self.found.pop(self._orphans.pop(body).origin, None)
            case FleetChanged(name, incarnation, what, why):
                self._note(f"sees {name}, life {incarnation}: {what}, {why}")
            case TimelineNoted(body, choice, stage, where, _, why):
                if stage in TOLD:
                    self._note(f"body {body}.{choice} {stage.value} {where or ''} {why}")
                if stage is TimelineStage.PLACED and (passage := self._passages.get(body)) is not None:
                    passage.asker.placed(where or "")

    def _deliver(
        self, body: RequestNumber, choice: int, tokens: list[int], cached: int | None, outcome: ChoiceOutcome | None
    ) -> None:
        passage = self._passages.get(body)
        if passage is not None and passage.is_there:
            passage.asker.progress(choice, tokens, 0, len(tokens), cached, outcome)
        elif (found := self._orphans.get(body)) is not None:
            known = found.tokens[choice]
            found.tokens[choice] = (known or []) + tokens
            found.cached[choice] = cached if found.cached[choice] is None else found.cached[choice]
            found.outcomes[choice] = outcome

    def _shut(self, session: Session, reason: str) -> None:
        door = self._by_session.pop(session, None)
        if door is not None:
            door.close(reason)

    def _note(self, what: str) -> None:
        if self.host.world.keeps_notes:
            self.host.world.note(ROUTER, what)


class RouterLine:
    """The router's end of one line."""

    def __init__(self, gate: RouterHost, number: int, lines: Lines) -> None:
        self.number = number
        self.session: Session | None = None
        self._gate = gate
        self._outbox: deque[bytes] = deque()
        theirs, ours = line_names(number)
        self.line = lines.acceptor(gate.host, ours, theirs, self)

    def say(self, message: FromRouter) -> None:
        self._outbox.append(encode_membership(message))
        self._post()
        if len(self._outbox) > OUTBOX_MAX:
            raise LawBroken(LINE_BOUND, f"{len(self._outbox)} messages wait at the router for instance {self.number}")

    def close(self, reason: str) -> None:
        self.session = None
        self._outbox.clear()
        self.line.close(reason)

    def opened(self) -> None:
        self.session = self._gate.connected(self)

    def lost(self, reason: str) -> None:
        session, self.session = self.session, None
        self._outbox.clear()
        if session is not None:
            self._gate.lost(session, reason)

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            if self.session is not None:  # else it was closed because of a frame before
                self._gate.heard(self.session, frame)
        self._post()

    def _post(self) -> None:
        while self._outbox and self.session is not None and not self.line.is_full:
            self.line.send(self._outbox.popleft())
