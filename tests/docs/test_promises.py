"""The table of promises names tests, and the tests are there; the runbook has every error code; told defaults are ours."""

from __future__ import annotations

import re

import pytest

from baton.api.error_catalogue import error_entries
from baton.cli.reference import option_rows
from baton.core.errors import EXIT_SETUP
from tests.docs.pages import ROOT, prose_of

NO_TEST = "no test"


def rows_of(page: str, first: str) -> list[list[str]]:
    """Cells of the tables of a page whose first column has this heading."""
    found, inside = list[list[str]](), False
    for line in prose_of(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not cells[0].startswith("---"):
            found.append(cells)
    return found


PROMISES = rows_of("docs/exactness.md", "mode")
RUNBOOK = rows_of("docs/runbook.md", "`code`")


def named_tests(cell: str) -> list[tuple[str, str]]:
    """(file, test), each test of the file named before it."""
    found, file = list[tuple[str, str]](), ""
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith(".py"):
            file = name
        else:
            found.append((file, name))
    return found


def test_there_are_promises_of_every_mode() -> None:
    modes = " ".join(row[0] for row in PROMISES)
    for mode in (
        "float64, CPU",
        "scripted",
        "float32, CPU",
        "bfloat16, CPU",
        "`--batch-invariant`",
        "bfloat16, CUDA",
        "float16, CPU or CUDA",
    ):
        assert mode in modes
    done = " ".join(row[1] for row in PROMISES)
    for what in ("constrained", "drafts", "handed over", "preempted", "killed", "host memory"):
        assert what in done


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: f"{row[0]}: {row[1]}"[:70])
def test_a_promise_names_a_test_that_is_there(row: list[str]) -> None:
    _, _, promise, shown = row
    if shown == NO_TEST:
        assert promise.startswith("N/A"), "what is promised has a test"
        return
    tests = named_tests(shown)
    assert tests
    for file, test in tests:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file} has no {test}"


def test_the_runbook_has_every_error_code_once() -> None:
    told = [code for row in RUNBOOK for code in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(told) == sorted(entry.code for entry in error_entries())


MAPPED = rows_of("docs/coming-from-vllm.md", "vLLM")
DEFAULTS = {flag: row.default for row in option_rows() if row.command == "serve" for flag in row.flags}


def test_defaults_that_are_told_to_users_of_another_engine_are_ours() -> None:
    cells = [row for row in MAPPED if len(row) == 3 and re.fullmatch(r"`--[\w-]+`", row[1])]
    said = [(row[1], re.match(r"(\w[\w,]*) unless given", row[2])) for row in cells]
    told = [(option, found[1].replace(",", "")) for option, found in said if found]
    assert len(told) >= 4
    for option, value in told:
        assert DEFAULTS[option.strip("`")] == value, option


@pytest.mark.parametrize("row", RUNBOOK, ids=lambda row: row[0][:60])
def test_a_code_says_where_to_look_and_what_to_do(row: list[str]) -> None:
    _, look, do = row
    assert look
    assert do


def test_the_unit_of_systemd_does_not_start_again_what_cannot_be_had() -> None:
    assert f"RestartPreventExitStatus={EXIT_SETUP}\n" in (ROOT / "docs/upgrading.md").read_text()
