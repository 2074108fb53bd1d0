"""The front-end process of an instance that serves a router: production InstanceSessions between the line and the engine.

Owns one life of it: its session with the router, what waits for the line, and its beats. The engine beside it is a process
of its own that can stand still while this one goes on. It carries out what the relay says, and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from baton.core.config import Role
from baton.core.engine.orders import Accepted, Cancel, Drain
from baton.core.routing.events import Instance as InstanceName
from baton.core.routing.events import Join
from baton.sim.faults import Fault
from baton.sim.instance import SimulatedInstance
from baton.sim.law_names import ENDS_AT_ONCE, FORGOTTEN, LINE_BOUND, LawBroken
from baton.sim.lines import Lines
from baton.sim.world import Alarm, Host
from baton.wire.engine_messages import (
    FailedMessage,
    PrefillPeerAddresses,
    Pulse,
    RefusedMessage,
    StepOutput,
    ToEngine,
    decode_from_engine,
    encode_to_engine,
)
from baton.wire.instance_sessions import InstanceSessions, InstanceSessionState, SessionEffects
from baton.wire.router_messages import FromInstance, decode_from_router, encode_membership

ROUTER = "router"
OUTBOX_MAX = 2_000
"""Messages that wait for room on the line. The router is gone, or as good as gone, before there are so many."""
SESSIONS_A_LIFE = 1_000_000
"""Numbers of sessions must rise over the lives of whoever opens them."""
LEAST_BEAT_US = 10_000
KEPT_US = 50_000
"""Beyond the grace, until nothing is kept any more."""


def line_names(number: int) -> tuple[str, str]:
    """What the network calls the two ends of an instance's line to the router: the instance's, and the router's."""
    return f"front of {number}", f"{ROUTER} {number}"


def join_of(life: SimulatedInstance, role: Role, draining: bool = False) -> Join:
    worker, config = life.require_worker(), life.spec.config
    return Join(
        name=InstanceName(life.host.name),
        incarnation=life.life + 2,  # so that there can always have been one before it
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
        self.relay = InstanceSessions(join_of(life, life.spec.config.role), grace_us)
        self.serves = False
        """The router has welcomed it in the session under way."""
        self.drains = False
        self.when_told: Callable[[SessionEffects], None] | None = None
        self._front = front
        ends = line_names(life.spec.number)
        self.line = lines.initiator(front, *ends, self, life.life * SESSIONS_A_LIFE + 1)
        self._outbox: deque[bytes] = deque()
        self._running: set[int] = set()
        """What the engine has accepted, and neither ended nor was told to."""
        self._grace_us = grace_us
        self._away_us: int | None = None
        """Since when no router has welcomed it."""
        self._engine_us = front.world.now_us
        """When the engine last gave a sign of life."""
        self._begun_us = front.world.now_us
        """When the router last welcomed it."""
        self._beat_us = LEAST_BEAT_US
        self._beats = Alarm(front, self._beat)
        self._ticks = Alarm(front, self._tick)

    def start(self) -> None:
        self.life.answer(self)
        self.line.open()

    def leave(self) -> None:
        """It was told to stop: nothing new, and it goes when everything has ended."""
        for message in self.relay.leave():
            self._say(message)
        self.drains = True
        self._order(Drain())

    # ── the engine's side: a conversation ────────────────────────────────────────────────────────────────────────────────

    @property
    def is_full(self) -> bool:
        return False

    @property
    def undelivered(self) -> int:
        """What is still to be said to the router, or heard of it."""
        return len(self._outbox) + self.line.undelivered + self.relay.open_requests

    def send(self, frame: bytes) -> None:
        """What the engine says."""
        self._front.run(self._hear_engine, frame)

    def _hear_engine(self, frame: bytes) -> None:
        message = decode_from_engine(frame)
        self._engine_us = self._front.world.now_us
        match message:
            case Accepted() | RefusedMessage():
                if isinstance(message, Accepted):
                    self._running.update(message.serials)
                if self.relay.owns_ticket(message.ticket):
                    self._carry_out(self.relay.take(message, self._engine_us))
            case StepOutput():
                self._running.difference_update(ended.serial for ended in message.ended)
                ours, _ = self.relay.split(message)
                if ours is not None:
                    self._carry_out(self.relay.take(ours, self._engine_us))
            case Pulse():
                self._beat(message)
            case FailedMessage():
                self.line.close("the engine has failed")
            case _:
                pass

    def _order(self, order: ToEngine) -> None:
        if isinstance(order, Cancel):
            self._running.discard(order.serial)
        self.life.host.run(self.life.take, [encode_to_engine(order)])

    # ── the router's side ────────────────────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> None:
        for message in self.relay.opened(self._front.world.now_us):
            self._say(message)

    def lost(self, reason: str) -> None:
        self.serves = False
        self._outbox.clear()
        self._beats.set(None)
        self.relay.lost(reason, self._front.world.now_us)
        self._ticks.set(self.relay.next_deadline())
        if self._away_us is None:
            self._away_us = self._front.world.now_us
            self._front.after(self._grace_us + KEPT_US, self._keeps_nothing, self._away_us)

    def _keeps_nothing(self, away_us: int) -> None:
        """No router has been there for so long that nobody will ask for what was open."""
        if self._away_us == away_us and self.relay.kept_choices and self.relay.state is InstanceSessionState.AWAY:
            raise LawBroken(FORGOTTEN, f"{self.life.host.name} keeps {self.relay.kept_choices} choices for a lost router")

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            message = decode_from_router(frame)
            out = self.relay.receive(message, self._front.world.now_us)
            if isinstance(message, Cancel) and message.serial in self._running and message not in out.orders:
                raise LawBroken(ENDS_AT_ONCE, f"{self.life.host.name} was told to end {message.serial}, and does not")
            self._carry_out(out)
        self._post()
        if self.life.is_leaving:
            self.life.host.run(self.life.take, [])

    def _carry_out(self, out: SessionEffects) -> None:
        if out.welcomed is not None:
            self.serves = True
            self._away_us = None
            self._grace_us = out.welcomed.orphan_grace_us
            self._beat_us = out.welcomed.beat_us
            self._begun_us = self._front.world.now_us
            self._beats.set(self._begun_us + self._beat_us)
        for order in out.orders:
            self._order(order)
        for message in out.messages:
            self._say(message)
        if out.prefill_peers is not None:
            self._order(PrefillPeerAddresses(out.prefill_peers))
        if out.turned_away is not None:
            self.line.reset(self.line.session, out.turned_away)
        if out.drain and not self.drains:
            self.drains = True
            self._order(Drain())
        if self.when_told is not None:
            self.when_told(out)
        self._ticks.set(self.relay.next_deadline())

    def _beat(self, pulse: Pulse | None = None) -> None:
        """With every pulse of the engine, and without one when it is time."""
        now_us = self._front.world.now_us
        # Before it was asked for pulses, the engine had no reason to speak.
        silent_us = min(now_us - self._engine_us, now_us - self._begun_us)
        beat = self.relay.beat(pulse, silent_us, now_us)
        if beat is not None:
            self._say(beat)
            self._beats.set(now_us + self._beat_us)

    def _tick(self) -> None:
        self._carry_out(self.relay.tick(self._front.world.now_us))

    def _say(self, message: FromInstance) -> None:
        if self.line.session is None:
            return
        self._outbox.append(encode_membership(message))
        self._post()
        if len(self._outbox) > OUTBOX_MAX:
            raise LawBroken(LINE_BOUND, f"{len(self._outbox)} messages wait at {self.life.host.name} for the router")

    def _post(self) -> None:
        while self._outbox and self.line.session is not None and not self.line.is_full:
            self.line.send(self._outbox.popleft())
        if self._outbox:
            self._front.world.fire(Fault.LINE_FULL, self.life.host.name)
