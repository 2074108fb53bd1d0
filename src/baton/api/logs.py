"""What an operator reads while a server runs: one line for each finished request, one a second for the engine's state.

Owns the loggers `baton.access` and `baton.engine` and the shape of their lines: `name=value`, always the same names in the
same order. Promises to format nothing while the level hides it. Does not know where lines go: whoever starts a server
decides that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.api.engine import Bill, Engine, Gauges
from baton.api.errors import ApiError

access = logging.getLogger("baton.access")
state = logging.getLogger("baton.engine")

_STATE = "running=%d waiting=%d free=%d evictable=%d ratio=%.3f"
_HEAD = "id=%s path=%s status=%d "
_ENDED = _HEAD + "finish=%s prompt=%d completion=%d cached=%d %s " + _STATE
_REFUSED = _HEAD + "error=%s " + _STATE
_BILL = "preemptions=%d recomputed=%d queue_ms=%.1f prefill_ms=%.1f decode_ms=%.1f"
_NO_BILL = "preemptions=- recomputed=- queue_ms=- prefill_ms=- decode_ms=-"


def _state_of(gauges: Gauges) -> tuple[int, int, int, int, float]:
    blocks = gauges.blocks
    return gauges.running, gauges.waiting, blocks.get("free", 0), blocks.get("evictable", 0), gauges.reserve_ratio


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that was accepted and is over, with the engine's state at that moment."""

    request_id: str
    path: str
    status: int
    finishes: Sequence[str]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    gauges: Gauges

    def log(self, bill: Bill | None) -> None:
        """`bill` is None where the engine did not tell it; the line then has `-` in its place."""
        paid = _NO_BILL
        if bill is not None:
            spent_ms = (bill.queue_ms, bill.prefill_ms, bill.decode_ms)
            paid = _BILL % (bill.preemptions, bill.recomputed_tokens, *spent_ms)
        access.info(
            _ENDED,
            self.request_id,
            self.path,
            self.status,
            ",".join(self.finishes),
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            paid,
            *_state_of(self.gauges),
        )


@contextmanager
def refusals_logged(engine: Engine, request_id: str, path: str) -> Iterator[None]:
    """A request that ends inside, before it is accepted, gets its line here."""
    try:
        yield
    except ApiError as error:
        if access.isEnabledFor(logging.INFO):
            access.info(_REFUSED, request_id, path, error.status, error.code, *_state_of(engine.gauges))
        raise


class StateLog:
    """Told the time again and again, it logs the engine's state: while there is work, and once after every change."""

    def __init__(self, engine: Engine, tokens_given: Callable[[], int], now_s: float) -> None:
        self._engine = engine
        self._tokens_given = tokens_given
        self._last_s = now_s
        self._last_tokens = tokens_given()
        self._last_state = _state_of(engine.gauges)

    def tick(self, now_s: float) -> None:
        gauges, tokens = self._engine.gauges, self._tokens_given()
        shown = _state_of(gauges)
        rate = (tokens - self._last_tokens) / max(now_s - self._last_s, 1e-9)
        if gauges.running or gauges.waiting or shown != self._last_state or rate:
            state.info(_STATE + " tokens_per_s=%.1f", *shown, rate)
        self._last_s, self._last_tokens, self._last_state = now_s, tokens, shown
