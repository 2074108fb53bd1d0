"""Log lines of a running server: one per finished request, one every ten seconds for the engine's state.

Owns the loggers `baton.access` and `baton.engine` and the format of their lines: `name=value`, the same names in the same
order. `tenant` is the beginning of a hash of the API key, `-` where there are none; `client` is the sender's address.
`leased`, `receiving` and `leaving` are omitted while they are 0, `drafts` and `accepted` (since the previous line) while
there were no drafts; `left_out` counts refusals of the same error that got no line. A router logs the instances of a request
instead of the engine's state. Nothing is formatted while the level hides it. Handlers are configured by the process that
starts the server.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from baton.api.engine import ROUTER, Engine, Gauges
from baton.api.errors import ApiError
from baton.api.log_rate import LogRate
from baton.core.engine.ended import Bill

access = logging.getLogger("baton.access")
state = logging.getLogger("baton.engine")

_HEAD = "id=%s path=%s status=%d "
_ENDED = _HEAD + "tenant=%s client=%s finish=%s prompt=%d completion=%d cached=%d %s %s%s"
_REFUSED = _HEAD + "tenant=%s client=%s error=%s %s%s"
_DENIED = _HEAD + "client=%s%s"
TENANT_CHARS = 8
"""Of the hash of an API key: enough to tell the tenants of a server apart."""
PATH_CHARS_MAX = 200
_BILL = "preemptions=%d recomputed=%d restored=%d queue_ms=%.1f prefill_ms=%.1f decode_ms=%.1f"
REFUSALS_A_SECOND = 20
"""Lines for refused requests, of each error."""
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


def _shown_tenant(tenant: str) -> str:
    return tenant[:TENANT_CHARS] or "-"


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
    tenant: str
    client: str
    finishes: Sequence[str]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    gauges: Gauges
    trace_id: str = ""
    """Empty where no traces are made."""

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
            _shown_tenant(self.tenant),
            self.client,
            _finishes(self.finishes),
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            paid,
            _whereabouts(places) if self.gauges.role == ROUTER else _state_of(self.gauges),
            f" trace={self.trace_id}" if self.trace_id else "",
        )


class RefusalLog:
    """Logs refused requests. Where one error is very frequent, most are only counted: they cost their sender nothing."""

    def __init__(self, engine: Engine, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock_s = clock_s
        self._rate = LogRate(REFUSALS_A_SECOND, 1.0)

    @contextmanager
    def logged(self, request_id: str, path: str, tenant: str, client: str) -> Iterator[None]:
        """Log a request that is refused inside the block."""
        try:
            yield
        except ApiError as error:
            if access.isEnabledFor(logging.INFO):
                self._log(request_id, path, tenant, client, error)
            raise

    def _log(self, request_id: str, path: str, tenant: str, client: str, error: ApiError) -> None:
        left_out = self._rate.take(f"{error.status} {error.code}", self._clock_s())
        if left_out is None:
            return
        gauges = self._engine.gauges
        shown = f"waiting={gauges.scheduler.waiting}" if gauges.role == ROUTER else _state_of(gauges)
        before = f" left_out={left_out}" if left_out else ""
        who = _shown_tenant(tenant), client
        access.info(_REFUSED, request_id, path, error.status, *who, error.code, shown, before)


class DenialLog:
    """Logs requests that were answered 401 or 403, with who sent them. At most some of them: a key may be guessed at."""

    STATUSES = (401, 403)

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._rate = LogRate(REFUSALS_A_SECOND, 1.0)

    def log(self, request_id: str, path: str, status: int, client: str) -> None:
        left_out = self._rate.take(str(status), self._clock_s()) if access.isEnabledFor(logging.INFO) else None
        if left_out is not None:
            before = f" left_out={left_out}" if left_out else ""
            access.info(_DENIED, request_id, quote(path)[:PATH_CHARS_MAX], status, client, before)


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
