"""The output of several processes in one log."""

from __future__ import annotations

import io
import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from baton.up.merged_log import LINES_QUEUED_MAX, LineSplitter, MergedLog


@given(st.lists(st.text(alphabet="aé\N{SNOWMAN}\N{CRAB} ", max_size=9), max_size=6), st.integers(1, 7))
def test_lines_come_out_whole_however_they_were_cut(lines: list[str], size: int) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    cutter = LineSplitter()
    out = [line for at in range(0, len(data), size) for line in cutter.feed(data[at : at + size])]
    assert out + cutter.close() == lines


def test_a_line_without_an_end_is_bounded() -> None:
    cutter = LineSplitter(bytes_max=10)
    assert cutter.feed(b"x" * 25) == ["x" * 10, "x" * 10]
    assert cutter.close() == ["x" * 5]


def test_each_line_stands_behind_the_name_of_who_said_it() -> None:
    out = io.StringIO()
    with MergedLog(("router", "decode-1"), out, colours=False) as log:
        log.line("router", "hello")
        log.line("decode-1", "there")
        log.line("decode-1", "   ")
        log.note("router", "ready")
    assert out.getvalue() == "router   │ hello\ndecode-1 │ there\nrouter   │ ── ready\n"


def test_colours_of_a_child_do_not_get_through_and_names_have_their_own() -> None:
    out = io.StringIO()
    with MergedLog(("a", "b"), out, colours=True) as log:
        for line in LineSplitter().feed(b"\x1b[31mred\x1b[0m\r\n"):
            log.line("a", line)
        log.line("b", "x")
    first, second = out.getvalue().splitlines()
    assert first.endswith(" red")
    assert "\x1b[31m" not in first
    assert first.split("a")[0] != second.split("b")[0]


def test_nobody_waits_for_a_reader_that_takes_nothing() -> None:
    read_end, write_end = os.pipe()
    written = threading.Event()
    with os.fdopen(write_end, "w") as out, os.fdopen(read_end) as reader:
        with MergedLog(("a",), out, colours=False) as log:
            for _ in range(3 * LINES_QUEUED_MAX):
                log.line("a", "x" * 200)  # far more than the pipe and the queue hold
            written.set()
            text = [reader.readline() for _ in range(10)]
            assert all(line == f"a │ {'x' * 200}\n" or "dropped" in line for line in text)
            drain = threading.Thread(target=lambda: [None for line in reader if "dropped" in line and dropped.append(line)])
            dropped = [line for line in text if "dropped" in line]
            drain.start()
        out.close()
        drain.join(10)
    assert written.is_set()
    assert dropped
