"""What was promised about carrying, checked on what one router hears from instances and says to them and to clients.

Owns the book of one life of the router: who is a member, which choice is open where, what was delivered of it, and how its
legs ended. It is kept from messages and acts alone, so it holds whatever the tables behind them look like inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.config import ROLES
from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.request import FinishReason, Submission
from baton.core.errors import Refusal, RefusalCode
from baton.core.handover.messages import PdCode
from baton.core.routing.events import (
    Body,
    Declined,
    Delivered,
    FleetChanged,
    Orphan,
    OrphanDropped,
    Outcome,
    RouterConfig,
    Session,
)
from baton.sim.faults import Fault
from baton.sim.gate_watcher import GateView, GateWatcher
from baton.sim.laws import (
    BACK_OFF,
    DESERVED_END,
    DESERVED_LOSS,
    DESERVED_SUSPICION,
    DRAINS_IN_TIME,
    ENDS_AT_ONCE,
    ENDS_ONCE,
    FENCED,
    FORGOTTEN,
    GOES_ON,
    ONE_PLACE,
    OPEN_COUNTS,
    RIGHT_PLACE,
    SUSPECTED_IN_TIME,
    TRUE_BILL,
    TRUE_NAMES,
    WAITS_IN_TIME,
    LawBroken,
)
from baton.wire.engine_messages import (
    AcceptedAs,
    Cancel,
    Drain,
    RefusedWith,
    StepOutput,
    StopAt,
    WireBill,
    WireEnded,
    WireSubmission,
    wire_submission,
)
from baton.wire.router_messages import (
    Beat,
    Forget,
    FromInstance,
    FromRouter,
    HeldGroup,
    Join,
    Leaving,
    Place,
    Settled,
    Welcome,
)
from baton.wire.router_sessions import Act, Close, Say

SLACK_US = 5_000
"""Beyond the beat within which silence is noticed."""
COUNT_EVERY = 8
KEYS_LOOKED_AT = 8
ABOUT_THE_INSTANCE = (RefusalCode.DRAINING, RefusalCode.QUEUE_FULL, RefusalCode.WRONG_ROLE, RefusalCode.DUPLICATE_ID)
TIMES = ("queue_us", "prefill_us", "transfer_us", "decode_us", "preemptions")
NO_ROOM = (PdCode.REFUSED, PdCode.PREEMPTED)


class Witness(Protocol):
    """What happened, as far as it excuses a router."""

    def may_be_suspected(self, instance: int) -> bool:
        """Whether something happened to this instance, or to the way to it, that can keep it from giving a sign of life."""

    def may_be_lost(self, instance: int, accepted: bool) -> bool:
        """Whether something happened that can end its session."""

    def fire(self, fault: Fault, where: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Hop:
    """A choice at an instance."""

    body: _Body
    choice: _Choice
    session: _Session
    leg: _Leg
    serial: int | None = None
    ended: WireEnded | None = None
    opened_us: int = 0
    """When the instance said that it had taken it."""
    called_back: bool = False
    """Cancelled, or refused, or its session is over: the choice may be elsewhere."""
    stopped: bool = False
    forgotten: bool = False

    @property
    def is_open(self) -> bool:
        if self.called_back or self.ended is not None or self.body.over:
            return False
        return self.choice.hop is self and self.choice.outcome is None


@dataclass(slots=True, eq=False)
class _Leg:
    hops: list[_Hop] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Session:
    number: Session
    instance: int
    join: Join | None = None
    welcomed: bool = False
    drains: bool = False
    drains_us: int = 0
    """Since when."""
    over: bool = False
    sign_us: int = 0
    tickets: dict[int, _Leg] = field(default_factory=dict)
    serials: dict[int, _Hop] = field(default_factory=dict)
    held: list[_Hop] = field(default_factory=list)
    """What it said it has kept, until it is welcomed."""
    doomed: bool = False
    """It said itself that its engine is silent."""
    said: set[bytes] = field(default_factory=set)
    """Names of prefixes that it has cached."""
    legs: int = 0

    def drain(self, now_us: int) -> None:
        if not self.drains:
            self.drains, self.drains_us = True, now_us

    def open_hops(self) -> list[_Hop]:
        """Those whose choice is here, and that somebody waits for."""
        hops = [*self.serials.values(), *(hop for leg in self.tickets.values() for hop in leg.hops)]
        return [hop for hop in hops if hop.is_open]

    @property
    def name(self) -> str:
        return "somebody" if self.join is None else self.join.name

    @property
    def serves(self) -> bool:
        role = None if self.join is None else ROLES.get(self.join.role)
        return self.welcomed and not self.over and not self.drains and role is not None and role.serves


@dataclass(slots=True, eq=False)
class _Choice:
    index: int
    name: str
    asked: WireSubmission | None
    """As its client did; None: a router before this one was asked."""
    prompt: bytes = b""
    delivered: list[int] = field(default_factory=list)
    hop: _Hop | None = None
    """Where it is."""
    legs: int = 0
    losses: int = 0
    yields: int = 0
    yielded_at: list[str] = field(default_factory=list)
    turned_down_by: str = ""
    """Who refused it last, or was lost with it."""
    no_room_us: int | None = None
    max_tokens: int | None = None
    bills: list[WireBill] = field(default_factory=list)
    outcome: Outcome | None = None
    cut: bool = False
    """Its client has everything it wants of it."""


@dataclass(slots=True, eq=False)
class _Body:
    body: Body | None
    origin: bytes
    arrived_us: int
    choices: list[_Choice]
    hops: list[_Hop] = field(default_factory=list)
    over: bool = False
    left: bool = False
    """Its client is gone, or none came for it."""
    found: bool = False
    """A router before this one was asked for it."""
    claimed: bool = False


class LegBook(GateWatcher):
    def __init__(self, config: RouterConfig, witness: Witness) -> None:
        super().__init__()
        self._config = config
        self._witness = witness
        self._suspected: set[tuple[str, int]] = set()
        self.begin(0)

    def begin(self, now_us: int) -> None:
        """A new life, which knows nothing."""
        self._began_us = now_us
        self._sessions: dict[Session, _Session] = {}
        self._bodies: dict[Body, _Body] = {}
        self._origins: dict[bytes, _Body] = {}
        self._touched: dict[bytes, _Body] = {}
        self._dead: list[_Session] = []
        """Since everything was last looked at."""
        self._left_behind: list[_Hop] = []
        """Where choices were that have been found elsewhere."""
        self._looks = 0
        self._joining: _Session | None = None
        """Just welcomed: what it holds and nobody wants is about to be said."""
        self._serves = False
        """Whether somebody served when everything was last looked at."""
        self._served_us = now_us
        """When somebody last served."""
        self._served_us_before = now_us
        """Since when somebody has."""
        self._woke_us = now_us

    def members(self) -> dict[int, set[bytes]]:
        """By instance: what it says that it has cached."""
        return {session.instance: session.said for session in self._sessions.values() if session.welcomed}

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def woke(self, now_us: int) -> None:
        """The router was not awake: in that time it could suspect nobody."""
        self._woke_us = now_us
        for session in self._sessions.values():
            session.sign_us = now_us

    def connected(self, session: Session, instance: int) -> None:
        self._sessions[session] = _Session(session, instance)

    def asked(self, body: Body, group: Sequence[Submission], origin: bytes, now_us: int) -> None:
        choices = []
        for index, item in enumerate(group):
            asked = wire_submission(item)
            choices.append(_Choice(index, item.request_id, asked, item.prompt.tobytes(), max_tokens=item.max_tokens))
        self._bodies[body] = self._origins[origin] = _Body(body, origin, now_us, choices)

    def left(self, body: Body) -> None:
        self._bodies[body].left = True
        self._over(self._bodies[body])

    def cut(self, body: Body, choice: int) -> None:
        self._bodies[body].choices[choice].cut = True
        self._touched[self._bodies[body].origin] = self._bodies[body]

    def claimed(self, body: Body) -> None:
        self._bodies[body].claimed = True
        self._perhaps_over(self._bodies[body])

    def lost(self, session: Session) -> None:
        """The connection is over, or was closed."""
        known = self._sessions.pop(session, None)
        if known is None or known.over:
            return
        known.over = True
        hops = [*known.serials.values(), *(hop for leg in known.tickets.values() for hop in leg.hops)]
        for hop in hops:
            if hop.ended is None and not hop.called_back and hop.choice.hop is hop:
                hop.choice.losses += 1
                hop.choice.turned_down_by = known.name
            hop.called_back = True
        self._dead.append(known)

    # ── what instances say ───────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, number: Session, message: FromInstance, now_us: int) -> None:
        session = self._sessions.get(number)
        if session is None or (session.welcomed and isinstance(message, Join | HeldGroup | Settled)):
            return
        match message:
            case StepOutput():
                session.sign_us = now_us
                for ended in message.ended:
                    self._ended(session, ended, now_us)
            case Beat():
                session.sign_us = now_us
                session.doomed = message.engine_silent_us >= self._config.suspect_us
                self._names(session, message)
            case AcceptedAs(ticket, serials):
                leg = session.tickets.pop(ticket, None)
                for hop, serial in zip(leg.hops if leg is not None else (), serials, strict=False):
                    hop.serial, hop.opened_us = serial, now_us
                    session.serials[serial] = hop
                    self._touch(hop)
                    if hop.choice.hop is not hop:  # it was found elsewhere meanwhile
                        self._left_behind.append(hop)
            case RefusedWith(ticket, code):
                leg = session.tickets.pop(ticket, None)
                for hop in leg.hops if leg is not None else ():
                    hop.called_back = True
                    hop.choice.turned_down_by = session.name
                    if code in ABOUT_THE_INSTANCE:
                        hop.choice.no_room_us = now_us
                    else:
                        hop.choice.yields += 1
                if code is RefusalCode.QUEUE_FULL:
                    self._witness.fire(Fault.LEG_REFUSED, session.name)
            case Join():
                session.join, session.sign_us = message, now_us
                if message.draining:
                    session.drain(now_us)
            case HeldGroup():
                self._holds(session, message)
            case Settled():
                session.sign_us = now_us
            case Leaving():
                session.drain(now_us)

    def _names(self, session: _Session, beat: Beat) -> None:
        if beat.fresh:
            session.said.clear()
        session.said.difference_update(_keys(beat.forgotten))
        session.said.update(_keys(beat.named))

    def _ended(self, session: _Session, ended: WireEnded, now_us: int) -> None:
        hop = session.serials.get(ended.serial)
        if hop is None:
            return
        hop.ended = ended
        self._touch(hop)
        choice = hop.choice
        if hop.called_back or choice.hop is not hop:
            return
        choice.bills.append(ended.bill)
        if ended.reason is FinishReason.RESCHEDULE and ended.fault is not None and ended.fault.code in NO_ROOM:
            choice.yields += 1
            choice.yielded_at.append(session.name)
            choice.no_room_us = now_us
            self._witness.fire(Fault.LEG_YIELDED, session.name)
        elif ended.reason in (FinishReason.RESCHEDULE, FinishReason.ERROR, FinishReason.ABORT):
            choice.losses += 1
            choice.turned_down_by = session.name

    def _holds(self, session: _Session, message: HeldGroup) -> None:
        body = self._origins.get(message.origin)
        if body is None:
            blank = [_Choice(index, f"{message.origin!r}.{index}", None) for index in range(message.body_choices)]
            body = self._origins[message.origin] = _Body(None, message.origin, 0, blank, found=True)
        leg = _Leg()
        for line in message.lines:
            choice = body.choices[message.choices[line.place]]
            hop = _Hop(body, choice, session, leg, line.serial, line.ended)
            leg.hops.append(hop)
            body.hops.append(hop)
            session.serials[line.serial] = hop
            session.held.append(hop)

    # ── what the router says ─────────────────────────────────────────────────────────────────────────────────────────────

    def acted(self, act: Act, now_us: int) -> None:
        if self._joining is not None and not _is_of_join(act, self._joining.number):
            self._found_where_they_were(self._joining)
        match act:
            case Say(number, message):
                session = self._sessions.get(number)
                if session is not None:
                    self._said(session, message, now_us)
            case Delivered(body, choice, tokens, _, _, outcome):
                self._delivered(self._bodies[body], choice, tokens, outcome, now_us)
            case Close(number):
                self.lost(number)
            case Declined(body, refusal):
                self._turned_down(self._bodies[body], refusal, now_us)
            case Orphan():
                self._orphan(act, now_us)
            case OrphanDropped(body):
                self._over(self._bodies[body])
            case FleetChanged():
                self._changed(act)
            case _:
                pass

    def _said(self, session: _Session, message: FromRouter, now_us: int) -> None:
        match message:
            case Place():
                self._placed(session, message, now_us)
            case Cancel(serial):
                if serial in session.serials:
                    session.serials[serial].called_back = True
            case StopAt(serial):
                if serial in session.serials:
                    session.serials[serial].stopped = True
            case Forget(serials):
                for serial in serials:
                    if serial in session.serials:
                        session.serials[serial].forgotten = True
            case Welcome():
                self._welcomed(session)
            case Drain():
                session.drain(now_us)

    def _welcomed(self, session: _Session) -> None:
        join = session.join
        for other in self._sessions.values():
            if other is not session and other.welcomed and join is not None and other.name == join.name:
                raise LawBroken(FENCED, f"{join.name}: life {join.incarnation} is welcomed beside {other.join}")
        session.welcomed = True
        self._joining = session

    def _gives(self, address: str) -> None:
        """Somebody is to prefill there, and will have that cached."""
        givers = [s for s in self._sessions.values() if s.join is not None and s.join.peer_address == address and s.welcomed]
        for session in givers:
            session.legs += 1
        if not givers:
            raise LawBroken(RIGHT_PLACE, f"{address} shall prefill, and is not there")

    def _placed(self, session: _Session, place: Place, now_us: int) -> None:
        body = self._origins[place.origin]
        if not session.serves:
            raise LawBroken(RIGHT_PLACE, f"a leg of {body.origin!r} goes to {session.name}: {session.join}")
        if session.join is not None and len(session.open_hops()) >= self._config.ahead * session.join.slots:
            raise LawBroken(RIGHT_PLACE, f"{len(session.open_hops())} choices are open at {session.name}, and more come")
        leg = session.tickets[place.ticket] = _Leg()
        leaders: dict[str, bytes] = {}
        for item, index in zip(place.group, place.choices, strict=True):
            choice = body.choices[index]
            prompt = item.prompt if item.leader is None else leaders.get(item.leader)
            if item.prompt is not None:
                leaders[item.request_id] = item.prompt
            self._same_request(choice, item, prompt)
            if item.prefill_at:
                self._gives(item.prefill_at)
            self._may_be_placed(body, choice, session, now_us)
            if len(place.group) == 1:
                self._avoids(choice, session)
            choice.legs += 1
            session.legs += 1
            choice.hop = hop = _Hop(body, choice, session, leg)
            leg.hops.append(hop)
            body.hops.append(hop)

    def _same_request(self, choice: _Choice, item: WireSubmission, prompt: bytes | None) -> None:
        generated = [int.from_bytes(item.generated[at : at + 4], "little") for at in range(0, len(item.generated), 4)]
        if generated != choice.delivered:
            raise LawBroken(GOES_ON, f"{choice.name} had {choice.delivered}, and its leg goes on after {generated}")
        asked = choice.asked
        if asked is None:
            return
        if prompt != choice.prompt or (asked.request_id, asked.sampling, asked.salt, asked.priority) != (
            item.request_id, item.sampling, item.salt, item.priority,
        ):  # fmt: skip
            raise LawBroken(GOES_ON, f"{choice.name} asked for {asked}, and its leg for {item}")
        if choice.max_tokens is None:
            choice.max_tokens = item.max_tokens
        if item.max_tokens != choice.max_tokens:
            raise LawBroken(GOES_ON, f"{choice.name} asked for {choice.max_tokens} tokens, its leg for {item.max_tokens}")

    def _may_be_placed(self, body: _Body, choice: _Choice, session: _Session, now_us: int) -> None:
        config, hop = self._config, choice.hop
        if body.over or choice.outcome is not None:
            raise LawBroken(ENDS_ONCE, f"{choice.name} has ended, and a leg of it goes to {session.name}")
        if hop is not None and hop.ended is None and not hop.called_back:
            raise LawBroken(ONE_PLACE, f"{choice.name} is open at {hop.session.name} and goes to {session.name}")
        if choice.yields > config.preempt_retry_count or choice.losses > config.loss_retry_count:
            raise LawBroken(
                DESERVED_END, f"{choice.name}: {choice.yields} times no room, {choice.losses} losses, and goes on"
            )
        if choice.no_room_us is not None and now_us < choice.no_room_us + config.backoff_us // 2:
            raise LawBroken(
                BACK_OFF, f"{choice.name} goes to {session.name} {now_us - choice.no_room_us} µs after a refusal"
            )
        choice.no_room_us = None

    def _avoids(self, choice: _Choice, session: _Session) -> None:
        if not self._config.preempt_retry_exclude_decode or session.name not in choice.yielded_at:
            return
        avoided = {*choice.yielded_at, choice.turned_down_by}
        others = [other.name for other in self._sessions.values() if other.serves and other.name not in avoided]
        if others:
            raise LawBroken(RIGHT_PLACE, f"{choice.name} goes back to {session.name}, though {others} are there")

    def _delivered(self, body: _Body, index: int, tokens: list[int], outcome: Outcome | None, now_us: int) -> None:
        choice = body.choices[index]
        if choice.outcome is None and body.left and outcome is not None and outcome.reason is FinishReason.ABORT:
            choice.outcome = outcome
            return
        if choice.outcome is not None or body.over:
            raise LawBroken(ENDS_ONCE, f"{choice.name} hears {tokens} {outcome} after its end")
        choice.delivered += tokens
        if outcome is None:
            return
        choice.outcome = outcome
        self._deserved(body, choice, outcome, now_us)
        self._billed(body, choice, outcome)
        self._perhaps_over(body)

    def _perhaps_over(self, body: _Body) -> None:
        """What nobody has come for yet may still be wanted."""
        if all(choice.outcome is not None for choice in body.choices) and (body.claimed or not body.found):
            self._over(body)

    def _turned_down(self, body: _Body, refusal: Refusal, now_us: int) -> None:
        if refusal.code is RefusalCode.NO_INSTANCE:
            if not any(self._gave_out(body, choice, now_us) for choice in body.choices):
                raise LawBroken(
                    DESERVED_END, f"{body.origin!r}, {now_us - body.arrived_us} µs old, is turned down: {refusal}"
                )
        elif any(choice.delivered for choice in body.choices):
            raise LawBroken(DESERVED_END, f"{body.origin!r} has begun, and is turned down: {refusal}")
        self._over(body)

    def _gave_out(self, body: _Body, choice: _Choice, now_us: int) -> bool:
        """Whether it was tried as often and as long as it may be."""
        config = self._config
        losses_max = min(config.loss_retry_count, config.fruitless_loss_count - 1)
        ran_out = choice.yields > config.preempt_retry_count or choice.losses > losses_max
        nobody = now_us >= self._served_us + config.absent_us and not any(s.serves for s in self._sessions.values())
        return ran_out or nobody or now_us >= body.arrived_us + config.deadline_us

    def _deserved(self, body: _Body, choice: _Choice, outcome: Outcome, now_us: int) -> None:
        if outcome.reason in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if outcome.reason is FinishReason.ABORT and not body.claimed and body.found:
            return  # nobody came for it
        if not (self._gave_out(body, choice, now_us) or body.found):
            counts = f"{choice.yields} times no room, {choice.losses} losses, open for {now_us - body.arrived_us} µs"
            raise LawBroken(DESERVED_END, f"{choice.name} is given up after {counts}: {outcome}")

    def _billed(self, body: _Body, choice: _Choice, outcome: Outcome) -> None:
        bill = outcome.bill
        if body.found:
            return
        for name in TIMES:
            if getattr(bill, name) != sum(getattr(item, name) for item in choice.bills):
                raise LawBroken(TRUE_BILL, f"{choice.name}: {name} of {choice.bills} is not that of {bill}")
        fed = sum(item.computed_tokens + item.recomputed_tokens for item in choice.bills)
        if bill.computed_tokens + bill.recomputed_tokens != fed or bill.attempts != choice.legs:
            raise LawBroken(TRUE_BILL, f"{choice.name} had {choice.legs} legs with {choice.bills}, and is billed {bill}")
        least = len(choice.prompt) // 4 + outcome.generated_tokens - 1
        whole = choice.legs == len(choice.bills) == 1 and outcome.reason is FinishReason.LENGTH
        if whole and bill.cached_tokens + bill.computed_tokens != least:
            raise LawBroken(TRUE_BILL, f"{choice.name}: {least} tokens had to be fed: {bill}")

    def _orphan(self, act: Orphan, now_us: int) -> None:
        body = self._origins[act.origin]
        if body.over:
            raise LawBroken(ENDS_ONCE, f"{act.origin!r} is over, and is found again as {act.body}")
        body.body, body.arrived_us = act.body, now_us
        self._bodies[act.body] = body
        for choice, tokens, outcome in zip(body.choices, act.delivered, act.outcomes, strict=True):
            choice.delivered = list(tokens or ())
            choice.outcome = outcome

    def _changed(self, act: FleetChanged) -> None:
        life = act.name, act.incarnation
        if act.what == "joined" and life in self._suspected:
            self._witness.fire(Fault.ZOMBIE, act.name)
        if act.what not in ("suspected", "stuck", "lost"):
            return
        instance = next((s.instance for s in reversed(self._dead) if s.name == act.name and s.welcomed), None)
        if instance is None:
            instance = next((s.instance for s in self._sessions.values() if s.name == act.name and s.welcomed), None)
        if act.what != "lost":
            self._suspected.add(life)
        if instance is None:
            return
        if act.what == "lost" and not self._witness.may_be_lost(instance, False):
            raise LawBroken(DESERVED_LOSS, f"{act.name}, life {act.incarnation}: {act.why}")
        if act.what != "lost" and not self._witness.may_be_suspected(instance):
            raise LawBroken(DESERVED_SUSPICION, f"{act.name}, life {act.incarnation}: {act.what}, {act.why}")

    # ── after everything was said ────────────────────────────────────────────────────────────────────────────────────────

    def looked(self, view: GateView, now_us: int) -> None:
        touched, self._touched = self._touched, {}
        dead, self._dead = self._dead, []
        left_behind, self._left_behind = self._left_behind, []
        for hop in left_behind:
            if hop.serial is not None and hop.ended is None and not hop.called_back and hop.choice.hop is not hop:
                raise LawBroken(ONE_PLACE, f"{hop.choice.name} goes on elsewhere, and is still open at {hop.session.name}")
        self._looks += 1
        if self._joining is not None:
            self._found_where_they_were(self._joining)
        if not self._looks % COUNT_EVERY:
            self._counted(view)
        for session in dead:
            self._forgets_names(session, view)
        for session in self._sessions.values():
            if session.welcomed:
                self._in_time(session, now_us)
        serves = any(session.serves for session in self._sessions.values())
        if serves or self._serves:
            self._served_us = now_us
        if not serves:
            self._served_us_before = now_us
        self._serves = serves
        if not serves or not self._looks % COUNT_EVERY:
            self._waits_in_time(now_us)
        for body in touched.values():
            if body.over:
                self._let_go(body)
            for choice in body.choices:
                at = choice.hop if choice.cut else None
                if at is not None and at.is_open and at.serial is not None and not at.stopped:
                    raise LawBroken(ENDS_AT_ONCE, f"{choice.name} was cut, and {at.session.name} still computes it")

    def _counted(self, view: GateView) -> None:
        ours = {session.number: 0 for session in self._sessions.values() if session.welcomed}
        for body in self._bodies.values():
            for choice in body.choices:
                if choice.hop is not None and choice.hop.is_open:
                    ours[choice.hop.session.number] += 1
        theirs = view.open_at()
        if ours != theirs:
            raise LawBroken(OPEN_COUNTS, f"the router counts {theirs}, and it is {ours}")

    def _waits_in_time(self, now_us: int) -> None:
        config, late_us = self._config, self._config.beat_us + SLACK_US
        serves = any(session.serves for session in self._sessions.values())
        for body in self._bodies.values():
            if body.over or (body.found and not body.claimed):
                continue
            old_us = now_us - max(body.arrived_us, self._woke_us)
            waits = any(
                c.outcome is None and not (c.delivered and c.hop is not None and c.hop.is_open) for c in body.choices
            )
            if waits and old_us > config.deadline_us + late_us:
                raise LawBroken(WAITS_IN_TIME, f"{body.origin!r} is {old_us} µs old")
            alone_us = now_us - max(body.arrived_us, self._served_us, self._woke_us)
            begun = body.found or any(c.delivered or (c.hop is not None and c.hop.is_open) for c in body.choices)
            if not serves and not begun and alone_us > config.absent_us + SLACK_US:
                raise LawBroken(WAITS_IN_TIME, f"{body.origin!r} has waited for {alone_us} µs, and nobody serves")
        for session in self._sessions.values():
            due_us = max(session.drains_us + config.drain_us, self._woke_us, self._served_us_before)
            if not (session.welcomed and session.drains and serves):
                continue
            for hop in session.open_hops():
                if hop.serial is not None and not hop.stopped and now_us > max(due_us, hop.opened_us) + late_us:
                    raise LawBroken(
                        DRAINS_IN_TIME, f"{hop.choice.name} is still at {session.name} since {session.drains_us}"
                    )

    def _forgets_names(self, dead: _Session, view: GateView) -> None:
        for key in sorted(dead.said)[:KEYS_LOOKED_AT]:
            for number in view.holders(key):
                holder = self._sessions.get(number)
                if holder is None or (key not in holder.said and not holder.legs):
                    raise LawBroken(
                        TRUE_NAMES, f"{dead.name} is gone, and what it had cached is credited to session {number}"
                    )

    def _in_time(self, session: _Session, now_us: int) -> None:
        quiet_us = now_us - session.sign_us
        if session.doomed or quiet_us > self._config.suspect_us + self._config.beat_us + SLACK_US:
            raise LawBroken(
                SUSPECTED_IN_TIME, f"{session.name} is still a member, {quiet_us} µs after its last sign of life"
            )

    def _found_where_they_were(self, session: _Session) -> None:
        self._joining = None
        held, session.held = session.held, []
        for hop in held:
            choice = hop.choice
            if hop.called_back or hop.forgotten:
                continue
            self._touch(hop)
            before = choice.hop
            if hop.ended is not None:
                choice.bills.append(hop.ended.bill)
            else:
                choice.losses = max(0, choice.losses - 1)  # it was not lost after all
            if before is not None:
                self._left_behind.append(before)
            choice.hop = hop

    def _let_go(self, body: _Body) -> None:
        """Of a body that is over: what is open is ended, and what has ended is not kept."""
        for hop in body.hops:
            if hop.session.over or not hop.session.welcomed or hop.serial is None or hop.called_back:
                continue
            if hop.ended is None and not hop.stopped and not hop.forgotten:
                raise LawBroken(ENDS_AT_ONCE, f"{hop.choice.name} is over, and {hop.session.name} still computes it")
            if not hop.forgotten and all(other.ended is not None for other in hop.leg.hops):
                raise LawBroken(FORGOTTEN, f"{hop.choice.name} is over, and {hop.session.name} keeps it")

    def died(self) -> None:
        """The router is gone. Whoever works for it keeps what it has."""
        kept: dict[bytes, set[int]] = {}
        for body in self._bodies.values():
            at = [choice.hop for choice in body.choices if choice.outcome is None]
            if not body.over and all(hop is not None and hop.serial is not None and not hop.called_back for hop in at):
                kept[body.origin] = {hop.session.instance for hop in body.hops if not hop.session.over}
        self.kept = kept
        self._sessions.clear()

    def _over(self, body: _Body) -> None:
        body.over = True
        self._touched[body.origin] = body

    def _touch(self, hop: _Hop) -> None:
        self._touched[hop.body.origin] = hop.body


def _is_of_join(act: Act, session: Session) -> bool:
    return isinstance(act, Say) and act.session == session and isinstance(act.message, Cancel | Forget)


def _keys(data: bytes) -> list[bytes]:
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
