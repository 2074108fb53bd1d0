"""What an answer of the Worker says on the wire. Nothing is decided and nothing is sent.

Every driver of a Worker asks here, be it the engine process or a simulator.
"""

from __future__ import annotations

from baton.core.engine.driver import Answer
from baton.core.engine.orders import Accepted
from baton.core.engine.worker import Deliver, GroupRefused, Withdrawn, Worker
from baton.wire.engine_messages import FromEngine, ended_output, refused, step_output


def message_of(answer: Answer, worker: Worker) -> FromEngine:
    """What the front end hears of an answer of this worker."""
    match answer:
        case Deliver(settled):
            return step_output(settled, worker.gauges(), worker.scheduler.drafts())
        case Withdrawn(ended):
            return ended_output(ended, worker.gauges(), worker.scheduler.drafts())
        case Accepted():
            return answer
        case GroupRefused(ticket, refusal):
            return refused(ticket, refusal)
