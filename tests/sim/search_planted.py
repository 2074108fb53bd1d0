"""Find, for each planted bug, a seed whose world catches it, and record it in `catches.json`.

    python -m tests.sim.search_planted [--names NAME …] [--seeds 2000] [--jobs 2]

Seeds are tried in order from 0, a process for each bug at a time. The first seed that catches it in few events is taken, so that
replaying all of them stays quick; where the first catch took many, a few more seeds are tried and the cheapest one is taken.
A name that is not caught keeps no record: the exit status is then 1, and a law or a fault is missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

from baton.sim.scenario import run_seed
from tests.sim.planted import BUGS, Catch, read_catches, write_catches

EVENTS_CHEAP = 6_000
"""An undisturbed world takes two to three thousand."""
MORE_SEEDS = 20
"""How many seeds after the first catch may be tried for a cheaper one."""
SEED_S_MAX = 60
"""A bug may make our code go round in circles; such a seed counts as tried and no more."""


class Hung(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    tried: int
    seed: int | None = None
    law: str = ""
    what: str = ""
    events: int = 0
    hung: int = 0


@contextmanager
def _time_limit() -> Iterator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SEED_S_MAX)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def search(name: str, seeds: int) -> Found:
    best: Found | None = None
    hung = tried = 0
    for seed in range(seeds):
        tried = seed + 1
        try:
            with _time_limit(), BUGS[name].planted():
                verdict = run_seed(seed)
        except Hung:
            hung += 1
            continue
        broken = verdict.broken
        if broken is not None and (best is None or verdict.events < best.events):
            best = Found(name, tried, seed, broken.law, broken.what, verdict.events, hung)
        if best is not None and (best.events <= EVENTS_CHEAP or tried >= best.tried + MORE_SEEDS):
            return best
    return best or Found(name, tried, hung=hung)


def search_apart(name: str, seeds: int) -> Found:
    """In a process of its own: a bug stays where it was planted."""
    command = [sys.executable, "-m", "tests.sim.search_planted", "--one", name, "--seeds", str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the search for {name} failed:\n{done.stderr}")
    return Found(**json.loads(done.stdout))


def search_all(names: Sequence[str], seeds: int, jobs: int) -> list[Found]:
    found: list[Found] = []
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(search_apart, name, seeds) for name in names]):
            item = done.result()
            found.append(item)
            seed = "not caught" if item.seed is None else f"seed {item.seed}"
            print(f"  {len(found):>3}/{len(names)}  {item.name}: {seed}", file=sys.stderr, flush=True)
    return sorted(found, key=lambda item: list(BUGS).index(item.name))


def table(found: Sequence[Found]) -> str:
    lines = [f"{'bug':<44} {'layer':<5} {'tried':>5} {'seed':>5} {'events':>7}  law"]
    for item in found:
        seed = "-" if item.seed is None else str(item.seed)
        law = item.law or ("NOT CAUGHT" + (f", {item.hung} seeds hung" if item.hung else ""))
        lines.append(f"{item.name:<44} {BUGS[item.name].layer:<5} {item.tried:>5} {seed:>5} {item.events:>7}  {law}")
        if item.what:
            lines.append(f"{'':<44} {item.what[:150]}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.search_planted", description=__doc__)
    parser.add_argument(
        "--names", nargs="*", default=None, choices=list(BUGS), help="only these bugs (default: all)", metavar="NAME"
    )
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to try for each (default 2000)")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes at once (default 2)")
    parser.add_argument("--one", default=None, choices=list(BUGS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(asdict(search(options.one, options.seeds))))
        return 0
    names = options.names or list(BUGS)
    found = search_all(names, options.seeds, options.jobs)
    catches = {name: catch for name, catch in read_catches().items() if name not in names}
    catches.update({item.name: Catch(item.seed, item.law) for item in found if item.seed is not None})
    write_catches(catches)
    print(table(found))
    return int(any(item.seed is None for item in found))


if __name__ == "__main__":
    sys.exit(main())
