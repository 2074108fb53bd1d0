"""What a front end or a router orders of an engine, and the answer: values that travel and that a Worker is given."""

from __future__ import annotations

from msgspec import Struct

from baton.core.bounds import Long
from baton.core.engine.request import Submission


class Submit(Struct, tag="submit", frozen=True):
    """All choices and prompts of one body; accepted or refused together."""

    ticket: Long
    """The sender's number for this group, given back in the answer."""
    group: tuple[Submission, ...]


class Cancel(Struct, tag="cancel", frozen=True):
    """The client is gone."""

    serial: Long


class StopAt(Struct, tag="stop", frozen=True):
    """The front end found a stop string: the answer ends after `keep` outputs."""

    serial: Long
    keep: Long


class Drain(Struct, tag="drain", frozen=True):
    """Accept nothing more; finish what is open."""


class ReportChanges(Struct, tag="tell_names", frozen=True):
    """Keep what changes, for `Worker.changes`, and send it as a Pulse ten times a second; the first says everything anew."""


class Accepted(Struct, tag="accepted", frozen=True):
    ticket: Long
    serials: tuple[Long, ...]
    """One for each submission of the group, in its order."""
