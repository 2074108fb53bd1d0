"""Moves of choices between instances: a log line for each, with cause and cost, and the router's metrics of them.

A move begins when a choice leaves its instance (preempted, lost, drained or refused there) and ends when another one, or
the same, accepts it. Of each cause the first is logged at once, and at most LINES in EVERY_S; `left_out` counts the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from baton.api.histograms import MOVE_S, UnlockedHistogram
from baton.api.log_rate import LogRate
from baton.core.routing.events import Instance, TimelineNoted, TimelineStage
from baton.core.routing.identity import RequestNumber
from baton.core.routing.routed_requests import MoveCause
from baton.wire.router_sessions import Act

log = logging.getLogger("baton.moves")

LINES = 10
EVERY_S = 10.0
_LINE = "moved id=%s choice=%d cause=%s from=%s to=%s tokens=%d ms=%.1f%s"


@dataclass(frozen=True, slots=True)
class _Departure:
    cause: str
    left: Instance | None
    at_us: int


class MoveLog:
    def __init__(
        self, request_id: Callable[[RequestNumber], str], known_tokens: Callable[[RequestNumber, int], int]
    ) -> None:
        """`known_tokens`: of the prompt and the answer of a choice so far, which its new instance computes or finds."""
        self._request_id = request_id
        self._known_tokens = known_tokens
        self._departed: dict[tuple[RequestNumber, int], _Departure] = {}
        """Open choices that are between two instances."""
        self._moves = {cause.value: 0 for cause in MoveCause}
        self._took = UnlockedHistogram(
            "baton_move_seconds", "From leaving an instance to being accepted by the next", MOVE_S
        )
        self._rate = LogRate(LINES, EVERY_S)

    def take(self, act: Act, now_us: int) -> None:
        """Take an act of the router; most are no concern of moves."""
        if type(act) is not TimelineNoted:
            return
        key = act.request, act.choice
        match act.stage:
            case TimelineStage.PREEMPTED | TimelineStage.MOVED:
                cause = act.why.partition(":")[0]
                # One that resumes in place is preempted without a cause; a refusal of the next instance begins no new move.
                if cause in self._moves:
                    self._departed.setdefault(key, _Departure(cause, act.where, act.at_us))
            case TimelineStage.RESUMED:
                if (departure := self._departed.pop(key, None)) is not None:
                    self._arrived(act, departure, now_us)
            case TimelineStage.ENDED:
                self._departed.pop(key, None)
            case _:
                pass

    def _arrived(self, act: TimelineNoted, departure: _Departure, now_us: int) -> None:
        took_us = max(0, act.at_us - departure.at_us)
        self._moves[departure.cause] += 1
        self._took.observe(took_us / 1e6)
        if not log.isEnabledFor(logging.INFO):
            return
        left_out = self._rate.take(departure.cause, now_us / 1e6)
        if left_out is not None:
            log.info(
                _LINE,
                self._request_id(act.request),
                act.choice,
                departure.cause,
                departure.left or "-",
                act.where or "-",
                self._known_tokens(act.request, act.choice),
                took_us / 1000,
                f" left_out={left_out}" if left_out else "",
            )

    def metrics(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "baton_moves", "Choices that another instance went on with, by why they had to leave", labels=["cause"]
        )
        for cause, count in self._moves.items():
            family.add_metric([cause], count)
        yield family
        yield from self._took.collect()
