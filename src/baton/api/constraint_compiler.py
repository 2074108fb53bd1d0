"""Has constraints compiled before a request is submitted. The interface is of the API; `node` implements it with processes.

Building a grammar and compiling it may take seconds and gigabytes for a schema that a client made for it, so neither is done
by the process that answers clients.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from baton.api.errors import unsupported
from baton.core.engine.request import Constraint


class ConstraintCompiler(Protocol):
    async def compile(self, tenant: str, job: bytes, param: str) -> Constraint | None:
        """The constraint of an encoded `ConstraintJob`; None: there is nothing to enforce.

        `param` is the field that asked for it, for errors that name none themselves. Raises an ApiError: 400 for what cannot
        be enforced or is too complex, 429 or 503 where too much waits, 503 where no process compiles it now.
        """


class CompileOutcome(StrEnum):
    """How asking for a constraint ended, for metrics."""

    COMPILED = "compiled"
    CACHED = "cached"
    """Known already, or being compiled for another request of the same tenant."""
    REFUSED = "refused"
    """It cannot be enforced; also where that was known already."""
    TOO_COMPLEX = "too_complex"
    """It exceeded the limits of CPU time or memory."""
    BUSY = "busy"
    """Too much waits."""
    UNAVAILABLE = "unavailable"
    """No process could compile it, or none in time on a busy machine."""


class CompileMeter(Protocol):
    """Is told what a compiler does."""

    def count_constraint(self, outcome: CompileOutcome) -> None: ...

    def observe_constraint(self, seconds: float) -> None:
        """Of a constraint that was not known: waiting for its turn and a process, and compiling."""

    def note_constraints_held(self, size_bytes: int) -> None:
        """Of all that is cached."""


class NoMeter:
    """For compilers that nobody watches."""

    def count_constraint(self, outcome: CompileOutcome) -> None: ...

    def observe_constraint(self, seconds: float) -> None: ...

    def note_constraints_held(self, size_bytes: int) -> None: ...


class NoConstraints:
    """For servers without a compiler: refuses every constraint."""

    async def compile(self, tenant: str, job: bytes, param: str) -> Constraint | None:  # noqa: ARG002
        raise unsupported(param, f"'{param}' is not supported: this server cannot constrain answers")
