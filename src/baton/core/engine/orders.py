"""Orders of a front end or a router to an engine, and the answer; all are sent between processes."""

from __future__ import annotations

from msgspec import Struct

from baton.core.bounds import Long
from baton.core.engine.request import Submission


class Submit(Struct, tag="submit", frozen=True, gc=False):
    """All choices and prompts of one HTTP request; accepted or refused together."""

    ticket: Long
    """The sender's number for this group, returned in the answer."""
    group: tuple[Submission, ...]


class Cancel(Struct, tag="cancel", frozen=True, gc=False):
    """The client has disconnected."""

    serial: Long


class StopAt(Struct, tag="stop", frozen=True, gc=False):
    """The front end found a stop string: the answer ends after `keep` outputs."""

    serial: Long
    keep: Long


class Drain(Struct, tag="drain", frozen=True, gc=False):
    """Accept no new requests; finish the open ones."""


class ReportChanges(Struct, tag="tell_names", frozen=True, gc=False):
    """Keep changes for `Worker.changes` and send them as a Pulse ten times a second; the first one reports everything."""


class Accepted(Struct, tag="accepted", frozen=True, gc=False):
    ticket: Long
    serials: tuple[Long, ...]
    """One for each submission of the group, in order."""
