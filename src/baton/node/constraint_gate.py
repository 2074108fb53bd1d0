"""Holds submissions until their constraints are compiled, so that no step of the engine waits for a compiler.

    front end ── Submit ──▶ gate ── compiled, or none to compile ──▶ worker
                             └── compile on one thread ──▶ inbox ──▶ worker, or refused

A compiled constraint passes at once, unless the answer began under another version of its backend: then masks are compared.
Others wait for the thread; tenants take turns there. A front end has tried each
constraint within limits before, but a tenant may send many. Whoever waits for longer than WAIT_US_MAX is refused, to be
tried again: each submission is answered within that time and one compilation.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.core.engine.orders import Submit
from baton.core.engine.request import Constraint
from baton.core.errors import Refusal, RefusalCode
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import ConstraintError
from baton.executor.constraints.version_skew import continued_here, has_other_version

log = logging.getLogger(__name__)

WAIT_US_MAX = 3_000_000
"""A router takes an instance for stuck after ten seconds without an answer."""
HELD_MAX = 1_024
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class GatePassed:
    """A submission that was held, for the worker."""

    submit: Submit


@dataclass(frozen=True, slots=True)
class GateRefused:
    """A submission that was held, for too long."""

    ticket: int
    refusal: Refusal


def constraints_of(submit: Submit) -> list[Constraint]:
    """The different constraints of a group, in order."""
    named = [item.sampling.constraint for item in submit.group if item.sampling.constraint is not None]
    return list(dict.fromkeys(named))


def tenant_of(submit: Submit) -> str:
    """Ids of requests begin with their tenant; without tenants, each request takes turns by itself."""
    return submit.group[0].request_id.partition(":")[0]


class ConstraintGate:
    def __init__(
        self,
        compiled: CompiledConstraints,
        vocabulary: int,
        decided: Callable[[GatePassed | GateRefused], None],
        now_us: Callable[[], int],
        held_max: int = HELD_MAX,
    ) -> None:
        """`decided` is called on the gate's thread with each submission that was held."""
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._decided = decided
        self._now_us = now_us
        self._held_max = held_max
        self._held: OrderedDict[str, deque[tuple[int, Submit]]] = OrderedDict()
        """By tenant, each with its time of arrival; the first tenant has the next turn."""
        self._count = 0
        self._changed = threading.Condition()
        """Protects `_held` and `_count`."""
        self._thread: threading.Thread | None = None
        """Started with the first constraint that is not compiled yet."""

    def passes(self, submit: Submit) -> bool:
        """Whether the worker may have it now. Otherwise `hold` it."""
        return self._is_compiled(submit) and not has_other_version(submit, self._compiled.versions)

    def _is_compiled(self, submit: Submit) -> bool:
        return all(self._compiled.has(constraint) for constraint in constraints_of(submit))

    def hold(self, submit: Submit) -> GateRefused | None:
        """Keep it until its constraints are compiled, or refuse it because too many are held."""
        with self._changed:
            if self._count >= self._held_max:
                return GateRefused(submit.ticket, _busy(f"{self._count} requests wait for their constraints to be compiled"))
            self._held.setdefault(tenant_of(submit), deque()).append((self._now_us(), submit))
            self._count += 1
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="baton-constraints", daemon=True)
            self._thread.start()
        return None

    def _run(self) -> None:
        while True:
            arrived_us, submit = self._next()
            waited_us = self._now_us() - arrived_us
            if waited_us > WAIT_US_MAX and not self._is_compiled(submit):
                text = f"its constraint waited for {waited_us // 1000} ms to be compiled"
                self._decided(GateRefused(submit.ticket, _busy(text)))
                continue
            for constraint in constraints_of(submit):
                try:
                    self._compiled.compile(constraint)
                except ConstraintError as error:  # the request fails where it would draw its first token
                    log.warning("a constraint cannot be compiled: %s", error)
            self._decided(GatePassed(continued_here(submit, self._compiled, self._vocabulary)))

    def _next(self) -> tuple[int, Submit]:
        with self._changed:
            while not self._held:
                self._changed.wait()
            tenant, waiting = self._held.popitem(last=False)
            first = waiting.popleft()
            if waiting:
                self._held[tenant] = waiting  # behind the others
            self._count -= 1
            return first


def _busy(text: str) -> Refusal:
    return Refusal(RefusalCode.QUEUE_FULL, text, RETRY_AFTER_S)
