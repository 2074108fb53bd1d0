"""What the front end must hear of what a Worker orders. Nothing is decided and nothing is sent.

Every driver of a Worker asks here, be it the engine process or a simulator.
"""

from __future__ import annotations

from baton.core.engine.orders import AcceptedAs
from baton.core.engine.worker import Deliver, Effect, GroupRefused, Launch, Withdrawn, Worker
from baton.core.handover.messages import AttemptFailed, Expect, Fence, HandoverMade, OpenShip, Ship, Tell, Verify
from baton.core.tiers.transfers import CopyIn, CopyOut, FenceHaul, Get, Look, Put
from baton.wire.engine_messages import FromEngine, ended_output, refused, step_output


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
        case AcceptedAs():
            return effect
        case GroupRefused(ticket, refusal):
            return refused(ticket, refusal)
