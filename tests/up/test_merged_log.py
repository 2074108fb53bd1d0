"""The output of several processes in one log."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from baton.node.log_lines import json_line
from baton.up.merged_log import JsonMergedLog, LineSplitter, MergedLog


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
    log = MergedLog(("router", "decode-1"), out, colours=False)
    log.line("router", "hello")
    log.line("decode-1", "there")
    log.line("decode-1", "   ")
    log.note("router", "ready")
    assert out.getvalue() == "router   │ hello\ndecode-1 │ there\nrouter   │ ── ready\n"


def test_colours_of_a_child_do_not_get_through_and_names_have_their_own() -> None:
    out = io.StringIO()
    log = MergedLog(("a", "b"), out, colours=True)
    for line in LineSplitter().feed(b"\x1b[31mred\x1b[0m\r\n"):
        log.line("a", line)
    log.line("b", "x")
    first, second = out.getvalue().splitlines()
    assert first.endswith(" red")
    assert "\x1b[31m" not in first
    assert first.split("a")[0] != second.split("b")[0]


def test_on_a_terminal_a_line_wipes_the_progress_that_stands_there() -> None:
    for colours in (True, False):
        out = io.StringIO()
        log = MergedLog(("a",), out, colours=colours)
        log.line("a", "x")
        log.note("a", "ready")
        log.say("two\nlines")
        assert [line.startswith("\033[2K") for line in out.getvalue().splitlines()] == [colours, colours, colours, False]


def test_as_json_each_line_is_an_object_that_names_its_process() -> None:
    out = io.StringIO()
    log = JsonMergedLog(("router", "decode-1"), out)
    log.line("router", json_line("hello", "INFO", "baton.access"))
    log.line("decode-1", "a library's words")
    log.line("decode-1", '["no object"]')
    log.line("decode-1", "[" * 5000)
    log.note("router", "ready")
    log.say("two\nlines")
    first, *others = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (first["message"], first["logger"], first["process"]) == ("hello", "baton.access", "router")
    shown = [(line["message"], line.get("process")) for line in others]
    assert shown == [
        ("a library's words", "decode-1"),
        ('["no object"]', "decode-1"),
        ("[" * 5000, "decode-1"),
        ("ready", "router"),
        ("two\nlines", None),
    ]


def test_a_long_line_of_json_stays_one_object() -> None:
    cutter, out = LineSplitter(), io.StringIO()
    line = json_line("x" * 200_000, "ERROR", "baton.engine").encode() + b"\n"
    for at in range(0, len(line), 65_536):
        for whole in cutter.feed(line[at : at + 65_536]):
            JsonMergedLog(("router",), out).line("router", whole)
    (found,) = map(json.loads, out.getvalue().splitlines())
    assert (found["process"], found["level"], len(found["message"])) == ("router", "ERROR", 200_000)


def test_an_object_without_an_end_is_bounded_too() -> None:
    cutter = LineSplitter(bytes_max=10, object_bytes_max=20)
    assert cutter.feed(b"{" + b"x" * 44) == ["{" + "x" * 19, "x" * 10, "x" * 10]
