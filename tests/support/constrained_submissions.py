"""Submissions with constraints of the scripted backend, and a backend whose compilations wait."""

from __future__ import annotations

import queue
import threading

from baton.core.engine.orders import Submit
from baton.core.engine.request import Constraint, Sampling
from baton.executor.constraints.contract import CompiledConstraint, ConstraintError
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource
from tests.support.driver import submission

DEADLINE_S = 20


class HaltingBackend:
    """The scripted backend, each of whose compilations waits to be released."""

    name, version = ScriptedBackend.name, ScriptedBackend.version

    def __init__(self) -> None:
        self._inner = ScriptedBackend()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.release = threading.Semaphore(0)
        self.fails = False

    def compile(self, source: str) -> CompiledConstraint:
        self.begun.put(source)
        self.release.acquire()
        if self.fails:
            raise ConstraintError("too large")
        return self._inner.compile(source)


def constraint(seed: int) -> Constraint:
    return Constraint(ScriptedBackend.name, ScriptedBackend.version, ScriptedSource(seed, 64).text())


def asked(name: str, seed: int | None, ticket: int = 0) -> Submit:
    sampling = Sampling(seed=0, constraint=None if seed is None else constraint(seed))
    return Submit(ticket, (submission([1, 2], name=name, sampling=sampling),))
