"""A process that does jobs of a benchmark: a line of JSON in, a line of JSON out, until there are no more.

python -m baton.bench.job split
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from baton.bench.prefill_path import PathJob, run_path
from baton.bench.split import SplitJob, run_split


def _split(line: bytes) -> msgspec.Struct:
    return run_split(msgspec.json.decode(line, type=SplitJob))


def _path(line: bytes) -> msgspec.Struct:
    return run_path(msgspec.json.decode(line, type=PathJob))


KINDS: dict[str, Callable[[bytes], msgspec.Struct]] = {"split": _split, "prefill-path": _path}


def main() -> None:
    work = KINDS[sys.argv[1]]
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(work(line)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
