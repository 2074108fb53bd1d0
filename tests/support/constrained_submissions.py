"""Submissions with constraints of the scripted backend, and a backend whose compilations wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from msgspec.structs import replace

from baton.core.engine.orders import Submit
from baton.core.engine.request import Constraint, MaskReference, Sampling, Submission, frozen_tokens
from baton.executor.constraints.contract import CompiledConstraint, ConstraintError
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource, allowed_after
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


def asked(
    name: str, seed: int | None, ticket: int = 0, *, began_under: str = ScriptedBackend.version, outputs: Sequence[int] = ()
) -> Submit:
    made = None if seed is None else replace(constraint(seed), version=began_under)
    item = submission([1, 2], name=name, sampling=Sampling(seed=0, constraint=made))
    return Submit(ticket, (replace(item, generated=frozen_tokens(list(outputs))),))


def allowed_first(source: str) -> int:
    """A token that an answer may begin with, and that does not end it."""
    return allowed_after(source, [], 64)[0]


def of_another_version(item: Submission, outputs: Sequence[int], digest: bytes) -> Submission:
    """The same in the middle of an answer that began under another version, whose mask has this digest."""
    made = item.sampling.constraint
    if made is None:
        raise ValueError(f"{item.request_id} has no constraint")
    version = MaskReference("another", len(outputs), digest)
    sampling = replace(item.sampling, constraint=replace(made, version=version))
    return replace(item, sampling=sampling, generated=frozen_tokens(list(outputs)))
