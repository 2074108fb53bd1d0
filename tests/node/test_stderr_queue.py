"""Standard error whose reader may be slow, gone or never there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from baton.node.settings import LogFormat
from baton.node.stderr_queue import LineQueue, QueuedStderr

NOTICE = re.compile(r"(\d+) log lines dropped: nobody read them\n")
EXITING = """
import sys
from baton.node.stderr_queue import queue_stderr
queue_stderr()
for number in range(100_000):
    print("line", number, file=sys.stderr)
sys.exit(7)
"""
FAILING = """
from baton.node.stderr_queue import queue_stderr
queue_stderr()
raise ValueError("the reason")
"""


@given(st.lists(st.one_of(st.integers(1, 12), st.none()), max_size=60), st.integers(1, 40))
def test_what_comes_out_is_what_went_in_or_a_line_that_says_how_much_is_missing(steps: list[int | None], room: int) -> None:
    queue, out, put = LineQueue(room), "", 0
    for step in steps:
        if step is None:
            out += queue.take(16)
        else:
            queue.put(f"{put:0{step}}\n")
            put += 1
    while queue:
        out += queue.take(16)
    expected = 0
    for line in out.splitlines(keepends=True):
        if (notice := NOTICE.fullmatch(line)) is not None:
            expected += int(notice[1])
        else:
            assert int(line) == expected
            expected += 1
    assert expected == put
    assert queue.dropped == sum(int(count) for count in NOTICE.findall(out))


def test_a_reader_that_takes_nothing_stops_no_writer_and_is_told_later() -> None:
    read_end, write_end = os.pipe()
    stream = QueuedStderr(write_end)
    began_s = time.monotonic()
    for number in range(20_000):
        stream.write(f"{number:0200}\n")
    assert not stream.drain(0.01)
    assert time.monotonic() - began_s < 10
    assert stream.dropped > 10_000
    with os.fdopen(read_end) as reader:
        told = 0
        while told < stream.dropped:  # in one place or several: the thread may have written in between
            notice = NOTICE.fullmatch(reader.readline())
            told += int(notice[1]) if notice else 0
        assert told == stream.dropped
        stream.write("again\n")
        assert "again\n" in iter(reader.readline, "")


def test_a_reader_that_is_gone_stops_no_writer() -> None:
    read_end, write_end = os.pipe()
    stream = QueuedStderr(write_end)
    os.close(read_end)
    stream.write("nobody\n")
    assert not stream.drain(30)
    for _ in range(20_000):
        stream.write("x" * 200 + "\n")
    assert stream.dropped > 10_000


def test_a_process_whose_log_nobody_reads_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", EXITING], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 7


def test_the_last_words_of_a_process_are_written() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING], stderr=subprocess.PIPE, timeout=60, check=False, text=True)
    assert done.stderr.splitlines()[-1] == "ValueError: the reason"
    assert done.returncode == 1


def test_what_is_missing_from_a_log_of_json_is_told_as_json() -> None:
    queue = LineQueue(10, LogFormat.JSON)
    for _ in range(3):
        queue.put("123456789\n")
    lines = (queue.take() + queue.take()).splitlines()
    assert lines[0] == "123456789"
    told = json.loads(lines[1])
    assert (told["level"], told["message"]) == ("WARNING", "2 log lines dropped: nobody read them")
