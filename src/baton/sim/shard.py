"""A process that runs seeds: reads one a line from standard input, writes one JSON line each to standard output.

    seq 0 2 1998 | python -m baton.sim.shard

The fuzzer starts one per core and deals out the seeds. A world depends on its seed alone, so it does not matter which
process runs it. Needs numpy and msgspec, nothing else.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

import msgspec

from baton.core.errors import BatonError
from baton.sim.fuzzed_run import WorldVerdict, run_seed

COLLECT_EVERY = 4
"""Worlds between two garbage collections: a world is one large cycle, and within it there is next to nothing to collect."""
WORLD_CPU_S_MAX = 300.0
"""A world takes a fraction of a second. One that takes this long goes round in circles inside one event."""


class WorldStuck(BatonError):
    """A world used `WORLD_CPU_S_MAX` seconds of processor time. The laws count it as an error of our own code."""


class SeedReport(msgspec.Struct, frozen=True):
    seed: int
    digest: str
    law: str | None
    """The broken law; None: none."""
    what: str
    events: int
    virtual_us: int
    requests: int
    instances: int
    classes: tuple[str, ...]
    fired: dict[str, int]
    moves: dict[str, int]
    ends: dict[str, int]


def report_of(verdict: WorldVerdict) -> SeedReport:
    broken = verdict.broken
    return SeedReport(
        seed=verdict.seed,
        digest=verdict.digest,
        law=None if broken is None else broken.law,
        what="" if broken is None else broken.what,
        events=verdict.events,
        virtual_us=verdict.virtual_us,
        requests=verdict.asks,
        instances=verdict.scenario.instances,
        classes=verdict.scenario.classes,
        fired=_plain(verdict.fired),
        moves=_plain(verdict.moves),
        ends=_plain(verdict.ends),
    )


def _plain(counts: dict[str, int]) -> dict[str, int]:
    return {str(name): times for name, times in sorted(counts.items()) if times}


def main() -> None:
    signal.signal(signal.SIGVTALRM, _stuck)
    encoder = msgspec.json.Encoder()
    gc.freeze()
    gc.disable()
    try:
        for number, line in enumerate(sys.stdin.buffer):
            signal.setitimer(signal.ITIMER_VIRTUAL, WORLD_CPU_S_MAX)
            report = report_of(run_seed(int(line)))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            sys.stdout.buffer.write(encoder.encode(report) + b"\n")
            sys.stdout.buffer.flush()
            if number % COLLECT_EVERY == 0:
                gc.collect()
    except BrokenPipeError:
        # The fuzzer has closed the pipe; without this, the interpreter reports an error when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stuck(_number: int, _frame: FrameType | None) -> None:
    raise WorldStuck(f"one world took {WORLD_CPU_S_MAX:.0f} s of processor time")


if __name__ == "__main__":
    main()
