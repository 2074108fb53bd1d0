"""What an operator reads while a server runs: one line for each finished request, one a second for the engine's state.

Owns the loggers `baton.access` and `baton.engine` and the shape of their lines: `name=value`, always the same names in the
same order; only `leased`, `receiving` and `leaving`, which most instances never have, are left out while they are 0, and
`drafts` and `accepted` (since the line before) where nothing was ever guessed. A
router, which computes nothing, says of a request where it was instead of what state it is in. Promises to format nothing
while the level hides it. Does not know where lines go: whoever starts a server decides that.
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
"""Of more choices it is only said how many ended in which way."""
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
    """None: of a router."""

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
    """Who had a body's choices last, and how often one of them moved."""
    last = dict.fromkeys(visited[-1] for visited in places if visited)
    return _CARRIED % (",".join(last) or "-", sum(max(0, len(visited) - 1) for visited in places))


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that was accepted and is over, with the engine's state at that moment."""

    request_id: str
    path: str
    status: int
    finishes: Sequence[str]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    gauges: Gauges

    def log(self, bill: Bill | None, places: Sequence[Sequence[str]] = ()) -> None:
        """`bill` is None where the engine did not tell it; the line then has `-` in its place.

        `places`: by choice, the instances that had it.
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
    """A request that ends inside, before it is accepted, gets its line here."""
    try:
        yield
    except ApiError as error:
        if access.isEnabledFor(logging.INFO):
            gauges = engine.gauges
            shown = f"waiting={gauges.scheduler.waiting}" if gauges.role == ROUTER else _state_of(gauges)
            access.info(_REFUSED, request_id, path, error.status, error.code, shown)
        raise


class StateLog:
    """Told the time again and again, it logs the engine's state: while there is work, and once after every change."""

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
