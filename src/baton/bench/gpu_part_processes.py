"""Runs the parts of a benchmark in a child process; when it ends early, a new child runs the remaining parts.

A CUDA error makes the GPU unusable for its process, and a part may hang. So a child process runs the parts and notes the
beginning and the result of each; whatever ends the child fails only the current part.

    {"machine": {…}}   {"begin": "decode"}   {"done": {…}}   {"begin": "prefill"}   …       one line each, in a file
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from baton.bench.gpu_report import PartResult, part_of
from baton.executor.python_command import python_command

ALL_S, PART_S = 530.0, 240.0
LOOK_S = 0.5
ERROR_CHARS = 3000
OVER = "the time was over"

Command = Callable[[Sequence[str], Path], list[str]]
"""(parts, notes file) → command line of the child."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    all_s: float = ALL_S
    part_s: float = PART_S


@dataclass(slots=True)
class PartAttempt:
    """The notes of one child process."""

    machine: dict[str, str] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    done: list[PartResult] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class PartsOutcome:
    machine: dict[str, str]
    parts: list[PartResult]


def note(path: Path, kind: str, value: object) -> None:
    """Append one line to the notes (called in the child)."""
    with path.open("a") as notes:
        notes.write(json.dumps({kind: value}) + "\n")


def note_done(path: Path, result: PartResult) -> None:
    note(path, "done", asdict(result))


def do_parts(parts: Sequence[str], command: Command, limits: PartLimits, say: Callable[[str], None]) -> PartsOutcome:
    """Run each part once, in order, until the time limit."""
    until_s = time.monotonic() + limits.all_s
    left, machine, results = list(parts), dict[str, str](), list[PartResult]()
    while left and time.monotonic() < until_s:
        attempt = _attempt(command, left, until_s, limits)
        machine = machine or attempt.machine
        results += attempt.done
        left = left[len(attempt.done) :]
        if not left:
            break
        say(f"{left[0]} failed:\n{attempt.error}")
        # A child that ended before its first part would end the same way again.
        failed = left[:1] if attempt.begun else left
        results += [PartResult(part, error=attempt.error) for part in failed]
        left = left[len(failed) :]
    return PartsOutcome(machine, [*results, *(PartResult(part, error=OVER) for part in left)])


def _attempt(command: Command, parts: Sequence[str], until_s: float, limits: PartLimits) -> PartAttempt:
    with tempfile.TemporaryDirectory(prefix="baton-gpu-") as scratch:
        notes, complaints = Path(scratch) / "notes", Path(scratch) / "complaints"
        notes.touch()
        with complaints.open("wb") as errors:
            child = subprocess.Popen(command(parts, notes), stderr=errors, env=_environment())
            try:
                why = _watch(child, notes, until_s, limits.part_s)
            finally:
                child.kill()
                child.wait()
        attempt = _read(notes)
        attempt.error = why or complaints.read_text(errors="replace").strip()[-ERROR_CHARS:]
        attempt.error = attempt.error or f"its process ended with {child.returncode}"
        return attempt


def _environment() -> dict[str, str]:
    """Environment without model hub access, and without library warnings that would hide errors."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}


def _watch(child: subprocess.Popen[bytes], notes: Path, until_s: float, part_s: float) -> str:
    """Wait for the child. Returns why it must be killed, or "" when it ended by itself."""
    seen, since_s = 0, time.monotonic()
    while True:
        try:
            child.wait(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            now_s, size = time.monotonic(), notes.stat().st_size
            if size != seen:
                seen, since_s = size, now_s
            if now_s > until_s:
                return OVER
            if now_s - since_s > part_s:
                return f"it took longer than {part_s:g} s"
        else:
            return ""


def _read(notes: Path) -> PartAttempt:
    attempt = PartAttempt()
    *lines, _torn = notes.read_text().split("\n")  # the child may have ended while it wrote
    for line in lines:
        value = json.loads(line)
        if "machine" in value:
            attempt.machine = value["machine"]
        elif "begin" in value:
            attempt.begun.append(value["begin"])
        elif "done" in value:
            attempt.done.append(part_of(value["done"]))
    return attempt


def own_command(*arguments: str) -> list[str]:
    return python_command("baton.bench.gpu", *arguments)
