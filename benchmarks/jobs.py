"""Runs jobs on all cores: one worker process per core; each takes the next job when it has finished one.

Owns the processes. A job and its result are one line of JSON each; `python -m benchmarks.jobs KIND` is what the processes
run. Results are returned in the order of the jobs. The processes end with the parent. A failed job fails the whole run,
with the stderr of its process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from baton.core.errors import BatonError

Job = TypeVar("Job", bound=msgspec.Struct)
Result = TypeVar("Result", bound=msgspec.Struct)
STOP_S = 5.0


class JobFailed(BatonError):
    """A job failed; the message is the stderr of its process."""


def cores() -> int:
    """Cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def run_jobs(
    kind: str, jobs: Sequence[Job], result: type[Result], done: Callable[[Result], None], processes: int
) -> list[Result]:
    """Results in the order of the jobs; `done` is called with each as it arrives, in this thread."""
    found: dict[int, Result] = {}
    todo: SimpleQueue[int | None] = SimpleQueue()
    results: SimpleQueue[tuple[int, bytes] | JobFailed] = SimpleQueue()
    for number in range(len(jobs)):
        todo.put(number)
    lines = [msgspec.json.encode(job) for job in jobs]
    workers = [_JobProcess(kind) for _ in range(min(processes, len(jobs)))]
    try:
        for worker in workers:
            todo.put(None)
            worker.start(todo, lines, results)
        while len(found) < len(jobs):
            arrived = results.get()
            if isinstance(arrived, JobFailed):
                raise arrived
            found[arrived[0]] = msgspec.json.decode(arrived[1], type=result)
            done(found[arrived[0]])
    finally:
        for worker in workers:
            worker.stop()
    return [found[number] for number in range(len(jobs))]


class _JobProcess:
    """One worker process and the thread that feeds it."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.jobs", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._thread: threading.Thread | None = None

    def start(
        self, todo: SimpleQueue[int | None], lines: Sequence[bytes], results: SimpleQueue[tuple[int, bytes] | JobFailed]
    ) -> None:
        self._thread = threading.Thread(target=self._work, args=(todo, lines, results), daemon=True)
        self._thread.start()

    def _work(
        self, todo: SimpleQueue[int | None], lines: Sequence[bytes], results: SimpleQueue[tuple[int, bytes] | JobFailed]
    ) -> None:
        given, taken = self._process.stdin, self._process.stdout
        while (number := todo.get()) is not None and given is not None and taken is not None:
            try:
                given.write(lines[number] + b"\n")
                given.flush()
                answer = taken.readline()
            except (BrokenPipeError, ValueError):
                answer = b""  # the process is gone, or was stopped
            if not answer:
                results.put(JobFailed(self._stderr()))
                return
            results.put((number, answer))

    def _stderr(self) -> str:
        said = self._process.stderr.read() if self._process.stderr is not None else b""
        return said.decode(errors="replace").strip() or "a process of the benchmark ended without a word"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._thread is not None:
            self._thread.join(STOP_S)  # its pipe is closed, so it ends
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


# ── one process ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def job_runner(kind: str) -> Callable[[bytes], msgspec.Struct]:
    # Imported here because all of them import this module.
    if kind == "split":
        from benchmarks.split import SplitJob, run_split

        return lambda line: run_split(msgspec.json.decode(line, type=SplitJob))
    if kind == "fleet-pressure":
        from benchmarks.fleet_pressure import FleetPressureJob, run_fleet

        return lambda line: run_fleet(msgspec.json.decode(line, type=FleetPressureJob))
    from benchmarks.prefill_path import PathJob, run_path

    return lambda line: run_path(msgspec.json.decode(line, type=PathJob))


def main() -> None:
    """Read one job per line from stdin, write one result per line to stdout."""
    work = job_runner(sys.argv[1])
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(work(line)) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
