"""Time limit of requests while no instance serves: those without a token end after `absent_us`, others at their deadline.

Counted from the time since which no instance serves and the request waits for one: from its arrival, or from the loss of an
instance that had accepted it. A refusal does not start it again; a request that is refused after its time ends at once.
While instances that are expected have not come yet, it does not end before the time at which they are given up.
"""

from __future__ import annotations

from baton.core.engine.request import FinishReason
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.expected_instances import ExpectedInstances
from baton.core.routing.routed_request import RoutedRequest
from baton.core.routing.routed_requests import RoutedRequests, sooner


class ServerAbsence:
    def __init__(self, requests: RoutedRequests) -> None:
        self._requests = requests
        self._absent_us = requests.config.absent_us
        self.expected = ExpectedInstances(requests.config)
        self._since_us: int | None = None
        """Time since which no instance serves."""
        self.due_us: int | None = None
        """Time at which the first waiting request has waited long enough."""

    def watch(self) -> None:
        """The fleet has changed."""
        requests = self._requests
        self.expected.watch(requests.fleet.servers, requests.now_us)
        if requests.fleet.servers:
            self._since_us = self.due_us = None
        elif self._since_us is None:
            self._since_us = requests.now_us
            due_us = max(requests.now_us + self._absent_us, self.expected.awaited_until_us)
            self.due_us = due_us if requests.queue.count else None

    def wait(self, request: RoutedRequest) -> None:
        """A choice of this request has entered the placement queue."""
        if self._since_us is not None:
            self.due_us = sooner(self.due_us, self._patient_until_us(request, self._since_us))

    def expire(self) -> None:
        requests, since_us, due_us = self._requests, self._since_us, self.due_us
        if since_us is None or due_us is None or due_us > requests.now_us:
            return
        times = []
        text = self._why()
        for request in dict.fromkeys(choice.request for choice in requests.queue.all_waiting()):
            patience_us = self._patient_until_us(request, since_us)
            if _has_a_place(request):
                times.append(requests.now_us + requests.config.beat_us)
            elif patience_us > requests.now_us:
                times.append(patience_us)
            elif request.opened:
                requests.end_all(request, FinishReason.RESCHEDULE, PdFault(PdCode.NOT_DELIVERED, PdStage.PREFILL, text))
            else:
                requests.decline(request, RefusalCode.NO_INSTANCE, text)
        self.due_us = min(times, default=None)

    def _why(self) -> str:
        text = f"no instance has served for {self._absent_us // 1000} ms"
        if not self.expected.missing:
            return text
        return f"{text}, and {self.expected.missing} of {self.expected.number} expected instances never have"

    def _patient_until_us(self, request: RoutedRequest, since_us: int) -> int:
        patience_us = max(since_us, request.waits_since_us) + self._absent_us
        patience_us = max(patience_us, self.expected.awaited_until_us)
        has_tokens = any(choice.delivered for choice in request.choices)
        return max(patience_us, request.deadline_us) if has_tokens else patience_us


def _has_a_place(request: RoutedRequest) -> bool:
    """Whether an instance, one that drains, has another choice of the request."""
    return any(choice.attempt is not None for choice in request.choices)
