"""Time limit of requests while no instance serves: those without a token end after `absent_us`, others at their deadline."""

from __future__ import annotations

from baton.core.engine.request import FinishReason
from baton.core.errors import RefusalCode
from baton.core.handover.faults import PdCode, PdFault, PdStage
from baton.core.routing.routed_requests import RoutedRequests


class ServerAbsence:
    def __init__(self, requests: RoutedRequests) -> None:
        self._requests = requests
        self._absent_us = requests.config.absent_us
        self._since_us: int | None = None
        """Time since which no instance serves."""
        self.due_us: int | None = None
        """Time at which the first waiting request has waited long enough."""

    def watch(self) -> None:
        """The fleet has changed."""
        requests = self._requests
        if requests.fleet.servers:
            self._since_us = self.due_us = None
        elif self._since_us is None:
            self._since_us = requests.now_us
            self.due_us = requests.now_us + self._absent_us if requests.queue.count else None

    def wait(self) -> None:
        """A choice has entered the placement queue."""
        if self._since_us is not None and self.due_us is None:
            self.due_us = self._requests.now_us + self._absent_us

    def expire(self) -> None:
        requests, since_us, due_us = self._requests, self._since_us, self.due_us
        if since_us is None or due_us is None or due_us > requests.now_us:
            return
        times = []
        text = f"no instance has served for {self._absent_us // 1000} ms"
        for request in dict.fromkeys(choice.request for choice in requests.queue.all_waiting()):
            patience_us = max(since_us, request.arrived_us) + self._absent_us
            if any(choice.delivered for choice in request.choices):
                patience_us = max(patience_us, request.deadline_us)
            if patience_us > requests.now_us:
                times.append(patience_us)
            elif request.opened:
                requests.end_all(request, FinishReason.RESCHEDULE, PdFault(PdCode.NOT_DELIVERED, PdStage.PREFILL, text))
            else:
                requests.decline(request, RefusalCode.NO_INSTANCE, text)
        self.due_us = min(times, default=None)
