"""What an engine says of a step, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.core.engine.ended import Bill, EndedRequest, StartedRequest
from baton.core.engine.gauges import DraftGauges, SchedulerGauges
from baton.core.engine.plan import Logprobs
from baton.core.engine.records import Settled
from baton.core.engine.request import FinishReason, Serial
from baton.wire.engine_messages import StepOutput, step_output

GAUGES = SchedulerGauges(1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9, 10, 11, 12, 13, 0.5)


def step(
    rows: Sequence[tuple[int, list[int]]] = (),
    ended: Sequence[int] = (),
    started: Sequence[tuple[int, int]] = (),
    logprobs: tuple[Logprobs, ...] = (),
) -> StepOutput:
    settled = Settled(
        serials=np.array([serial for serial, _ in rows], dtype=np.int64),
        counts=np.array([len(tokens) for _, tokens in rows], dtype=np.int32),
        tokens=np.array([token for _, tokens in rows for token in tokens], dtype=np.int32),
        logprobs=logprobs,
        started=tuple(StartedRequest(Serial(serial), cached) for serial, cached in started),
        ended=tuple(EndedRequest(Serial(serial), FinishReason.LENGTH, 1, Bill()) for serial in ended),
    )
    return step_output(settled, GAUGES, DraftGauges())
