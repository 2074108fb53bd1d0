"""What a message means to a Worker, and what an answer of the Worker says on the wire.

Whoever drives a Worker translates here, be it the engine process or a simulator. Nothing is decided and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.engine.driver import Answer
from baton.core.engine.records import SchedulerGauges
from baton.core.engine.request import Serial
from baton.core.engine.worker import (
    Accepted,
    Cancelled,
    ChangesWanted,
    Deliver,
    DrainOrdered,
    Event,
    GroupRefused,
    StopFound,
    Submitted,
    Withdrawn,
)
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
    submissions,
)


def event_of(message: ToWorker) -> Event:
    match message:
        case Submit():
            return Submitted(message.ticket, submissions(message))
        case Cancel(serial):
            return Cancelled(Serial(serial))
        case StopAt(serial, keep):
            return StopFound(Serial(serial), keep)
        case Drain():
            return DrainOrdered()
        case TellNames():
            return ChangesWanted()


def message_of(answer: Answer, gauges: Callable[[], SchedulerGauges]) -> FromEngine:
    """What the front end hears. `gauges` is read only where they travel."""
    match answer:
        case Deliver(settled):
            return step_output(settled, gauges())
        case Withdrawn(ended):
            return ended_output(ended, gauges())
        case Accepted(ticket, serials):
            return AcceptedAs(ticket, serials)
        case GroupRefused(ticket, refusal):
            return refused(ticket, refusal)
