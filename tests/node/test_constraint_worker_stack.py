"""Grammars that llguidance recurses over: the process that tries them has less stack than the threads that serve them."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.wanted import ConstraintKind
from baton.executor.constraints.llguidance_grammars import compiled
from baton.executor.python_command import python_command
from baton.node.constraint_messages import FromWorker, GrammarCompiled, WorkerReady, decoded, framed, read_frame
from baton.node.constraint_worker import ConstraintChecker
from baton.node.scripted_text import write_byte_tokenizer

SERVING_STACK_BYTES = 16 << 20
"""Of the threads that compile constraints to serve them."""
RULES = 490


def chain(rules: int, groups: int) -> bytes:
    """Each rule names the next one, within so many optional groups."""
    opened, closed = "(" * groups, ")?" * groups
    lines = [f'r{i}: {opened}"x" r{i + 1}{closed}' for i in range(rules)]
    text = "\n".join(["start: r0", *lines, f'r{rules}: "y"'])
    return ConstraintJob(ConstraintKind.GRAMMAR, text, "field").encode()


def asked_with_unlimited_stack(folder: Path, job: bytes) -> tuple[FromWorker | None, int]:
    """The answer of a worker whose main thread has a stack without end, and its exit status. None: it died instead."""
    done = subprocess.run(
        python_command("baton.node.constraint_worker", str(folder), "60"),
        input=framed(job),
        capture_output=True,
        check=False,
        timeout=120,
        preexec_fn=_unlimited_stack,
    )
    answers = io.BytesIO(done.stdout)
    first, second = read_frame(answers), read_frame(answers)
    assert first is not None, done.stderr.decode()
    assert isinstance(decoded(first), WorkerReady)
    return None if second is None else decoded(second), done.returncode


def _unlimited_stack() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY, reason="stacks are limited for good here"
)
@pytest.mark.parametrize("groups", [0, 2, 12])
def test_what_a_worker_accepts_fits_the_stack_of_a_thread_that_serves(tmp_path: Path, groups: int) -> None:
    write_byte_tokenizer(tmp_path)
    answer, status = asked_with_unlimited_stack(tmp_path, chain(RULES, groups))
    if answer is None and groups:
        assert status < 0, "it was ended by a signal"
        return
    assert status == 0
    assert isinstance(answer, GrammarCompiled), answer
    command = [sys.executable, "-m", "tests.node.test_constraint_worker_stack", str(tmp_path)]
    done = subprocess.run(command, input=answer.source.encode(), check=False, timeout=120)
    assert done.returncode == 0


def _compile_on_serving_thread(folder: Path, source: str) -> None:
    checker = ConstraintChecker(folder)
    threading.stack_size(SERVING_STACK_BYTES)
    thread = threading.Thread(target=lambda: compiled(checker._tokenizer, source).compute_bitmask())
    thread.start()
    thread.join()


if __name__ == "__main__":
    _compile_on_serving_thread(Path(sys.argv[1]), sys.stdin.read())
