"""The engine message for each answer of the Worker; used by the engine process and by the simulator."""

from __future__ import annotations

from baton.core.engine.driver import Answer
from baton.core.engine.orders import Accepted
from baton.core.engine.worker import Deliver, GroupRefused, Withdrawn, Worker
from baton.wire.engine_messages import FromEngine, ended_output, refused, step_output


def message_of(answer: Answer, worker: Worker) -> FromEngine:
    """The message to the front end for an answer of this worker."""
    match answer:
        case Deliver(settled):
            return step_output(settled, worker.gauges(), worker.scheduler.drafts())
        case Withdrawn(ended):
            return ended_output(ended, worker.gauges(), worker.scheduler.drafts())
        case Accepted():
            return answer
        case GroupRefused(ticket, refusal):
            return refused(ticket, refusal)
