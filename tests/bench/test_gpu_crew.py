"""A part that fails, hangs or takes the process with it costs that part; the others are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from baton.bench.gpu_part_processes import OVER, Command, PartLimits, do_parts
from baton.bench.gpu_report import GpuRow, PartResult

CHILD = """
import json, os, sys, time
notes, parts, results = open(sys.argv[1], "a", buffering=1), sys.argv[2].split(","), json.loads(sys.argv[3])
notes.write(json.dumps({"machine": {"gpu": "none"}}) + "\\n")
for part in parts:
    if part == "early":
        raise RuntimeError("no GPU here")
    notes.write(json.dumps({"begin": part}) + "\\n")
    if part == "raises":
        raise RuntimeError("out of memory")
    if part == "dies":
        os._exit(7)
    if part == "tears":
        notes.write('{"done": {"part"')
        os._exit(1)
    if part == "hangs":
        time.sleep(600)
    notes.write(json.dumps({"done": {**results, "part": part}}) + "\\n")
"""
RESULT = PartResult("", rows=[GpuRow("a", 1.0, "ms")])


def command() -> tuple[Command, list[list[str]]]:
    """And which parts each process was given."""
    given: list[list[str]] = []

    def of(parts: Sequence[str], notes: Path) -> list[str]:
        given.append(list(parts))
        return [sys.executable, "-c", CHILD, str(notes), ",".join(parts), json.dumps(asdict(RESULT))]

    return of, given


def errors(*parts: str, limits: PartLimits | None = None) -> tuple[dict[str, str], list[list[str]]]:
    of, given = command()
    done = do_parts(parts, of, limits or PartLimits(), lambda _line: None)
    assert [part.part for part in done.parts] == list(parts)
    return {part.part: part.error for part in done.parts}, given


def test_all_parts_are_done_by_one_process() -> None:
    found, given = errors("one", "two", "three")
    assert set(found.values()) == {""}
    assert given == [["one", "two", "three"]]


@pytest.mark.parametrize(
    ("harm", "said"), [("raises", "out of memory"), ("dies", "ended with 7"), ("tears", "ended with 1")]
)
def test_what_ends_the_process_fails_one_part_and_another_goes_on(harm: str, said: str) -> None:
    found, given = errors("one", harm, "three")
    assert said in found[harm]
    assert found["one"] == found["three"] == ""
    assert given == [["one", harm, "three"], ["three"]]


def test_a_part_that_hangs_is_ended() -> None:
    found, _ = errors("hangs", "two", limits=PartLimits(part_s=2.0))
    assert found == {"hangs": "it took longer than 2 s", "two": ""}


def test_when_the_time_is_over_the_rest_is_not_begun() -> None:
    found, given = errors("one", "hangs", "three", limits=PartLimits(all_s=4.0))
    assert found == {"one": "", "hangs": OVER, "three": OVER}
    assert len(given) == 1


def test_what_ends_the_process_before_its_first_part_would_end_every_other() -> None:
    found, given = errors("early", "two")
    assert all("no GPU here" in error for error in found.values())
    assert len(given) == 1
