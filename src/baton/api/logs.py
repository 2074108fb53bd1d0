"""Log lines of a running server: one per finished request, one per second for the engine's state.

Owns the loggers `baton.access` and `baton.engine` and the format of their lines: `name=value`, the same names in the same
order. `leased`, `receiving` and `leaving` are omitted while they are 0, `drafts` and `accepted` (since the previous line)
while there were no drafts. A router logs the instances of a request instead of the engine's state. Nothing is formatted
while the level hides it. Handlers are configured by the process that starts the server.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from baton.api.engine import ROUTER, Engine, Gauges
from baton.api.errors import ApiError
from baton.core.engine.ended import Bill

access = logging.getLogger("baton.access")
state = logging.getLogger("baton.engine")

_HEAD = "id=%s path=%s status=%d "
_ENDED = _HEAD + "finish=%s prompt=%d completion=%d cached=%d %s %s"
_REFUSED = _HEAD + "error=%s %s"
_BILL = "preemptions=%d recomputed=%d restored=%d queue_ms=%.1f prefill_ms=%.1f decode_ms=%.1f"
FINISHES_MAX = 4
"""With more choices than this, finish reasons are counted instead of listed."""
_CARRIED = "instance=%s moves=%d"
_NO_BILL = "preemptions=- recomputed=- restored=- queue_ms=- prefill_ms=- decode_ms=-"


class _State(NamedTuple):
    """Formatted only when a line is written."""

    running: int
    waiting: int
    free: int
    evictable: int
    leased: int
    receiving: int
    leaving: int
    ratio: float | None
    """None for a router."""

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.waiting or self.leased or self.receiving or self.leaving)

    def __str__(self) -> str:
        rare = (("leased", self.leased), ("receiving", self.receiving), ("leaving", self.leaving))
        moving = "".join(f" {name}={count}" for name, count in rare if count)
        head = f"running={self.running} waiting={self.waiting} free={self.free} evictable={self.evictable}"
        return f"{head}{moving}" if self.ratio is None else f"{head}{moving} ratio={self.ratio:.3f}"


def _state_of(gauges: Gauges) -> _State:
    now = gauges.scheduler
    return _State(
        running=now.running,
        waiting=now.waiting,
        free=now.free_blocks,
        evictable=now.evictable_blocks,
        leased=now.leased_blocks,
        receiving=now.receiving_blocks,
        leaving=now.leaving_blocks,
        ratio=None if gauges.role == ROUTER else now.reserve_ratio,
    )


def _finishes(finishes: Sequence[str]) -> str:
    if len(finishes) <= FINISHES_MAX:
        return ",".join(finishes)
    return ",".join(f"{finish}*{count}" for finish, count in Counter(finishes).items())


def _whereabouts(places: Sequence[Sequence[str]]) -> str:
    """The last instance of each choice, and how often choices moved."""
    last = dict.fromkeys(visited[-1] for visited in places if visited)
    return _CARRIED % (",".join(last) or "-", sum(max(0, len(visited) - 1) for visited in places))


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request and the engine's state at its end."""

    request_id: str
    path: str
    status: int
    finishes: Sequence[str]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    gauges: Gauges

    def log(self, bill: Bill | None, places: Sequence[Sequence[str]] = ()) -> None:
        """`bill` is None when the engine did not report it; the line then has `-` instead.

        `places`: by choice, the instances that ran it.
        """
        paid = _NO_BILL
        if bill is not None:
            spent_ms = (bill.queue_us / 1000, bill.prefill_us / 1000, bill.decode_us / 1000)
            paid = _BILL % (bill.preemptions, bill.recomputed_tokens, bill.restored_tokens, *spent_ms)
        access.info(
            _ENDED,
            self.request_id,
            self.path,
            self.status,
            _finishes(self.finishes),
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            paid,
            _whereabouts(places) if self.gauges.role == ROUTER else _state_of(self.gauges),
        )


@contextmanager
def refusals_logged(engine: Engine, request_id: str, path: str) -> Iterator[None]:
    """Log a request that is refused inside the block."""
    try:
        yield
    except ApiError as error:
        if access.isEnabledFor(logging.INFO):
            gauges = engine.gauges
            shown = f"waiting={gauges.scheduler.waiting}" if gauges.role == ROUTER else _state_of(gauges)
            access.info(_REFUSED, request_id, path, error.status, error.code, shown)
        raise


class StateLog:
    """Logs the engine's state at every call while there is work, and once after every change."""

    def __init__(self, engine: Engine, tokens_given: Callable[[], int], now_s: float) -> None:
        self._engine = engine
        self._tokens_given = tokens_given
        self._last_s = now_s
        self._last_tokens = tokens_given()
        self._last_gauges = engine.gauges

    def tick(self, now_s: float) -> None:
        gauges, tokens = self._engine.gauges, self._tokens_given()
        shown = _state_of(gauges)
        rate = (tokens - self._last_tokens) / max(now_s - self._last_s, 1e-9)
        if shown.is_busy or shown != _state_of(self._last_gauges) or rate:
            state.info("%s tokens_per_s=%.1f%s", shown, rate, _drafts_since(self._last_gauges, gauges))
        self._last_s, self._last_tokens, self._last_gauges = now_s, tokens, gauges


def _drafts_since(before: Gauges, now: Gauges) -> str:
    if not now.drafts.fed:
        return ""
    fed, right = now.drafts.fed - before.drafts.fed, now.drafts.accepted - before.drafts.accepted
    return f" drafts={fed} accepted={right}"
