"""Each command imports its own module, and not those of the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from baton.cli import bench, main, sim
from benchmarks import __main__ as benchmarks

IMPORTED = """
import sys
from baton.cli.main import app
try:
    app(sys.argv[1:])
finally:
    print("imported:", *sys.modules)
"""


def imported_by(*arguments: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.rpartition("imported:")[2].split()


def test_a_server_starts_without_benchmarks_and_simulator() -> None:
    imported = imported_by("serve", "--help")
    assert "baton.cli.serve" in imported
    assert not [name for name in imported if name.startswith(("baton.bench", "baton.sim", "baton.router", "torch"))]


@pytest.mark.parametrize(
    "command",
    [
        *((name,) for name in main.COMMANDS),
        *(("bench", name) for name in bench.COMMANDS),
        *(("sim", name) for name in sim.COMMANDS),
    ],
    ids=" ".join,
)
def test_each_is_found_under_its_name(command: tuple[str, ...]) -> None:
    ran = CliRunner().invoke(main.app, [*command, "--help"], env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert f"{' '.join(command)} [OPTIONS]" in ran.output


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    for mistaken, meant in ((["serv"], "serve"), (["bench", "calibrat"], "calibrate")):
        ran = CliRunner().invoke(main.app, mistaken)
        assert ran.exit_code == 2
        assert f"Did you mean '{meant}'" in ran.output


@pytest.mark.parametrize("name", bench.MOVED)
def test_a_benchmark_that_left_the_package_says_where_it_went(name: str) -> None:
    ran = CliRunner().invoke(main.app, ["bench", name, "--rows", "8"], prog_name="baton")
    assert ran.exit_code == 2
    assert ran.output == f"baton bench {name} has moved: run `python -m benchmarks {name}` in a checkout of the repository\n"


def test_no_benchmark_is_in_both_places() -> None:
    assert set(bench.MOVED) <= set(benchmarks.COMMANDS)
    assert not set(bench.MOVED) & set(bench.COMMANDS)
