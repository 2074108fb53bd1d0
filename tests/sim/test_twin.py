"""The law of snapshots does not blame a twin for the order in which a queue was swept."""

from __future__ import annotations

import pytest

from baton.core.content_hashes import ContentHashes
from baton.core.errors import RefusalCode
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import ClientLeft, RouterEffect, RouterEvent
from baton.sim.twin import TwinCheck
from tests.support.routing import SECRET, Bench, facts, submission


class Watched(Bench):
    """A bench whose router has a twin after `begin`, and is asked for its deadline after each call, as by a driver."""

    check: TwinCheck | None = None

    def begin(self) -> None:
        self.check = TwinCheck("router", self.router, ContentHashes(SECRET), first_call=6)  # the next one at 18

    def tell(self, event: RouterEvent) -> list[RouterEffect]:
        if self.check is None:
            return super().tell(event)
        self.last = self.check.call("handle", self.router.handle, event, self.now_us)
        self.router.next_deadline()
        return self.last


@pytest.mark.parametrize("waiting", [12, 24, 36])
def test_a_twin_is_asked_for_its_deadline_as_often_as_its_original(waiting: int) -> None:
    bench = Watched(RouterConfig(backoff_us=50_000, backoff_us_max=1_000_000))
    bench.join(facts("a", slots=64))
    for number in range(waiting):
        turn_down(bench, f"x{number}")
    bench.begin()
    for number in range(6):  # what leaves the head of the queue is swept out when its deadline is asked for
        first = min(bench.router.requests(), key=lambda request: request.choices[0].due_us)
        bench.tell(ClientLeft(first.number))
        turn_down(bench, f"y{number}")
    assert bench.router.open_requests == waiting


def turn_down(bench: Bench, name: str) -> None:
    """A request that an instance refuses, and that waits for its next try."""
    bench.arrive(submission(name))
    bench.refuse(bench.sent(), RefusalCode.QUEUE_FULL)
    bench.now_us += 1
