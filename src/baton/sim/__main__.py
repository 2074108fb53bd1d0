"""`python -m baton.sim fuzz …`: the fuzzer for machines that have Python 3.11 or later, numpy and msgspec, and nothing else.

    PYTHONPATH=src python -m baton.sim fuzz --first-seed random --minutes 9 --keep-going --report range.json

The report is brought home and kept with `baton sim ledger add range.json`. Shrinking, tables and stories are part of
`baton sim fuzz` and `baton sim replay`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baton.core.errors import BatonError
from baton.sim.fuzz import cores
from baton.sim.fuzz_range import RangeReport, faults_by_class, first_seed_of, run_range, write_report
from baton.sim.shard import SeedReport


def main() -> int:
    asked = parser().parse_args()
    try:
        first_seed = first_seed_of(asked.first_seed)
        if asked.report is not None:
            asked.report.open("a").close()  # a file that cannot be written is refused before the run
        jobs = asked.jobs or cores()
        _say(f"first seed {first_seed}, {jobs} at a time")
        seeds = asked.seeds if asked.minutes is None else None
        _, report = run_range(
            first_seed, seeds, asked.minutes, jobs, _seen, keep_going=asked.keep_going, commit=asked.commit
        )
    except (BatonError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if asked.report is not None:
        write_report(asked.report, report)
    _show(report)
    return 1 if report.broken else 0


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m baton.sim", description=__doc__.partition("\n")[0])
    commands = whole.add_subparsers(required=True)
    fuzz = commands.add_parser("fuzz", help="run simulated clusters with faults")
    fuzz.add_argument("--first-seed", default="random", help="a number, or random (the default)")
    fuzz.add_argument("--seeds", type=int, default=2000, help="how many worlds (default 2000)")
    fuzz.add_argument("--minutes", type=float, help="run for so long, however many seeds that is")
    fuzz.add_argument("--jobs", type=int, help="processes at once (default: one a core)")
    fuzz.add_argument("--keep-going", action="store_true", help="go on after a broken law")
    fuzz.add_argument("--report", type=Path, help="write the range's report here, as JSON")
    fuzz.add_argument("--commit", help="the commit that this code is of, where git cannot be asked")
    return whole


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _seen(report: SeedReport) -> None:
    if report.law is not None:
        _say(f"seed {report.seed} breaks a law: {report.law}: {report.what}")
        _say(f"replay with: baton sim replay {report.seed}")


def _show(report: RangeReport) -> None:
    _say(
        f"seeds {report.first_seed}–{report.first_seed + report.seeds - 1}: {report.seeds:,} in {report.seconds:.0f} s "
        f"({report.seeds_per_second:.1f} a second, {report.cpu_seconds:.0f} s of processor time), {report.events:,} events, "
        f"{sum(report.moves.values()):,} transitions, {len(report.broken)} broke a law"
    )
    _say("faults by class: " + ", ".join(f"{name} {times:,}" for name, times in faults_by_class(report.fired).items()))


if __name__ == "__main__":
    sys.exit(main())
