"""A router in front of machines that nothing happens to: production sessions and Router over pipes with a delay.

What `gate` and `member` are to worlds with faults, this is to measurements. Instances say every tenth of a second what they
have cached and how full they are, as they do in service, so the router knows as much, and as late, as it would there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.core.engine.orders import AcceptedAs
from baton.core.engine.request import Submission
from baton.core.errors import Refusal
from baton.core.routing.events import (
    Declined,
    Delivered,
    Instance,
    Join,
    Noted,
    Outcome,
    Policy,
    RouterConfig,
    Session,
    Stage,
)
from baton.core.routing.identity import RequestNumber
from baton.core.routing.router import Router
from baton.sim.instance import PULSE_US
from baton.sim.lines import PipeEnd
from baton.sim.machine import SECRET, Machine
from baton.sim.world import Alarm, Host
from baton.wire.engine_messages import RefusedWith, StepOutput, ToEngine, decode_from_engine, encode_to_engine, pulse
from baton.wire.instance_sessions import InstanceSessions, SessionEffects
from baton.wire.router_messages import FromInstance, decode_from_instance, decode_from_router, encode_membership
from baton.wire.router_sessions import Act, RouterSessions, Say

FOR_EVER_US = 10**15
ANY_TOKEN = 2**31 - 1


class Caller(Protocol):
    def declined(self, refusal: Refusal) -> None: ...

    def placed(self, instance: int) -> None:
        """Where it goes now."""

    def progress(
        self, place: int, tokens: list[int], begin: int, end: int, cached_tokens: int | None, ended: Outcome | None
    ) -> None: ...


class Spreader:
    def __init__(self, host: Host, policy: Policy, seed: int, network_us: int) -> None:
        # Everybody may wait as long as it takes: what is measured is where requests go, not when they are given up.
        config = RouterConfig(policy=policy, deadline_us=FOR_EVER_US, absent_us=FOR_EVER_US, waiting_max=FOR_EVER_US)
        self._host = host
        self._network_us = network_us
        self._switch = RouterSessions(Router(config, SECRET, seed), "router")
        self._pipes: dict[Session, PipeEnd] = {}
        self._numbers: dict[str, int] = {}
        self._callers: dict[RequestNumber, Caller] = {}
        self._alarm = Alarm(host, self._tick)

    def connect(self, machine: Machine, peer_address: str) -> None:
        session = self._switch.connected(self._host.world.now_us)
        stand = _Stand(machine, peer_address)
        self._pipes[session] = PipeEnd(machine.host, self._network_us, stand.took)
        self._numbers[machine.host.name] = machine.spec.number
        stand.open(PipeEnd(self._host, self._network_us, lambda frames: self._heard(session, frames)))

    def submit(self, submission: Submission, caller: Caller) -> None:
        origin = submission.request_id.encode()
        body, acts = self._switch.submit("", (submission,), origin, self._host.world.now_us)
        self._callers[body] = caller
        self._carry_out(acts)

    def _heard(self, session: Session, frames: list[bytes]) -> None:
        for frame in frames:
            self._carry_out(self._switch.heard(session, decode_from_instance(frame), self._host.world.now_us))

    def _tick(self) -> None:
        self._carry_out(self._switch.tick(self._host.world.now_us))

    def _carry_out(self, acts: Sequence[Act]) -> None:
        for act in acts:
            match act:
                case Delivered(body, choice, tokens, _, cached, outcome):
                    caller = self._callers[body] if outcome is None else self._callers.pop(body)
                    caller.progress(choice, tokens, 0, len(tokens), cached, outcome)
                case Say(session, message):
                    self._pipes[session].send(encode_membership(message))
                case Noted(body, _, Stage.PLACED, where):
                    self._callers[body].placed(self._numbers[where or ""])
                case Declined(body, refusal):
                    self._callers.pop(body).declined(refusal)
                case _:
                    pass
        self._alarm.set(self._switch.next_deadline())


class _Stand:
    """The front end of one machine."""

    def __init__(self, machine: Machine, peer_address: str) -> None:
        config = machine.spec.config
        self._machine = machine
        self._relay = InstanceSessions(
            Join(
                name=Instance(machine.host.name),
                incarnation=1,
                role=config.role.name,
                fingerprint=machine.fingerprint,
                url="",
                peer_address=peer_address,
                slots=config.slots,
                blocks=config.blocks,
                block_size=config.block_size,
                context_tokens=config.sequence_tokens_max,
                vocabulary=ANY_TOKEN,
                pid=0,
                draining=False,
            )
        )
        self._line: PipeEnd | None = None
        self._pulses = Alarm(machine.host, self._pulse)

    def open(self, line: PipeEnd) -> None:
        self._line = line
        self._machine.answer(self)
        self._say(self._relay.opened(self._machine.host.world.now_us))

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._carry_out(self._relay.heard(decode_from_router(frame), self._machine.host.world.now_us))

    def send(self, frame: bytes) -> None:
        """What the engine says."""
        message = decode_from_engine(frame)
        if isinstance(message, AcceptedAs | RefusedWith | StepOutput):
            self._carry_out(self._relay.take(message, self._machine.host.world.now_us))

    def _carry_out(self, out: SessionEffects) -> None:
        for order in out.orders:
            self._order(order)
        self._say(out.says)
        if out.welcomed is not None:
            self._pulse()

    def _order(self, order: ToEngine) -> None:
        self._machine.take([encode_to_engine(order)])

    def _pulse(self) -> None:
        machine, now_us = self._machine, self._machine.host.world.now_us
        worker = machine.worker
        beat = self._relay.beat(pulse(worker.gauges(), machine.device.in_flight > 0, worker.changes(now_us)), 0, now_us)
        if beat is not None:
            self._say([beat])
        self._pulses.set(now_us + PULSE_US)

    def _say(self, messages: Sequence[FromInstance]) -> None:
        if self._line is not None:
            for message in messages:
                self._line.send(encode_membership(message))
