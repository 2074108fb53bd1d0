"""The report of a step: what its kernels tell the host, in one buffer of words.

stops: known      chunks that sample: token, count, known      decodes: code, count, known, fed, tokens of each
"""

from __future__ import annotations

from typing import NamedTuple

from baton.core.engine.plan import Int32s


class ReportShape(NamedTuple):
    """How many there are of each part, padding included."""

    stops: int
    sampled: int
    sequences: int
    queries: int
    """Tokens of each decode."""

    @property
    def words(self) -> int:
        return self.stops + 3 * self.sampled + (4 + self.queries) * self.sequences


class StepReport(NamedTuple):
    """Views of the words."""

    stopped_known: Int32s
    sampled_tokens: Int32s
    sampled_known: Int32s
    codes: Int32s
    counts: Int32s
    """Tokens that each decode yields."""
    known: Int32s
    fed: Int32s
    tokens: Int32s
    """[sequences, queries]: drawn for each decode, of which the first `counts` stand."""


def read_report(words: Int32s, shape: ReportShape) -> StepReport:
    stops, sampled, sequences, queries = shape
    chunks = words[stops : stops + 3 * sampled].reshape(3, sampled)
    decodes = words[stops + 3 * sampled : shape.words]
    codes, counts, known, fed = decodes[: 4 * sequences].reshape(4, sequences)
    tokens = decodes[4 * sequences :].reshape(sequences, queries)
    return StepReport(words[:stops], chunks[0], chunks[2], codes, counts, known, fed, tokens)
