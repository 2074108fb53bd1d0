"""What the general pass asks of a source of rows besides the queue."""

from __future__ import annotations

from typing import Protocol

from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.step_builder import StepBuilder


class RowSource(Protocol):
    @property
    def waiting(self) -> int:
        """Requests that have no slot."""

    @property
    def is_due(self) -> bool:
        """Whether rows begin with the next step."""

    @property
    def stalled(self) -> int:
        """Rows that no pass can bring on: they wait for a peer or a copy."""

    def begin_rows(self, step: StepBuilder) -> None:
        """Put the rows that are due into the step."""

    def withdraw(self, request: Request) -> bool:
        """A request without a slot will not run any more. False: it does not wait here."""

    def forget_row(self, slot: int) -> None:
        """A row ends, perhaps before any plan has named it."""


class PeerPrefills(Protocol):
    """Whether requests that are let in are prefilled by a peer."""

    def prefills_here(self, request: Request) -> bool:
        """Whether no peer is asked for it in any case."""

    def takes(self, request: Request, hit: PrefixHit, protected: bool) -> bool:
        """Have a request that is let in prefilled by a peer. False: it starts here."""


class NoPeerPrefills:
    """Everything is prefilled here."""

    def prefills_here(self, request: Request) -> bool:
        del request
        return True

    def takes(self, request: Request, hit: PrefixHit, protected: bool) -> bool:
        del request, hit, protected
        return False
