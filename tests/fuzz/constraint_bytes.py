"""Borders of constraints: what clients ask for, compiled as a server would, and messages of the processes that do it.

A grammar is compiled on a thread with the stack of those that serve: what overflows it ends the process, which is a failure.
"""

from __future__ import annotations

import io
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.fuzz.border import Border, MakeBorder
from tests.fuzz.http_bodies import CONSTRAINED_COMPLETIONS
from tests.fuzz.inputs import from_json, from_msgpack

SERVING_STACK_BYTES = 16 << 20
MASKS = 16


def _grammar_text(draw: random.Random) -> str:
    """Chains of rules within groups, many alternatives, or rules that are ambiguous."""
    many, groups = draw.choice((3, 40, 400, 490)), draw.choice((0, 0, 1, 2))
    match draw.randrange(4):
        case 0:
            opened, closed = "(" * groups, draw.choice((")?", ")", ")*")) * groups
            rules = [f'r{i}: {opened}"x" r{i + 1}{closed}' for i in range(many)]
            return "\n".join(["start: r0", *rules, f'r{many}: "y"'])
        case 1:
            return "start: " + " | ".join(f'"{draw.randrange(10**6)}"' for _ in range(many))
        case 2:
            return "root ::= " + " | ".join(f"[a-{draw.choice('bcz')}]" + "{0,3}" for _ in range(min(many, 40)))
        case _:
            ways = draw.choice(("e e", "e e e", '""', 'e "+" e'))
            return f"start: e\ne: {ways} | /[a-z]/ | " + '"a" ' * min(many, 40)


def _serving_thread() -> ThreadPoolExecutor:
    """One thread with the stack of those that serve."""
    pool, before = ThreadPoolExecutor(1), threading.stack_size(SERVING_STACK_BYTES)
    pool.submit(int).result()
    threading.stack_size(before)
    return pool


def _compile() -> Border:
    """Up to some masks of an answer that begins with the longest tokens."""
    import tempfile
    from pathlib import Path

    from baton.api.constraint_jobs import decode_job
    from baton.api.constraints.wanted import ConstraintRefused
    from baton.api.errors import ApiError
    from baton.api.original_request import OriginalRequest
    from baton.core.errors import Refused
    from baton.executor.constraints.constraint_error import ConstraintError
    from baton.node import constraint_worker
    from baton.node.scripted_text import write_byte_tokenizer
    from tests.fuzz.http_bodies import _preparer

    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        checker = constraint_worker.ConstraintChecker(Path(folder))
    preparer, pool = _preparer(), _serving_thread()
    by_body = from_json(CONSTRAINED_COMPLETIONS)

    def draw_input(draw: random.Random) -> bytes:
        if draw.random() < 0.6:
            return by_body(draw)
        return json.dumps({"prompt": "hi", "guided_grammar": _grammar_text(draw)}).encode()

    def decode(data: bytes) -> object:
        prepared = preparer.prepare(OriginalRequest("/v1/completions", data, "tenant", "request", 3, 1_000_000))
        if prepared.constraint is None:
            return None
        source = decode_job(prepared.constraint.job).grammar({})
        return source and pool.submit(checker.begin_answer, source, MASKS).result()

    return Border(decode, (ApiError, Refused, ConstraintRefused, ConstraintError), draw_input)


def _worker_frames() -> Border:
    """Whatever stands in a pipe between a front end and a worker."""
    from baton.node.constraint_messages import (
        GrammarCompiled,
        GrammarRefused,
        WorkerReady,
        WorkerUnable,
        decoded,
        encoded,
        framed,
        read_frame,
    )

    messages = (WorkerReady("llguidance", "1"), WorkerUnable("no"), GrammarCompiled("start: é"), GrammarRefused("f", "no"))
    by_message = from_msgpack([encoded(message)[4:] for message in messages])

    def draw_input(draw: random.Random) -> bytes:
        frame = framed(by_message(draw))
        if draw.random() < 0.3:  # a length that is not true
            return draw.randbytes(4) + frame[4:]
        return frame[: draw.randrange(len(frame) + 1)] if draw.random() < 0.1 else frame

    def decode(data: bytes) -> object:
        payload = read_frame(io.BytesIO(data))
        return None if payload is None else decoded(payload)

    return Border(decode, (ValueError,), draw_input)


BORDERS: dict[str, MakeBorder] = {"constraint-compile": _compile, "constraint-worker": _worker_frames}
