"""Builds the grammars of constraints in this process, and compiles none: for tests of what clients may ask for."""

from __future__ import annotations

from baton.api.constraint_jobs import ConstraintJob, decode_job
from baton.api.constraints.wanted import ConstraintRefused
from baton.api.errors import invalid
from baton.core.engine.request import Constraint


class GrammarsOnly:
    def __init__(self) -> None:
        self.jobs: list[ConstraintJob] = []

    async def compile(self, tenant: str, job: bytes, param: str) -> Constraint | None:
        decoded = decode_job(job)
        self.jobs.append(decoded)
        try:
            source = decoded.grammar({"</think>": 300})
        except ConstraintRefused as refusal:
            raise invalid(refusal.field, str(refusal), "unsupported_constraint") from None
        return None if source is None else Constraint("llguidance", "1", source)
