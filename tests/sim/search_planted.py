"""Find, for each planted bug, a seed whose world catches it, and record it in `catches.json`.

    python -m tests.sim.search_planted [--names NAME …] [--law LAW] [--seeds 2000] [--jobs 2]

Seeds are tried in order from 0. The first one that catches the bug in few events is taken, so that replaying all of it stays
quick; where the first catch took many, a few more seeds are tried and the cheapest is taken. With `--law`, only a catch by
this law counts: a bug may break several, and one of them may have no other bug. A bug that is not caught keeps
no record: the exit status is then 1, and a law or a fault is missing. What is found is recorded as it is found.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Lock
from types import FrameType

from baton.sim.fuzzed_run import run_seed
from baton.sim.scenario import draw_scenario
from tests.sim import planted_constraints, planted_peers, planted_routing, planted_tiers
from tests.sim.planted import Catch, read_catches, write_catches
from tests.sim.planted_constraints import BUGS

EVENTS_CHEAP = 6_000
"""An undisturbed world takes two to three thousand."""
MORE_EVENTS = 200_000
"""How many events may be spent after the first catch on looking for a cheaper one."""
SEED_S_MAX = 60
"""A bug may make our code go round in circles; such a seed counts as tried and no more."""


SHARD = 3
"""Bugs a process: few enough that no process is left alone at the end, and starting one costs a second."""


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


def _can_show(name: str, seed: int) -> bool:
    """What is wrong with a router, or between peers, does not show where there are none; and a router hides much else."""
    scenario = draw_scenario(seed)
    match BUGS[name].plant.__module__:
        case planted_routing.__name__:
            return scenario.router is not None
        case planted_peers.__name__:
            return scenario.router is None and any(role.takes for role in scenario.roles)
        case planted_constraints.__name__:
            return any(ask.sampling.constraint is not None for user in scenario.users for ask in user.asks)
        case planted_tiers.__name__:
            return bool(scenario.config.tiers.host_rows or scenario.giver.tiers.host_rows)
    return scenario.router is None


def _likely_first(name: str, seeds: int) -> Iterator[int]:
    """Where it can show; for what is not the router's own doing, then also where there is one."""
    likely = {seed for seed in range(seeds) if _can_show(name, seed)}
    yield from sorted(likely)
    if BUGS[name].plant.__module__ not in (planted_routing.__name__, planted_tiers.__name__):
        yield from (seed for seed in range(seeds) if seed not in likely)


def search(name: str, seeds: int, law: str | None = None) -> Found:
    """`law`: the only one that counts; None: any."""
    best: Found | None = None
    hung = tried = spent = 0
    for seed in _likely_first(name, seeds):
        tried += 1
        try:
            with _time_limit(), BUGS[name].planted():
                verdict = run_seed(seed)
        except Hung:
            hung += 1
            continue
        broken = verdict.broken if verdict.broken is not None and law in (None, verdict.broken.law) else None
        if broken is not None and (best is None or verdict.events < best.events):
            best = Found(name, tried, seed, broken.law, broken.what, verdict.events, hung)
        spent += verdict.events if best is not None else 0
        if best is not None and (best.events <= EVENTS_CHEAP or spent > MORE_EVENTS):
            return best
    return best or Found(name, tried, hung=hung)


def search_apart(names: Sequence[str], seeds: int, law: str | None) -> Iterator[Found]:
    """In a process of its own, which says a line of JSON for each bug."""
    command = [sys.executable, "-m", "tests.sim.search_planted", "--here", "--seeds", str(seeds), "--names", *names]
    command += [] if law is None else ["--law", law]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield Found(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"a search failed; it was to look for {', '.join(names)}")


class Book:
    """What was found so far, on disk after each bug."""

    def __init__(self, names: Sequence[str]) -> None:
        self.found: list[Found] = []
        self._names = names
        self._lock = Lock()

    def enter(self, item: Found) -> None:
        with self._lock:
            self.found.append(item)
            catches = read_catches()
            catches.pop(item.name, None)
            if item.seed is not None:
                catches[item.name] = Catch(item.seed, item.law)
            write_catches(catches)
        seed = "not caught" if item.seed is None else f"seed {item.seed}"
        print(f"  {len(self.found):>3}/{len(self._names)}  {item.name}: {seed}", file=sys.stderr, flush=True)


def search_all(names: Sequence[str], seeds: int, jobs: int, law: str | None) -> list[Found]:
    book = Book(names)

    def shard(part: Sequence[str]) -> None:
        for item in search_apart(part, seeds, law):
            book.enter(item)

    parts = [names[at : at + SHARD] for at in range(0, len(names), SHARD)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(shard, parts))
    return sorted(book.found, key=lambda item: list(BUGS).index(item.name))


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
    parser = argparse.ArgumentParser(prog="python -m tests.sim.search_planted", description="Find seeds that catch bugs.")
    parser.add_argument("--names", nargs="*", choices=list(BUGS), metavar="NAME", help="only these bugs (default: all)")
    parser.add_argument("--law", help="count only catches by this law (default: any)")
    parser.add_argument("--seeds", type=int, default=2000, help="how many to try for each bug (default 2000)")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes at once (default 2)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(BUGS)
    if options.here:
        for name in names:
            print(json.dumps(asdict(search(name, options.seeds, options.law))), flush=True)
        return 0
    found = search_all(names, options.seeds, options.jobs, options.law)
    print(table(found))
    return int(any(item.seed is None for item in found))


if __name__ == "__main__":
    sys.exit(main())
