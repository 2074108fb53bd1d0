"""Interfaces of the general pass to sources of rows other than the queue."""

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
        """Rows that wait for a peer or a copy, so that no pass can advance them."""

    def begin_rows(self, step: StepBuilder) -> None:
        """Put the rows that are due into the step."""

    def withdraw(self, request: Request) -> bool:
        """A request without a slot will not run any more. False: it does not wait in this source."""

    def forget_row(self, slot: int) -> None:
        """A row ends, perhaps before it was in any plan."""


class PeerPrefills(Protocol):
    """Decides whether admitted requests are prefilled by a peer."""

    def prefills_here(self, request: Request) -> bool:
        """Whether no peer will be asked to prefill it."""

    def takes(self, request: Request, hit: PrefixHit, protected: bool) -> bool:
        """Have an admitted request prefilled by a peer. False: it starts here."""


class NoPeerPrefills:
    """All requests are prefilled here."""

    def prefills_here(self, request: Request) -> bool:
        del request
        return True

    def takes(self, request: Request, hit: PrefixHit, protected: bool) -> bool:
        del request, hit, protected
        return False
