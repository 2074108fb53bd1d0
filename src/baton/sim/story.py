"""Story lines for the effects of a worker, and the names of hand-over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from baton.core.engine.orders import Accepted
from baton.core.engine.worker import Deliver, Effect, Event, GroupRefused, Launch, Withdrawn
from baton.core.handover.messages import (
    AttemptFailed,
    Expect,
    Fence,
    Handover,
    HandoverMade,
    Heard,
    OpenShip,
    PeerEffect,
    PeerEvent,
    PeerMessage,
    Ship,
    Tell,
    Verify,
)
from baton.core.tiers.transfers import CopyIn, CopyOut, FenceTransfer, Get, Look, Put

_OF_PEERS = frozenset(get_args(PeerEffect))
_EVENTS_OF_PEERS = frozenset(get_args(PeerEvent))


def words_of(effect: Effect) -> str:
    """One line of the story."""
    match effect:
        case Launch(plan):
            slots = plan.decode_slots.tolist()
            chunks = [(chunk.slot, chunk.begin, chunk.end) for chunk in plan.chunks]
            return f"plans step {plan.step}: slots {slots} decode, chunks {chunks}, {len(plan.stops)} stop"
        case Deliver(settled):
            ends = [(ended.serial, ended.reason.value) for ended in settled.ended]
            return f"settles: {settled.counts.tolist()} tokens for {settled.serials.tolist()}, ends {ends}"
        case Accepted(ticket, serials):
            return f"accepts ticket {ticket} as {list(serials)}"
        case GroupRefused(ticket, refusal):
            return f"refuses ticket {ticket}: {refusal.code}"
        case Withdrawn(ended):
            return f"withdraws {ended.serial}: {ended.reason}"
        case CopyOut() | CopyIn() | Look() | Get() | Put() | FenceTransfer():
            return f"{_kind(effect)} {effect.transfer}"
        case _:
            return _peer_words(effect)


def tell_steps(at_step: Callable[[str], None], event: Event, effects: Sequence[Effect]) -> None:
    """Call `at_step` with the name in `PEER_STEPS` of each hand-over step among these."""
    if type(event) in _EVENTS_OF_PEERS:
        at_step(f"heard {_kind(event.message)}" if type(event) is Heard else _kind(event))
    for effect in effects:
        if type(effect) in _OF_PEERS:
            at_step(f"told {_kind(effect.message)}" if isinstance(effect, Tell) else _kind(effect))


def _kind(value: object) -> str:
    return type(value).__name__


def _peer_words(effect: PeerEffect) -> str:
    match effect:
        case Tell(peer, message):
            return f"tells {peer} {_kind(message)} {message.request}.{message.attempt}"
        case Expect(handover, _, first, blocks):
            return f"expects {_named(handover)}: blocks {blocks.tolist()} for {first} and on"
        case OpenShip(handover, _, first, blocks):
            return f"opens {_named(handover)}: blocks {blocks.tolist()} are {first} and on"
        case Ship(handover, step, first, upto, last):
            return f"ships {_named(handover)} [{first}, {upto}) of step {step}{', the last' if last else ''}"
        case AttemptFailed(handover, fault):
            return f"sees {_named(handover)} fail: {fault.message}"
        case Verify(handover) | Fence(handover) | HandoverMade(handover):
            return f"{_kind(effect)} {_named(handover)}"


def _named(handover: Handover) -> str:
    return f"{handover.request}.{handover.attempt} with {handover.peer}"


PEER_STEPS = (
    *(f"{way} {_kind_of.__name__}" for way in ("told", "heard") for _kind_of in get_args(PeerMessage)),
    *(kind.__name__ for kind in (*get_args(PeerEffect), *get_args(PeerEvent)) if kind not in (Tell, Heard, AttemptFailed)),
)
"""The names of all hand-over steps."""
