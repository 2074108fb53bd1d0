"""Splits a step's output by request into two messages."""

from __future__ import annotations

from collections.abc import Container

import msgspec
import numpy as np

from baton.core.engine.ended import EndedRequest
from baton.wire.engine_messages import StepOutput


def serials_of(output: StepOutput) -> list[int]:
    serials: list[int] = np.frombuffer(output.serials, dtype="<i8").tolist()
    return serials


def part_of(output: StepOutput, serials: list[int], rows: list[bool], ended: list[EndedRequest]) -> StepOutput:
    """The marked rows of a step, with these ends."""
    mask = np.array(rows, dtype=bool)
    counts = np.frombuffer(output.counts, dtype="<i4")
    tokens = np.frombuffer(output.tokens, dtype="<i4")[np.repeat(mask, counts)]
    places = np.cumsum(mask) - 1
    taken = {serial for serial, row in zip(serials, rows, strict=True) if row}
    return StepOutput(
        np.frombuffer(output.serials, dtype="<i8")[mask].tobytes(),
        counts[mask].tobytes(),
        tokens.tobytes(),
        tuple(msgspec.structs.replace(item, row=int(places[item.row])) for item in output.logprobs if rows[item.row]),
        tuple(start for start in output.started if start.serial in taken),
        tuple(ended),
        output.gauges,
        prompt_logprobs=tuple(
            msgspec.structs.replace(item, row=int(places[item.row])) for item in output.prompt_logprobs if rows[item.row]
        ),
    )


def split(output: StepOutput, ours: Container[int]) -> tuple[StepOutput | None, StepOutput | None]:
    """The part of `ours`, and the rest; usually one of them is the whole."""
    serials = serials_of(output)
    mine = [serial in ours for serial in serials]
    rows, ends = sum(mine), sum(end.serial in ours for end in output.ended)
    if not rows and not ends:
        return None, output
    if rows == len(serials) and ends == len(output.ended):
        return output, None
    theirs = [not row for row in mine]
    return (
        part_of(output, serials, mine, [end for end in output.ended if end.serial in ours]),
        part_of(output, serials, theirs, [end for end in output.ended if end.serial not in ours]),
    )
