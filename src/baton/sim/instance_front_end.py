"""The front-end process of an instance behind a router: the production InstanceSessions between its line and its engine.

Owns one life of it: its session with the router, the messages that wait for the line, and its heartbeats. The engine is a
separate process that can be paused alone. This class carries out what InstanceSessions returns, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.config import Role
from baton.core.engine.orders import Accepted, Cancel, Drain
from baton.core.engine.progress_watch import LOOK_US, ProgressWatch
from baton.core.routing.events import Instance as InstanceName
from baton.core.routing.events import Join
from baton.sim.instance import SimulatedInstance
from baton.sim.law_names import ENDS_AT_ONCE, FORGOTTEN, LawBroken
from baton.sim.lines import Lines
from baton.sim.world import Alarm, Host
from baton.wire.engine_messages import (
    FailedMessage,
    PrefillPeerAddresses,
    Pulse,
    ReadyMessage,
    RefusedMessage,
    StepOutput,
    ToEngine,
    decode_beat,
    decode_from_engine,
    encode_to_engine,
)
from baton.wire.heartbeats import EngineVitals
from baton.wire.instance_sessions import InstanceSessions, InstanceSessionState, SessionEffects
from baton.wire.router_messages import FromInstance, PlaceAttempt, decode_from_router, encode_membership

ROUTER = "router"
FRONT_OF = "front of"
LEAST_BEAT_US = 10_000
WELCOMED_US = 1_000_000
"""Time that the router has to answer a join, on the shorter scale of these worlds."""
SEEN_WITHIN_US = 450_000
"""Allowance beyond the limit of a step until it is seen that nothing comes: a beat, a look, and messages on their way."""
KEPT_US = 50_000
"""Allowance beyond the grace period until kept choices must be dropped."""


def line_names(number: int) -> tuple[str, str]:
    """Names of the two processes of an instance's line to the router: the instance's, then the router's."""
    return f"{FRONT_OF} {number}", ROUTER


def number_of(name: str) -> int | None:
    """The number of the instance whose front end has this name; None: a stranger."""
    front, _, number = name.rpartition(" ")
    return int(number) if front == FRONT_OF else None


def join_of(life: SimulatedInstance, role: Role, draining: bool = False) -> Join:
    worker, config = life.require_worker(), life.spec.config
    return Join(
        name=InstanceName(life.host.name),
        incarnation=life.incarnation,
        role=role.name,
        fingerprint=life.executor.fingerprint,
        url="",
        peer_address=life.host.name if role.gives else "",
        slots=config.slots,
        blocks=config.blocks,
        block_size=config.block_size,
        context_tokens=worker.config.sequence_tokens_max,
        vocabulary=life.executor.vocabulary,
        pid=0,
        draining=draining,
    )


class InstanceFrontEnd:
    def __init__(self, front: Host, lines: Lines, life: SimulatedInstance, grace_us: int) -> None:
        self.life = life
        self.sessions = InstanceSessions(join_of(life, life.spec.config.role), grace_us, WELCOMED_US)
        self.serves = False
        """Whether the router has welcomed it in the present session."""
        self.drains = False
        self.when_told: Callable[[SessionEffects], None] | None = None
        self.when_order_lost: Callable[[], None] | None = None
        """Set: the next place is lost in this process before anybody has seen it; then this is called."""
        self._order_lost_us: int | None = None
        """When a place was last lost in this process."""
        self._front = front
        self.line = lines.dial(front, *line_names(life.spec.number), self)
        self._running: set[int] = set()
        """Serials that the engine has accepted and that neither ended nor were cancelled."""
        self._grace_us = grace_us
        self._away_us: int | None = None
        """When it lost the router; None while it is welcomed."""
        self._lost_us = front.world.now_us
        """When it last lost a session, welcomed or not."""
        self.progress = ProgressWatch(life.spec.stall_us)
        self.when_stalled: Callable[[str], None] | None = None
        """Called with the reason when its engine stalls; the process then kills the engine and ends."""
        self.starved = False
        """Whether the engine is late because the machine is busy: it wants a core, and so does not look stopped."""
        self._looks = Alarm(front, self._look)
        self._beat_us = LEAST_BEAT_US
        self._beats = Alarm(front, self._beat)
        self._ticks = Alarm(front, self._tick)

    def start(self) -> None:
        self.life.beats.on_beat = lambda frame: self._front.run(self._engine_beat, frame)
        self.life.answer(self)
        self._look()
        self.line.open()

    def leave(self) -> None:
        """Leave the fleet: accept nothing new, and end when all open requests have ended."""
        for message in self.sessions.leave():
            self._say(message)
        self.drains = True
        self._order(Drain())

    @property
    def stuck_until_us(self) -> int:
        """When the router has seen at the latest that a place was lost here; 0: none was. Grows with the longest step."""
        return 0 if self._order_lost_us is None else self._order_lost_us + self.progress.limit_us + SEEN_WITHIN_US

    # ── the engine's side ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_full(self) -> bool:
        return False

    @property
    def undelivered(self) -> int:
        """What the router has not read, plus requests that are open."""
        return self.line.undelivered + self.sessions.open_requests

    def send(self, frame: bytes) -> None:
        """Take a frame of the engine."""
        self._front.run(self._hear_engine, frame)

    def _hear_engine(self, frame: bytes) -> None:
        message, now_us = decode_from_engine(frame), self._front.world.now_us
        self.progress.heard(now_us)
        match message:
            case ReadyMessage(tried_step_us=tried_us):
                self.progress.ready(tried_us, now_us)
            case Accepted() | RefusedMessage():
                if isinstance(message, Accepted):
                    self._running.update(message.serials)
                if self.sessions.owns_ticket(message.ticket):
                    self._carry_out(self.sessions.take(message, now_us))
            case StepOutput():
                self._running.difference_update(ended.serial for ended in message.ended)
                ours, _ = self.sessions.split(message)
                if ours is not None:
                    self._carry_out(self.sessions.take(ours, now_us))
            case Pulse():
                self._beat(message)
            case FailedMessage():
                self.line.close("the engine has failed")
            case _:
                pass

    def _engine_beat(self, frame: bytes) -> None:
        self.progress.beaten(decode_beat(frame), self._front.world.now_us)

    def _look(self) -> None:
        stall = self.progress.look(self._front.world.now_us)
        if stall is None:
            self._looks.set(self._front.world.now_us + LOOK_US)
        elif self.when_stalled is not None:
            self.when_stalled(stall)

    def _order(self, order: ToEngine) -> None:
        if isinstance(order, Cancel):
            self._running.discard(order.serial)
        self.life.host.run(self.life.take, [encode_to_engine(order)])

    # ── the router's side ────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> None:
        for message in self.sessions.opened(self._front.world.now_us):
            self._say(message)
        self._ticks.set(self.sessions.next_deadline())

    def lost(self, reason: str) -> None:
        self.serves = False
        self._beats.set(None)
        self.sessions.lost(reason, self._front.world.now_us)
        self._ticks.set(self.sessions.next_deadline())
        self._lost_us = now_us = self._front.world.now_us
        self._away_us = now_us if self._away_us is None else self._away_us
        kept_until_us = max(now_us, self._away_us + self._grace_us)
        self._front.after(kept_until_us + KEPT_US - now_us, self._keeps_nothing, self._away_us, now_us)

    def _keeps_nothing(self, away_us: int, lost_us: int) -> None:
        """The grace period without a router is over: nothing may be kept for it.

        A session that did not get to its welcome does not extend it, but nothing is dropped while that session is there: a
        process that was paused learns both at once, the end of the session and that its grace is over.
        """
        if (self._away_us, self._lost_us) != (away_us, lost_us):
            return
        if self.sessions.kept_choices and self.sessions.state is InstanceSessionState.AWAY:
            raise LawBroken(FORGOTTEN, f"{self.life.host.name} keeps {self.sessions.kept_choices} choices for a lost router")

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_from_router(frame)
            if isinstance(message, PlaceAttempt) and self.when_order_lost is not None:
                lost, self.when_order_lost = self.when_order_lost, None
                self._order_lost_us = self._front.world.now_us
                lost()
                continue
            out = self.sessions.receive(message, self._front.world.now_us)
            if isinstance(message, Cancel) and message.serial in self._running and message not in out.orders:
                raise LawBroken(ENDS_AT_ONCE, f"{self.life.host.name} was told to end {message.serial}, and does not")
            self._carry_out(out)
        if self.life.is_leaving:
            self.life.host.run(self.life.take, [])

    def _carry_out(self, out: SessionEffects) -> None:
        if out.welcomed is not None:
            self.serves = True
            self._away_us = None
            self._grace_us = out.welcomed.orphan_grace_us
            self._beat_us = out.welcomed.beat_us
            self._beats.set(self._front.world.now_us + self._beat_us)
        for order in out.orders:
            self._order(order)
        for message in out.messages:
            self._say(message)
        if out.prefill_peers is not None:
            self._order(PrefillPeerAddresses(out.prefill_peers))
        if out.turned_away is not None or out.hang_up is not None:
            self.line.drop(out.turned_away or out.hang_up or "")
        if out.drain and not self.drains:
            self.drains = True
            self._order(Drain())
        if self.when_told is not None:
            self.when_told(out)
        self._ticks.set(self.sessions.next_deadline())

    def _beat(self, pulse: Pulse | None = None) -> None:
        """Send a heartbeat: with each pulse of the engine, and without one when it is due."""
        now_us = self._front.world.now_us
        runs = self.starved or not self.life.host.paused
        engine = EngineVitals(self.progress.silent_us(now_us), runs, self.progress.limit_us)
        beat = self.sessions.beat(pulse, engine, now_us, self.line.silent_us)
        if beat is not None:
            self._say(beat)
            self._beats.set(now_us + self._beat_us)

    def _tick(self) -> None:
        self._carry_out(self.sessions.tick(self._front.world.now_us))

    def _say(self, message: FromInstance) -> None:
        self.line.send(encode_membership(message))
