"""The instances of a router: which have joined, which drain, which are removed.

    (join) ──▶ JOINED ──drain──▶ DRAINING
                 │                  │
                 └──────────────────┴── the connection ends, no sign of life, or a newer session ──▶ GONE

An instance is known by its name; each restart of its process has a higher incarnation, and an older incarnation is rejected
while a newer one has joined or was heard within FENCE_US. An incarnation that drains does so until its end, even when it
reconnects. Silence is measured in time in which the router itself was awake. A connection can fail in one direction: an
instance that says that it hears nothing of the router is removed like one that says nothing, and so is one that leaves
attempts unanswered. What happens to the requests of an instance that is gone is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.config import ROLES, Role
from baton.core.engine.gauges import SchedulerGauges
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import Heartbeat, Instance, Join, Session
from baton.core.routing.identity import AttemptId
from baton.core.state_machine import FastEnum, StateMachine

if TYPE_CHECKING:
    from baton.core.routing.routed_request import RoutedChoice

NAMES_MAX = 4096
"""Most names whose last incarnation is remembered."""
SECOND_LOOK_US = 50_000
"""A member that was found silent is looked at again after this long, and removed if it still is: what has arrived at the
router and was not read yet is read meanwhile."""
FENCE_US = 60_000_000
"""An older incarnation may join this long after the newer one was last heard: then the clock that incarnations are read
from was more likely set back."""


class MemberState(FastEnum):
    JOINED = "joined"
    DRAINING = "draining"
    GONE = "gone"


class MemberMove(FastEnum):
    DRAIN = "drain"
    PART = "connection over"
    SUSPECT = "no sign of life"
    SUCCEED = "a newer session"


TRANSITIONS: dict[tuple[MemberState, MemberMove], MemberState] = {
    (MemberState.JOINED, MemberMove.DRAIN): MemberState.DRAINING,
    (MemberState.JOINED, MemberMove.PART): MemberState.GONE,
    (MemberState.JOINED, MemberMove.SUSPECT): MemberState.GONE,
    (MemberState.JOINED, MemberMove.SUCCEED): MemberState.GONE,
    (MemberState.DRAINING, MemberMove.PART): MemberState.GONE,
    (MemberState.DRAINING, MemberMove.SUSPECT): MemberState.GONE,
    (MemberState.DRAINING, MemberMove.SUCCEED): MemberState.GONE,
}


@dataclass(slots=True, eq=False)
class FleetMember:
    session: Session
    facts: Join
    role: Role
    state: MemberState
    heard_us: int
    """Time of its last message, shifted by the time in which the router was not awake."""
    progress_us: int
    """Time at which its engine last finished a step, or had none to compute."""
    hears_us: int
    """Time at which it last heard this router, by what it says; shifted in the same way."""
    unanswered: AttemptId | None = None
    """The oldest attempt that waited for its answer at the last beat."""
    unanswered_us: int = 0
    """Time of the first beat at which it was that one; shifted in the same way."""
    doubted_us: int | None = None
    """When a look found it silent; None: the last look did not."""
    ledger: SchedulerGauges = field(default_factory=SchedulerGauges)
    choices: dict[tuple[int, int], RoutedChoice] = field(default_factory=dict)
    """Choices that are at this instance, by (request, choice)."""
    prefill_tokens: int = 0
    """Tokens placed there for prefill, whose choices have no token yet."""
    promised_blocks: int = 0
    """Blocks of the choices placed there since its last report."""
    used: int = 0
    """Number of the placement that last chose it."""
    drain_by_us: int | None = None
    has_kept: bool = False
    """It joined with requests of an earlier router, or of this one."""
    told_addresses: tuple[str, ...] | None = None
    """Addresses of prefilling peers that it was last told."""

    @property
    def name(self) -> Instance:
        return self.facts.name

    @property
    def serves(self) -> bool:
        return self.state is MemberState.JOINED and self.role.serves


@dataclass(slots=True)
class _Life:
    """The last incarnation of a name."""

    incarnation: int
    heard_us: int
    """Time of its last message, set when it is gone."""
    drain_by_us: int | None = None
    """It drains; its open choices continue elsewhere at this time."""


@dataclass(frozen=True, slots=True)
class JoinRejection:
    """The reason why an instance cannot join."""

    reason: str
    fenced: bool = False
    known_incarnation: int = 0
    """Where fenced: the later incarnation."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    member: FleetMember
    what: str
    """One of the values of `FleetChanged.what`."""
    why: str


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance, for display."""

    facts: Join
    state: str
    """ready or draining"""
    ledger: SchedulerGauges
    open: int
    """Choices at this instance."""
    prefill_tokens: int
    """Tokens placed there for prefill, whose choices have no token yet."""
    heard_ago_us: int


class FleetMembers:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.members: dict[Session, FleetMember] = {}
        self.by_name: dict[Instance, FleetMember] = {}
        self.servers: list[FleetMember] = []
        """Members that accept requests now, ordered by name."""
        self.prefillers: list[FleetMember] = []
        """Members that prefill for others now, ordered by name."""
        self.known_prefillers: list[FleetMember] = []
        """The same and the draining ones, which still hand over what they were asked for."""
        self.model: Join | None = None
        """The fingerprint, vocabulary and block size that all instances must have."""
        self._lives: dict[Instance, _Life] = {}
        self._states = StateMachine(TRANSITIONS, "an instance")

    def moves(self) -> dict[tuple[MemberState, MemberMove], int]:
        return self._states.moves()

    # ── joining and leaving ──────────────────────────────────────────────────────────────────────────────────────────────

    def objection(self, facts: Join, now_us: int) -> JoinRejection | None:
        life = self._lives.get(facts.name)
        if life is not None and facts.incarnation < life.incarnation and self._is_fresh(facts.name, life, now_us):
            newer = f"incarnation {life.incarnation} has joined"
            outlived = f"{facts.name} of incarnation {facts.incarnation} is outlived: {newer}"
            return JoinRejection(outlived, fenced=True, known_incarnation=life.incarnation)
        if facts.role not in ROLES:
            return JoinRejection(f"its role is {facts.role!r}, and roles are {', '.join(ROLES)}")
        if (holder := self._living_holder(facts, now_us)) is not None:
            return JoinRejection(f"{facts.name} is there already, at {holder.facts.url}; give another --name")
        if not facts.fingerprint.startswith(self._config.model_mark):
            its, ours = facts.fingerprint.hex(), self._config.model_mark.hex()
            return JoinRejection(
                f"its model is not {self._config.model}: the fingerprint of its model is {its}, "
                f"and that of {self._config.model} begins with {ours}"
            )
        model = self.model
        if model is None:
            return None
        if facts.fingerprint != model.fingerprint:
            ours, its = model.fingerprint.hex(), facts.fingerprint.hex()
            return JoinRejection(
                f"it has another model, number format or attention than {model.name} at {model.url}: the fingerprint of its "
                f"model is {its}, and that of this fleet {ours}"
            )
        if facts.vocabulary != model.vocabulary:
            more = facts.vocabulary - model.vocabulary  # which a recording shows; it does not show their sizes
            return JoinRejection(
                f"its vocabulary has {abs(more)} {'more' if more > 0 else 'fewer'} ids than that of this fleet"
            )
        if facts.block_size != model.block_size:
            return JoinRejection(f"its blocks have {facts.block_size} tokens, and those of this fleet {model.block_size}")
        return None

    def _is_fresh(self, name: Instance, life: _Life, now_us: int) -> bool:
        return name in self.by_name or now_us < life.heard_us + FENCE_US

    def _living_holder(self, facts: Join, now_us: int) -> FleetMember | None:
        """Another live process with this name: more likely a mistake in the configuration than an earlier incarnation.

        An earlier incarnation is soon found to be gone, and the new one tries again.
        """
        holder = self.by_name.get(facts.name)
        if holder is None or (holder.facts.pid, holder.facts.url) == (facts.pid, facts.url):
            return None
        return holder if now_us - holder.heard_us < self._config.suspect_us else None

    def forget_model(self) -> None:
        """Accept another model from now on, unless an instance still serves this one."""
        if not self.members:
            self.model = None

    def admit(self, session: Session, facts: Join, draining: bool, now_us: int) -> FleetMember:
        life = self._lives.pop(facts.name, None)
        if life is None or life.incarnation != facts.incarnation:
            life = _Life(facts.incarnation, now_us)
        self._lives[facts.name] = life
        if draining and life.drain_by_us is None:
            life.drain_by_us = now_us + self._config.drain_us
        state = MemberState.JOINED if life.drain_by_us is None else MemberState.DRAINING
        member = FleetMember(session, facts, ROLES[facts.role], state, now_us, now_us, now_us, drain_by_us=life.drain_by_us)
        self.model = self.model or facts
        self.members[session] = self.by_name[facts.name] = member
        if len(self._lives) > NAMES_MAX:
            self._forget_a_name()
        self._list()
        return member

    def drain(self, member: FleetMember, now_us: int) -> None:
        self._move(member, MemberMove.DRAIN)
        member.drain_by_us = self._lives[member.name].drain_by_us = now_us + self._config.drain_us
        self._list()

    def remove(self, member: FleetMember, move: MemberMove) -> None:
        self._move(member, move)
        del self.members[member.session]
        if self.by_name.get(member.name) is member:
            del self.by_name[member.name]
            self._lives[member.name].heard_us = member.heard_us
        self._list()

    def _forget_a_name(self) -> None:
        oldest = next((name for name in self._lives if name not in self.by_name), None)
        if oldest is not None:
            del self._lives[oldest]

    def _list(self) -> None:
        here = [self.by_name[name] for name in sorted(self.by_name)]
        self.servers = [member for member in here if member.serves]
        self.known_prefillers = [member for member in here if member.role.gives and member.facts.peer_address]
        self.prefillers = [member for member in self.known_prefillers if member.state is MemberState.JOINED]

    def _move(self, member: FleetMember, move: MemberMove) -> None:
        member.state = self._states.after(member.state, move)

    # ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def excuse(self, late_us: int) -> None:
        """The router itself was not awake for this long: it does not count as silence of any instance."""
        for member in self.members.values():
            member.heard_us += late_us
            member.progress_us += late_us
            member.hears_us += late_us
            member.unanswered_us += late_us
            if member.doubted_us is not None:
                member.doubted_us += late_us

    def heard(self, session: Session, now_us: int) -> None:
        """A message came from there, whatever it is about."""
        member = self.members.get(session)
        if member is not None:
            member.heard_us = now_us

    def beaten(self, member: FleetMember, sign: Heartbeat, now_us: int) -> Suspicion | None:
        # An engine that cannot speak cannot compute or answer either: that time is judged as its silence.
        mute_us = max(0, now_us - member.heard_us) if sign.engine_silent_us >= self._config.beat_us else 0
        if not sign.computing or sign.ledger.steps != member.ledger.steps:
            member.progress_us = now_us
        else:
            member.progress_us += mute_us
        member.unanswered_us = member.unanswered_us + mute_us if sign.unanswered == member.unanswered else now_us
        member.unanswered = sign.unanswered
        member.hears_us = max(member.hears_us, now_us - sign.router_silent_us)
        member.heard_us = now_us
        member.ledger = sign.ledger
        member.promised_blocks = 0
        return self._suspicion_of(member, sign, now_us)

    def _suspicion_of(self, member: FleetMember, sign: Heartbeat, now_us: int) -> Suspicion | None:
        """What this beat says that makes it worthless as a place for requests."""
        if sign.engine_silent_us >= self._config.engine_suspect_us(sign.engine_runs):
            return Suspicion(member, "suspected", f"its engine gave no sign of life for {sign.engine_silent_us // 1000} ms")
        stuck_us = now_us - member.progress_us
        if stuck_us >= sign.step_limit_us:
            return Suspicion(member, "stuck", f"its engine computes and finished no step for {stuck_us // 1000} ms")
        deaf_us = now_us - member.hears_us
        if deaf_us >= self._config.deaf_us:
            return Suspicion(member, "suspected", f"it has heard nothing of this router for {deaf_us // 1000} ms")
        unanswered_us = now_us - member.unanswered_us
        if member.unanswered is not None and unanswered_us >= sign.step_limit_us:
            return Suspicion(member, "stuck", f"it has not answered an attempt for {unanswered_us // 1000} ms")
        return None

    def silent(self, now_us: int) -> list[Suspicion]:
        """Members that were silent at an earlier look and still are; `next_look` says when to look again."""
        suspicions = []
        for member in self.members.values():
            if now_us - member.heard_us < self._config.suspect_us:
                member.doubted_us = None
            elif member.doubted_us is None:
                member.doubted_us = now_us
            elif now_us - member.doubted_us >= SECOND_LOOK_US:
                silent_ms = (now_us - member.heard_us) // 1000
                suspicions.append(Suspicion(member, "suspected", f"no sign of life for {silent_ms} ms"))
        return suspicions

    def next_look(self) -> int | None:
        """When a member may be silent for too long, or is looked at again."""
        dues = (
            member.heard_us + self._config.suspect_us if member.doubted_us is None else member.doubted_us + SECOND_LOOK_US
            for member in self.members.values()
        )
        return min(dues, default=None)

    def drained_too_long(self, now_us: int) -> list[FleetMember]:
        """Draining members with open choices whose time is over."""
        return [m for m in self.members.values() if m.drain_by_us is not None and m.drain_by_us <= now_us and m.choices]

    def views(self, now_us: int) -> list[InstanceView]:
        return [
            InstanceView(
                m.facts, "draining" if m.state is MemberState.DRAINING else "ready", m.ledger, len(m.choices),
                m.prefill_tokens, max(0, now_us - m.heard_us),
            )
            for m in (self.by_name[name] for name in sorted(self.by_name))
        ]  # fmt: skip
