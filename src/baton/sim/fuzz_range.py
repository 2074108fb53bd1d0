"""One run of the fuzzer over a range of seeds, and its report as a value that can be kept and carried between machines.

Owns the draw of a random first seed, the time limit, and what a report says about where it was made. Needs numpy and
msgspec, nothing else, so that a machine with many cores and little installed can run it (`python -m baton.sim fuzz`).
"""

from __future__ import annotations

import hashlib
import platform
import resource
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import msgspec

import baton
from baton.core.errors import BatonError
from baton.sim.faults import CLASSES
from baton.sim.fuzz import EVERY_FAULT, EVERY_MOVE, FuzzTotals, run_many
from baton.sim.shard import SeedReport

RANDOM = "random"
RANDOM_SEEDS = range(1_000_000, 1_000_000_000)
"""A random first seed is one of these. Seeds below them are fixed in tests."""
EVERYTHING_FIRES_FROM = 1000
"""From this many seeds on, a fault or transition that never happened is an error, unless the first seed was random."""
SEEDS_MAX = 100_000_000
SIMULATED = (
    "core", "sim", "wire",
    *(
        f"executor/{name}.py"
        for name in (
            "constraints/compiled_cache", "constraints/constraint_error", "constraints/contract", "constraints/mask_digest",
            "constraints/scripted_backend", "constraints/version_skew", "contract", "counting", "fingerprint",
            "gguf_folder", "model_shapes", "scripted",
        )
    ),
)  # fmt: skip
"""Folders and files whose source decides what a world does: of the executors what worlds import."""


class NotASeed(BatonError):
    """A first seed that is neither a number nor `random`."""


class UnreadableReport(BatonError):
    """A file that is no report of a range."""


class BrokenSeed(msgspec.Struct, frozen=True):
    seed: int
    law: str
    what: str
    replay: str
    """The command that runs this world again."""


class RangeReport(msgspec.Struct, frozen=True, tag="range"):
    """What `seeds` worlds from `first_seed` on did."""

    first_seed: int
    seeds: int
    commit: str
    source: str
    """Digest of the source of the packages that decide what a world does."""
    ended: str
    """UTC."""
    python: str
    jobs: int
    seconds: float
    cpu_seconds: float
    events: int
    requests: int
    virtual_us: int
    broken: tuple[BrokenSeed, ...]
    fired: dict[str, int]
    moves: dict[str, int]
    ends: dict[str, int]

    @property
    def seeds_per_second(self) -> float:
        return self.seeds / max(self.seconds, 1e-9)


def first_seed_of(text: str) -> int:
    """The number, or a random one for `random`."""
    if text == RANDOM:
        return RANDOM_SEEDS[secrets.randbelow(len(RANDOM_SEEDS))]
    if not text.isascii() or not text.isdigit():
        raise NotASeed(f"--first-seed {text!r} is neither a number from 0 on nor {RANDOM!r}")
    return int(text)


def run_range(
    first_seed: int,
    seeds: int | None,
    minutes: float | None,
    jobs: int,
    seen: Callable[[SeedReport], None] = lambda _report: None,
    *,
    keep_going: bool = False,
    commit: str | None = None,
) -> tuple[FuzzTotals, RangeReport]:
    """Run `seeds` worlds, or as many as fit into `minutes`. SIGTERM ends it as the time limit does."""
    source = source_digest()
    began, cpu_began = time.monotonic(), _children_s()
    until = None if minutes is None else began + minutes * 60
    with _sigterm_noticed() as told:

        def go_on() -> bool:
            return not told and (until is None or time.monotonic() < until)

        totals = run_many(first_seed, seeds or SEEDS_MAX, jobs, seen, go_on, keep_going=keep_going)
    return totals, RangeReport(
        first_seed=first_seed,
        seeds=totals.seeds,
        commit=commit or commit_of_source(),
        source=source,
        ended=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        python=platform.python_version(),
        jobs=jobs,
        seconds=round(time.monotonic() - began, 1),
        cpu_seconds=round(_children_s() - cpu_began, 1),
        events=totals.events,
        requests=totals.requests,
        virtual_us=totals.virtual_us,
        broken=tuple(_broken(failure) for failure in sorted(totals.failures, key=lambda report: report.seed)),
        fired=dict(sorted(totals.fired.items())),
        moves=dict(sorted(totals.moves.items())),
        ends=dict(sorted(totals.ends.items())),
    )


def never_happened(report: RangeReport) -> list[str]:
    """Faults and transitions of this code that do not occur in the range."""
    fired, moves = report.fired, report.moves
    return [name for name in EVERY_FAULT if not fired.get(name)] + [name for name in EVERY_MOVE if not moves.get(name)]


def faults_by_class(fired: dict[str, int]) -> Counter[str]:
    return Counter({name: sum(fired.get(str(fault), 0) for fault in faults) for name, faults in CLASSES.items()})


def write_report(file: Path, report: RangeReport) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read_report(file: Path) -> RangeReport:
    try:
        return msgspec.json.decode(file.read_bytes(), type=RangeReport)
    except (OSError, msgspec.DecodeError) as error:
        raise UnreadableReport(f"{file} is no report of a range: {error}") from error


def source_digest() -> str:
    """One digest of all Python files that decide what a world does, by their names and contents."""
    root = Path(baton.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(file for name in SIMULATED for file in _sources(root / name)):
        digest.update(f"{file.relative_to(root).as_posix()}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))


def commit_of_source() -> str:
    """The commit that this code is of, with a + if it was changed since; `unknown` where that cannot be asked."""
    folder = Path(baton.__file__).parent

    def asked(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return asked("rev-parse", "--short=10", "HEAD") + ("+" if asked("status", "--porcelain", "--", str(folder)) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _broken(failure: SeedReport) -> BrokenSeed:
    return BrokenSeed(failure.seed, failure.law or "", failure.what, f"baton sim replay {failure.seed}")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _sigterm_noticed() -> Iterator[list[int]]:
    """A list that is not empty once SIGTERM has come."""
    told: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)
