"""`python -m tests.fuzz`: feeds every decoder of a border with inputs that nobody of ours would send, one process each.

    python -m tests.fuzz --inputs 100000                     all borders, so many inputs each
    python -m tests.fuzz --border kv-valkey --inputs 1000000 --seed 7
    python -m tests.fuzz --border kv-valkey --seed 7 --only 4711      one input again, with its traceback

Exit codes: 0 all is well; 1 a border raised what it does not declare, was slow or grew; 2 the command was wrong.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from tests.fuzz.registry import BORDERS, SWITCHED_OFF
from tests.fuzz.run import GROWTH_BYTES_MAX, Failure, Outcome, draw_of, run_border

CHILD_S_AN_INPUT = 0.01
"""A border whose inputs take longer than this on average hangs; each has its own limit beside."""


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    if given.in_this_process:
        sys.stdout.buffer.write(msgspec.json.encode(_run_here(given.border[0], given.inputs, given.seed)))
        return 0
    if given.only is not None:
        data = (border := BORDERS[given.border[0]]()).draw(draw_of(given.seed, given.only))
        print(data)
        print(border.decode(data))
        return 0
    names = given.border or [name for name in BORDERS if name not in SWITCHED_OFF]
    print(f"seed {given.seed}, {given.inputs} inputs for each of {len(names)} borders")
    print("| border | inputs | understood | refusals | seconds | slowest ms | growth KiB | peak MiB |\n|---|" + "---:|" * 7)
    outcomes = [_run_child(name, given.inputs, given.seed) for name in names]
    print(f"{sum(outcome.inputs for outcome in outcomes)} inputs in all")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the decoders of every border.")
    parser.add_argument("--inputs", type=int, default=4000, help="inputs for each border")
    parser.add_argument("--border", action="append", choices=sorted(BORDERS), help="this border; may be given again")
    parser.add_argument("--seed", type=int, default=None, help="equal seeds draw equal inputs [random]")
    parser.add_argument("--only", type=int, default=None, help="decode just this input of the border, and show it")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if (given.only is not None or given.in_this_process) and len(given.border or []) != 1:
        parser.error("name one --border")
    given.seed = secrets.randbits(32) if given.seed is None else given.seed
    return given


def _run_here(name: str, inputs: int, seed: int) -> Outcome:
    return run_border(name, BORDERS[name](), inputs, seed)


def run_child(name: str, inputs: int, seed: int) -> Outcome:
    """One border in a process of its own. A process that dies is a failure like any other."""
    command = [sys.executable, "-m", "tests.fuzz", "--in-this-process", "--border", name]
    command += ["--inputs", str(inputs), "--seed", str(seed)]
    limit_s = 60 + inputs * CHILD_S_AN_INPUT
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=limit_s, check=False, env={**os.environ, "NO_COLOR": "1"}
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=Outcome)
        died = f"the process ended with {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}"
    except subprocess.TimeoutExpired:
        died = f"the process did not end within {limit_s:g} s"
    return Outcome(name, seed, inputs, 0, 0, 0.0, 0.0, 0, 0, (Failure(-1, died, ""),))


def _run_child(name: str, inputs: int, seed: int) -> Outcome:
    outcome = run_child(name, inputs, seed)
    cells = (
        name, outcome.inputs, outcome.understood, outcome.refusals, f"{outcome.seconds:.0f}", f"{outcome.longest_ms:.0f}",
        outcome.growth_bytes >> 10, outcome.peak_bytes >> 20,
    )  # fmt: skip
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for failure in outcome.failures:
        print(f"    input {failure.number}: {failure.what}\n      {failure.head}")
    if outcome.growth_bytes > GROWTH_BYTES_MAX:
        print(f"    it grew by {outcome.growth_bytes >> 10} KiB")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
