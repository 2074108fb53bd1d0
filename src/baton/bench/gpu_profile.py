"""GPU activity from the profiler: idle time, and time by kernel.

▇▇▇▇ ▇▇▇▇▇▇▇  ▇▇▇▇▇▇ ······ ▇▇▇▇ ▇▇▇▇▇▇▇       a gap inside a step is a few microseconds; between steps it is more
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.profiler import ProfilerActivity, profile

BETWEEN_STEPS_US = 5.0
"""Gaps at least this long lie between steps, not between kernels of one step."""
ATTENTION = re.compile(r"^attend_|attention|flash|decode_paged|BatchDecode|BatchPrefill", re.IGNORECASE)
"""Names of kernels that read KV."""
BESIDE = ("Memcpy", "Memset")
NAME_CHARS = 60


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    begin_us: float
    end_us: float


class Recorder:
    """The profiler, with separate start and stop."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._running = False
        self.spans: list[Span] = []
        """Recorded spans, set by `stop`."""

    def start(self) -> None:
        self._profiler.start()
        self._running = True

    def stop(self) -> None:
        """No-op when it is not running."""
        if self._running:
            self._running = False
            self._profiler.stop()
            self.spans = spans_of(self._profiler)


def spans_of(profiler: profile) -> list[Span]:
    """Kernels, copies and fills, sorted by start."""
    found = [
        Span(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA"
    ]
    return sorted(found, key=lambda span: span.begin_us)


def within(spans: Sequence[Span], first: float, last: float) -> list[Span]:
    """Spans between two fractions of the whole time."""
    if not spans:
        return []
    begin_us, end_us = spans[0].begin_us, max(span.end_us for span in spans)
    length_us = end_us - begin_us
    low_us, high_us = begin_us + first * length_us, begin_us + last * length_us
    return [span for span in spans if low_us <= span.begin_us and span.end_us <= high_us]


def gaps_us(spans: Iterable[Span]) -> list[float]:
    """Length of each idle gap. `spans` are sorted by start and may overlap."""
    gaps: list[float] = []
    busy_until_us: float | None = None
    for span in spans:
        if busy_until_us is not None and span.begin_us > busy_until_us:
            gaps.append(span.begin_us - busy_until_us)
        busy_until_us = span.end_us if busy_until_us is None else max(busy_until_us, span.end_us)
    return gaps


def idle_share(spans: Sequence[Span], least_us: float = 0.0) -> float:
    """Share of the whole time that lies in gaps of at least `least_us`."""
    if not spans:
        return 1.0
    length_us = max(span.end_us for span in spans) - spans[0].begin_us
    return sum(gap for gap in gaps_us(spans) if gap >= least_us) / length_us


def turns(spans: Iterable[Span]) -> list[Span]:
    """Each kernel from where the one before it ended, where it began earlier: a kernel that is launched early waits for the
    one before, and that wait is not its own. Copies run beside kernels, and are left as they are."""
    found: list[Span] = []
    ended_us = -math.inf
    for span in sorted(spans, key=lambda span: span.end_us):
        if span.name.startswith(BESIDE):
            found.append(span)
            continue
        found.append(replace(span, begin_us=min(max(span.begin_us, ended_us), span.end_us)))
        ended_us = span.end_us
    return found


def attention_us(spans: Iterable[Span]) -> float:
    return sum(span.end_us - span.begin_us for span in turns(spans) if ATTENTION.search(span.name))


def busiest(spans: Sequence[Span], steps: int, count: int = 14) -> str:
    """A table of the kernels that took most of the time."""
    spent: dict[str, tuple[float, int]] = {}
    for span in turns(spans):
        us, calls = spent.get(span.name, (0.0, 0))
        spent[span.name] = (us + span.end_us - span.begin_us, calls + 1)
    ranked = sorted(spent.items(), key=lambda item: -item[1][0])[:count]
    lines = [
        f"{us / steps:10.1f} µs a step in {calls / steps:7.1f} calls  {name[:NAME_CHARS]}" for name, (us, calls) in ranked
    ]
    return "\n".join(lines)
