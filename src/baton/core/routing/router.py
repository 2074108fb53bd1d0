"""A router's decisions as one object: events go in, effects come out.

    effects  = router.handle(event, now_us)
    deadline = router.next_deadline()          # when a Due is due; None when there is nothing to wait for

Requests of clients come in, and each of their choices goes from instance to instance until it has ended: the client gets
every token once and in order, and one end. Late events (of sessions, attempts and requests that have ended) are counted and
ignored. A request that is cancelled before an instance has accepted it gets no answer; every other one is opened or
declined, once.

Has no clock, socket or random source: the real router process and the simulator drive this same object. Its parts:

    fleet_members    instances that have joined, drain, or are removed
    routed_requests  open requests and their ends
    dispatch         accepts requests, and places waiting choices
    attempts         messages of instances about placed choices, and retries
    adoption         requests of an earlier router
"""

from __future__ import annotations

from baton.core.content_hashes import ContentHashes
from baton.core.routing.adoption import Adoption
from baton.core.routing.attempts import Attempts
from baton.core.routing.config import RouterConfig
from baton.core.routing.dispatch import Dispatcher
from baton.core.routing.events import (
    AdmitInstance,
    AttemptAccepted,
    AttemptRefused,
    ClientLeft,
    CloseSession,
    DeadlineCame,
    FleetChanged,
    HeartbeatCame,
    Instance,
    InstanceDrains,
    InstanceJoined,
    InstanceLost,
    MaskCame,
    MessageCame,
    OrderDrain,
    RejectInstance,
    RequestArrived,
    RequestClaimed,
    RouterEffect,
    RouterEvent,
    Session,
    StopStringFound,
    TellPrefillPeers,
    TokensCame,
)
from baton.core.routing.expected_instances import ExpectedInstances
from baton.core.routing.fleet_members import (
    SECOND_LOOK_US,
    FleetMember,
    FleetMembers,
    InstanceView,
    MemberMove,
    MemberState,
)
from baton.core.routing.identity import RequestNumber
from baton.core.routing.routed_request import ChoiceMove, ChoiceState, RoutedRequest
from baton.core.routing.routed_requests import RoutedRequests, RouterCounts, digest_of, sooner
from baton.core.routing.server_absence import ServerAbsence

ADDRESSES_MAX = 256
"""Most prefilling peers that a decoding instance is told of."""
OWN_LAG_US = 20_000
"""A router that handles its deadline this late, or later, stood still meanwhile."""
SETTLE_US = 3_000_000
"""Time after the start by which all instances of an earlier router have connected."""


class Router:
    def __init__(self, config: RouterConfig, prefix_secret: bytes, seed: int) -> None:
        self.config = config
        self.fleet = FleetMembers(config)
        self.hashes = ContentHashes(prefix_secret)
        self._requests = RoutedRequests(config, self.fleet, self.hashes)
        self._absence = ServerAbsence(self._requests)
        self._dispatcher = Dispatcher(self._requests, self._absence, seed)
        self._attempts = Attempts(self._requests, self._absence, seed)
        self._adoption = Adoption(self._requests)
        self._tick_us = 0
        self._settles_us: int | None = None

    # ── views ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        """Choices that wait for a place."""
        return self._requests.queue.count

    @property
    def open_requests(self) -> int:
        return len(self._requests.by_number)

    @property
    def counts(self) -> RouterCounts:
        return self._requests.counts

    @property
    def expected(self) -> ExpectedInstances:
        return self._absence.expected

    def views(self, now_us: int | None = None) -> list[InstanceView]:
        return self.fleet.views(self._requests.now_us if now_us is None else now_us)

    def moves(self) -> dict[tuple[ChoiceState, ChoiceMove], int]:
        """Number of times each transition of a choice was taken; those of instances are in `fleet`."""
        return self._requests.moves()

    def preemptions(self, origin: bytes) -> tuple[int, ...]:
        """By choice of an open request: how often it was preempted anywhere; for the laws."""
        request = self._requests.by_origin.get(digest_of(origin))
        return () if request is None else tuple(choice.preemptions for choice in request.choices)

    def known_tokens(self, number: RequestNumber, choice: int) -> int:
        """For the log: tokens of the prompt and the answer of a choice so far; 0 where its request is over."""
        request = self._requests.by_number.get(number)
        if request is None:
            return 0
        submission = request.choices[choice].submission
        return len(request.choices[choice].delivered) + (0 if submission is None else len(submission.prompt))

    def holders(self, key: bytes) -> tuple[Session, ...]:
        """The sessions whose instances are believed to have this prefix cached; for the laws."""
        return tuple(self._dispatcher.prefixes.longest([key]))

    def requests(self) -> tuple[RoutedRequest, ...]:
        """For the laws."""
        return tuple(self._requests.by_number.values())

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: RouterEvent, now_us: int) -> list[RouterEffect]:
        requests = self._requests
        effects: list[RouterEffect] = []
        requests.effects = effects
        self._wake(now_us)
        match event:
            case TokensCame():
                self.fleet.heard(event.session, now_us)
                self._attempts.came(event)
            case HeartbeatCame():
                self._beaten(event)
            case MessageCame(session):
                self.fleet.heard(session, now_us)
            case AttemptAccepted():
                self.fleet.heard(event.session, now_us)
                self._attempts.accepted(event)
            case AttemptRefused():
                self.fleet.heard(event.session, now_us)
                self._attempts.refused(event)
            case MaskCame():
                self._attempts.mask_came(event)
            case RequestArrived():
                self._dispatcher.arrived(event)
            case ClientLeft(number):
                requests.left(number)
            case StopStringFound():
                requests.cut(event)
            case InstanceJoined():
                self._joined(event)
            case InstanceLost(session, reason):
                self._parted(session, reason)
            case InstanceDrains(name):
                self._drains(name)
            case RequestClaimed():
                self._adoption.claimed(event)
            case DeadlineCame():
                self._due()
        if requests.should_place:
            self._absence.expire()
            self._dispatcher.place()
        return effects

    def next_deadline(self) -> int | None:
        due_us = sooner(self._requests.queue.next_due(), self._absence.due_us)
        due_us = sooner(sooner(due_us, self._requests.next_deadline()), self._adoption.next_deadline())
        return sooner(due_us, self._tick_us) if self.fleet.members else due_us

    def _wake(self, now_us: int) -> None:
        """An awake router looks at its instances when that is due: what it is late by, it was not awake."""
        late_us = now_us - max(self._tick_us, self._requests.now_us)
        self._requests.now_us = now_us
        if self._settles_us is None:
            self._settles_us = now_us + SETTLE_US
            self._absence.watch()
        elif late_us > OWN_LAG_US and self.fleet.members:
            self.fleet.excuse(late_us)

    def _due(self) -> None:
        now_us = self._requests.now_us
        self._tick_us = now_us + self.config.beat_us
        for suspicion in self.fleet.silent(now_us):
            self._suspect(suspicion.member, suspicion.what, suspicion.why)
        look_us = self.fleet.next_look()
        if look_us is not None:
            self._tick_us = min(self._tick_us, max(look_us, now_us + SECOND_LOOK_US))
        for member in self.fleet.drained_too_long(now_us):
            self._attempts.move_all(member)
        self._tell_prefill_peers()
        self._adoption.expire()
        self._requests.end_overdue()
        self._absence.expire()
        self._dispatcher.prefixes.expire(now_us)
        self._requests.should_place = True

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _joined(self, event: InstanceJoined) -> None:
        facts, fleet, now_us = event.facts, self.fleet, self._requests.now_us
        if event.session in fleet.members:
            self.counts.late += 1
            return
        if not self._requests.by_number:
            fleet.forget_model()
        objection = fleet.objection(facts, now_us)
        if objection is not None:
            outlived_by = objection.known_incarnation
            self._requests.effects.append(RejectInstance(event.session, objection.reason, objection.fenced, outlived_by))
            what = "fenced" if objection.fenced else "refused"
            self._requests.effects.append(FleetChanged(facts.name, facts.incarnation, what, objection.reason))
            return
        old = fleet.by_name.get(facts.name)
        if old is not None:
            same = old.facts.incarnation == facts.incarnation
            why = "it has connected again" if same else f"incarnation {facts.incarnation} has joined"
            self._requests.effects.append(CloseSession(old.session, why))
            self._lose(old, MemberMove.SUCCEED, "lost", why)
        if not fleet.members:
            self._tick_us = now_us + self.config.beat_us
        member = fleet.admit(event.session, facts, event.draining, now_us)
        self._dispatcher.prefixes.open(event.session, facts.blocks)
        at = len(self._requests.effects)
        keep = self._adoption.adopt(member, event.held)
        self._requests.effects.insert(at, AdmitInstance(event.session, keep))  # before anything that refers to its attempts
        self._requests.effects.append(FleetChanged(facts.name, facts.incarnation, "joined", facts.role))
        if member.state is MemberState.DRAINING:
            if not event.draining:
                self._requests.effects.append(OrderDrain(event.session))  # its connection broke before it got the order
            self._requests.effects.append(
                FleetChanged(facts.name, facts.incarnation, "draining", "it was draining when it joined")
            )
        member.has_kept = bool(event.held)
        self._regroup()

    def _parted(self, session: Session, reason: str) -> None:
        member = self.fleet.members.get(session)
        if member is None:
            self.counts.late += 1
        else:
            in_order = member.state is MemberState.DRAINING and not member.choices
            self._lose(member, MemberMove.PART, "left" if in_order else "lost", reason)

    def _beaten(self, event: HeartbeatCame) -> None:
        member = self.fleet.members.get(event.session)
        if member is None:
            self.counts.late += 1
            return
        # First: what is moved because of this beat goes with the counts that it tells of.
        if event.sign.preempted:
            self._attempts.preempted(member, event.sign.preempted)
        suspicion = self.fleet.beaten(member, event.sign, self._requests.now_us)
        if suspicion is not None:
            self._suspect(member, suspicion.what, suspicion.why)
            return
        if event.sign.notes:
            self._attempts.noted(member, event.sign.notes)
        names = event.sign.names
        if names.fresh or names.named or names.forgotten:
            self._dispatcher.prefixes.hear(event.session, names)

    def _drains(self, name: Instance) -> None:
        member = self.fleet.by_name.get(name)
        if member is None or member.state is not MemberState.JOINED:
            self.counts.late += 1
            return
        self.fleet.drain(member, self._requests.now_us)
        self._requests.effects.append(OrderDrain(member.session))
        why = "it takes nothing new" if self.fleet.servers else "it takes nothing new, and nobody else serves"
        self._requests.effects.append(FleetChanged(name, member.facts.incarnation, "draining", why))
        self._regroup()

    def _suspect(self, member: FleetMember, what: str, why: str) -> None:
        self.counts.suspicions[what] += 1
        self._requests.effects.append(CloseSession(member.session, why))
        self._lose(member, MemberMove.SUSPECT, what, why)

    def _lose(self, member: FleetMember, move: MemberMove, what: str, why: str) -> None:
        """The instance is gone: its choices continue elsewhere."""
        self.fleet.remove(member, move)
        self._dispatcher.prefixes.close(member.session)
        self._requests.effects.append(FleetChanged(member.name, member.facts.incarnation, what, why))
        self._attempts.lose(member, why)
        self._regroup()

    def _regroup(self) -> None:
        """Tell decoding instances of a change among the prefilling ones, and check whether any instance serves."""
        self._tell_prefill_peers()
        self._absence.watch()
        self._requests.should_place = True

    def _tell_prefill_peers(self) -> None:
        """A decoding instance disconnects from peers it is not told of, so it is not told of too few too early."""
        addresses = tuple(prefiller.facts.peer_address for prefiller in self.fleet.known_prefillers)[:ADDRESSES_MAX]
        settling = self._settles_us is not None and self._requests.now_us < self._settles_us
        for member in self.fleet.members.values():
            if (
                member.role.takes
                and member.told_addresses != addresses
                and not (settling and (member.has_kept or not addresses))
            ):
                member.told_addresses = addresses
                self._requests.effects.append(TellPrefillPeers(member.session, addresses))
