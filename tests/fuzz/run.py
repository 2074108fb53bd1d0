"""Runs one border in this process, under limits: memory of the process, CPU time of an input, growth over the run.

    warm-up ── resident size ── inputs ── resident size     the difference is the growth

An input's number and the seed make it again: each is drawn from a generator of its own.
"""

from __future__ import annotations

import gc
import logging
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

from tests.fuzz.border import Border

INPUT_CPU_S_MAX = 1.0
MORE_BYTES_MAX = 768 << 20
"""Address space that a process may take beyond what it has when its border is made."""
GROWTH_BYTES_MAX = 16 << 20
WARM_UP = 0.25
"""Share of the inputs before growth is measured: caches fill, and the allocator settles."""
FAILURES_MAX = 20
_KINDS_MAX = 512
_PAGE_BYTES = resource.getpagesize()


class Failure(msgspec.Struct, frozen=True):
    number: int
    """Of the input."""
    what: str
    """The exception and where it was raised."""
    head: str
    """The first bytes of the input, in hex."""


class Outcome(msgspec.Struct, frozen=True):
    border: str
    seed: int
    inputs: int
    understood: int
    """Inputs that were decoded."""
    refusals: int
    """Distinct refusals, by type and text without numbers and names; at most _KINDS_MAX are told apart."""
    seconds: float
    longest_ms: float
    """CPU time of the slowest input."""
    growth_bytes: int
    """Resident size at the end, less that after the warm-up."""
    peak_bytes: int
    failures: tuple[Failure, ...]
    """One for each place that raised, of the first input that got there."""

    @property
    def is_good(self) -> bool:
        return not self.failures and self.growth_bytes <= GROWTH_BYTES_MAX


class TookTooLong(BaseException):
    """An input that is not decoded within INPUT_CPU_S_MAX. No decoder catches it."""


def draw_of(seed: int, number: int) -> random.Random:
    return random.Random(seed * 1_000_003 + number)


def run_border(name: str, border: Border, inputs: int, seed: int) -> Outcome:
    """Feed the inputs; limits this process for good."""
    logging.disable(logging.CRITICAL)
    _limit_memory()
    signal.signal(signal.SIGPROF, _too_long)
    tally = _Tally(border)
    began_s, warm = time.monotonic(), max(1, int(inputs * WARM_UP))
    tally.feed(seed, 0, warm)
    after_warm_up = _resident_bytes()
    tally.feed(seed, warm, inputs)
    growth = _resident_bytes() - after_warm_up
    return Outcome(
        name, seed, inputs, tally.understood, len(tally.refusals), time.monotonic() - began_s, 1000 * tally.longest_s,
        growth, _peak_bytes(), tuple(tally.failures.values()),
    )  # fmt: skip


class _Tally:
    def __init__(self, border: Border) -> None:
        self._border = border
        self.understood = 0
        self.refusals: Counter[str] = Counter()
        self.failures: dict[str, Failure] = {}
        self.longest_s = 0.0

    def feed(self, seed: int, first: int, end: int) -> None:
        for number in range(first, end):
            if len(self.failures) >= FAILURES_MAX:
                return
            self._feed_one(number, self._border.draw(draw_of(seed, number)))

    def _feed_one(self, number: int, data: bytes) -> None:
        began_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, INPUT_CPU_S_MAX)
        try:
            self._border.decode(data)
            self.understood += 1
        except self._border.refusals as refusal:
            self._count(refusal)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            where = _where(error)
            self.failures.setdefault(where, Failure(number, f"{where}: {str(error)[:100]!r}", data[:200].hex()))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.longest_s = max(self.longest_s, time.process_time() - began_s)

    def _count(self, refusal: BaseException) -> None:
        if len(self.refusals) < _KINDS_MAX:
            kind = re.sub(r"'[^']*'|\"[^\"]*\"|[\d\W]+", " ", str(refusal)[:200])
            self.refusals[f"{type(refusal).__name__} {kind[:60]}"] += 1


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = frames[-1]
    ours = next((one for one in reversed(frames) if "baton" in one.filename and "fuzz" not in one.filename), at)
    return f"{type(error).__name__} at {Path(ours.filename).name}:{ours.lineno} in {ours.name}"


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TookTooLong(f"more than {INPUT_CPU_S_MAX:g} s of CPU time")


def _limit_memory() -> None:
    gc.collect()
    limit = _statm()[0] + MORE_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _statm() -> tuple[int, int]:
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


def _resident_bytes() -> int:
    gc.collect()
    return _statm()[1]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
