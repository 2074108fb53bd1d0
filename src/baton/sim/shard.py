"""A process that runs seeds and writes one JSON line per seed to standard output.

    python -m baton.sim.shard --first-seed 0 --seeds 1000 --stride 2

The fuzzer starts one per core. A world depends on its seed alone, so it does not matter which process runs it.
"""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from baton.sim.fuzzed_run import WorldVerdict, run_seed


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, required=True)
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--stride", type=int, default=1)
    asked = parser.parse_args()
    encoder = msgspec.json.Encoder()
    try:
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds * asked.stride, asked.stride):
            sys.stdout.buffer.write(encoder.encode(report_of(run_seed(seed))) + b"\n")
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The fuzzer has closed the pipe; without this, the interpreter reports an error when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
