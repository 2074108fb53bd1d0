"""Processes that speak to a router without being members: old lives of instances, and senders of forged frames.

Both have the key of the cluster, so the router reads their frames: an old life must be fenced, and a sender that breaks the
protocol must be disconnected. Neither may affect any other process.
"""

from __future__ import annotations

import random

from baton.core.engine.ended import Bill, EndedRequest
from baton.core.engine.orders import Accepted, Submit
from baton.core.engine.request import FinishReason, RequestId, Sampling, Serial, Submission, frozen_tokens
from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.events import Instance, Join
from baton.sim.faults import Fault
from baton.sim.instance_front_end import ROUTER, line_names
from baton.sim.law_names import FENCED, LawBroken
from baton.sim.lines import Lines
from baton.sim.router_host import STRANGER, RouterHost
from baton.sim.world import Host, World
from baton.wire.engine_messages import RefusedMessage, StepOutput, refused
from baton.wire.heartbeats import NO_GAUGES
from baton.wire.instance_sessions import InstanceSessions, SessionEffects
from baton.wire.router_messages import (
    AllHeldSaid,
    FromInstance,
    HeartbeatMessage,
    HeldChoiceMessage,
    HeldGroup,
    Leaving,
    Welcome,
    decode_from_router,
    encode_membership,
)


class ZombieInstance:
    """A process that was replaced by a later one of the same name while it was cut off or paused, and does not know it."""

    def __init__(self, world: World, lines: Lines, router_host: RouterHost, join: Join, number: int) -> None:
        self.host = Host(world, f"old life {number}")
        self._router_host = router_host
        self._join = join
        self.sessions = InstanceSessions(join)
        self._was_a_member(world.now_us)
        self._lines = lines
        self.line = lines.dial(self.host, *line_names(number), self)

    def _was_a_member(self, now_us: int) -> None:
        """Before it was cut off, a router had welcomed it."""
        self.sessions.opened(now_us)
        self.sessions.receive(Welcome(ROUTER, 1, 0), now_us)
        self.sessions.lost("cut off", now_us)

    def come_back(self) -> None:
        self.line.open()

    def stop(self) -> None:
        """Its operator ends it."""
        self.host.crash()
        self._lines.process_died(self.host)

    def opened(self) -> None:
        for message in self.sessions.opened(self.host.world.now_us):
            self._say(message)

    def lost(self, reason: str) -> None:
        self.sessions.lost(reason, self.host.world.now_us)

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._carry_out(self.sessions.receive(decode_from_router(frame), self.host.world.now_us))

    def _carry_out(self, out: SessionEffects) -> None:
        now_us = self.host.world.now_us
        if out.fenced is not None:
            self.host.world.fire(Fault.OUTLIVED, self.host.name)
            self.line.close("fenced")
            self.sessions.lost("fenced", now_us)
            return
        for order in out.orders:
            if isinstance(order, Submit):  # it was welcomed: the router did not know the later life
                no = Refusal(RefusalCode.DRAINING, "an old life takes nothing")
                self._carry_out(self.sessions.take(refused(order.ticket, no), now_us))
        for message in out.messages:
            self._say(message)
        if out.turned_away is not None:
            raise LawBroken(FENCED, f"{self._join.name}, life {self._join.incarnation}, was not fenced: {out.turned_away}")

    def _say(self, message: FromInstance) -> None:
        self.line.send(encode_membership(message))


class KnownStranger:
    """A process with the key that is no member: it connects, sends its frames, and disconnects."""

    def __init__(self, world: World, lines: Lines, name: str, frames: list[bytes]) -> None:
        self._frames = frames
        self.line = lines.dial(Host(world, name), name, ROUTER, self)
        self.line.open()

    def opened(self) -> None:
        for frame in self._frames:
            self.line.send(frame)
        self.line.close("it has said all")

    def lost(self, _reason: str) -> None:
        self.line.wanted = False

    def took(self, frames: list[bytes]) -> None:
        pass


# ── forged frames ────────────────────────────────────────────────────────────────────────────────────────────────────────

BILL = Bill()
NOBODYS = 999_999
"""A serial and a ticket that do not exist."""


def _tokens_for_nobody(count: int = 1) -> StepOutput:
    serial, tokens = NOBODYS.to_bytes(8, "little"), (7).to_bytes(4, "little")
    return StepOutput(serial, count.to_bytes(4, "little"), tokens, (), (), (), NO_GAUGES)


def _end_of_nobody() -> StepOutput:
    return StepOutput(b"", b"", b"", (), (), (EndedRequest(Serial(NOBODYS), FinishReason.STOP, 3, BILL),), NO_GAUGES)


def _held(origin: bytes, choice: int = 0, body_choices: int = 1, serial: int = 1, counts: bytes = b"") -> HeldGroup:
    sampling = Sampling(1, choice, 0.0)
    asked = Submission(RequestId("stranger"), frozen_tokens([1]), sampling, 4)
    return HeldGroup((asked,), (choice,), body_choices, origin, (HeldChoiceMessage(0, serial, counts, b"", (), None, None),))


def forged_by_a_member(stream: random.Random) -> bytes:
    """A frame that a member never sends; the router must disconnect its sender."""
    messages: tuple[FromInstance, ...] = (
        _tokens_for_nobody(),
        _tokens_for_nobody(3),
        _end_of_nobody(),
        Accepted(NOBODYS, (1, 2)),
        RefusedMessage(NOBODYS, RefusalCode.QUEUE_FULL, "", None),
        AllHeldSaid(),
        _held(b"stranger"),
    )
    frame = encode_membership(stream.choice(messages))
    return stream.choice((frame, frame, frame, frame[: stream.randrange(1, len(frame))], stream.randbytes(40)))


def forged(stream: random.Random, known: Join) -> list[bytes]:
    """Frames of a process that is no member and may not become one; `known` is the Join of a member."""
    alien = _like(known, STRANGER, known.incarnation, known.role, b"another model")
    wizard = _like(known, STRANGER, known.incarnation, "wizard", known.fingerprint)
    outlived = _like(known, known.name, 1, known.role, known.fingerprint)
    beat = HeartbeatMessage(NO_GAUGES, 0, False, False, b"", b"", ())
    talks: tuple[tuple[FromInstance, ...], ...] = (
        (alien, AllHeldSaid(), beat),
        (alien, _held(b"x"), AllHeldSaid(), _tokens_for_nobody()),
        (wizard, AllHeldSaid()),
        (outlived, _held(b"x"), _held(b"x", 1, 2, 9), AllHeldSaid(), _end_of_nobody()),
        (outlived, alien),
        (beat,),
        (AllHeldSaid(),),
        (Leaving(),),
        (_held(b"x"), alien),
        (_tokens_for_nobody(),),
        (Accepted(0, (0,)),),
    )
    frames = [encode_membership(message) for message in stream.choice(talks)]
    if len(frames) > 1 and stream.random() < 0.3:  # never the Join, so that it is not accepted
        spoilt = bytearray(frames[-1])
        spoilt[stream.randrange(len(spoilt))] ^= 1 << stream.randrange(8)
        frames[-1] = bytes(spoilt)
    return frames


def _like(known: Join, name: str, incarnation: int, role: str, fingerprint: bytes) -> Join:
    return Join(
        Instance(name), incarnation, role, fingerprint, "", "", known.slots, known.blocks, known.block_size,
        known.context_tokens, known.vocabulary,
    )  # fmt: skip
