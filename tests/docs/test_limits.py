"""Limits that pages give as numbers are those of the code, and what messages say to install can be installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from baton.api.constraints.schema_writer import OPEN_NAMES_MAX
from baton.executor.constraints.compiled_cache import COMPILED_MAX
from baton.node.constraint_worker import MEMORY_BYTES, TRIED_TOKENS
from baton.node.constraint_workers import CPU_S_MAX

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("security.md", f"each in {CPU_S_MAX:g} s of processor time and {MEMORY_BYTES >> 20} MiB"),
        ("structured-output.md", f"may take {CPU_S_MAX:g} s of CPU time and {MEMORY_BYTES >> 20} MiB"),
        ("structured-output.md", f"({COMPILED_MAX} constraints are kept"),
        ("structured-output.md", f"the first {TRIED_TOKENS} tokens of two answers"),
        ("structured-output.md", f"At most {OPEN_NAMES_MAX} declared names"),
        ("design/constraints.md", f"found among the last {COMPILED_MAX},"),
    ],
)
def test_a_page_gives_the_limit_of_the_code(page: str, words: str) -> None:
    assert words in (ROOT / "docs" / page).read_text()


def test_extras_that_messages_name_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        (path.name, found)
        for path in sorted((ROOT / "src").rglob("*.py"))
        for found in re.findall(r"pip install '?([\w.-]+)\[(\w+)\]", path.read_text())
    ]
    assert named
    for path, (package, extra) in named:
        assert package in (project["name"], "."), path
        assert extra in project["optional-dependencies"], path
