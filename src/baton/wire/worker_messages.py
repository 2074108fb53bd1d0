"""What a message means to a Worker, and what an order of the Worker says on the wire.

Whoever drives a Worker translates here, be it the engine process or a simulator. Nothing is decided and nothing is sent.
"""

from __future__ import annotations

from baton.core.engine.request import Serial
from baton.core.engine.worker import (
    Accepted,
    Cancelled,
    ChangesWanted,
    Deliver,
    DrainOrdered,
    Effect,
    Event,
    GroupRefused,
    Launch,
    StopFound,
    Submitted,
    Withdrawn,
    Worker,
)
from baton.core.handover.messages import AttemptFailed, Expect, Fence, HandoverMade, OpenShip, Ship, Tell, Verify
from baton.core.tiers.transfers import CopyIn, CopyOut, FenceHaul, Get, Look, Put
from baton.wire.engine_messages import (
    AcceptedAs,
    Cancel,
    Drain,
    FromEngine,
    StopAt,
    Submit,
    TellNames,
    ToWorker,
    ended_output,
    refused,
    step_output,
)


def event_of(message: ToWorker) -> Event:
    match message:
        case Submit():
            return Submitted(message.ticket, message.group)
        case Cancel(serial):
            return Cancelled(Serial(serial))
        case StopAt(serial, keep):
            return StopFound(Serial(serial), keep)
        case Drain():
            return DrainOrdered()
        case TellNames():
            return ChangesWanted()


def message_of(effect: Effect, worker: Worker) -> FromEngine | None:
    """What the front end must hear of an effect of this worker; None for what others carry out."""
    match effect:
        case Deliver(settled):
            return step_output(settled, worker.gauges(), worker.scheduler.drafts())
        case Launch():
            return None
        case Tell() | Expect() | Verify() | OpenShip() | Ship() | Fence() | AttemptFailed() | HandoverMade():
            return None
        case CopyOut() | CopyIn() | Look() | Get() | Put() | FenceHaul():
            return None
        case Withdrawn(ended):
            return ended_output(ended, worker.gauges(), worker.scheduler.drafts())
        case Accepted(ticket, serials):
            return AcceptedAs(ticket, serials)
        case GroupRefused(ticket, refusal):
            return refused(ticket, refusal)
