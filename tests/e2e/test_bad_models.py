"""`baton serve` with a broken model, or with what cannot be had of a sound one: one line, and the code that says that
starting again does not help."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.errors import EXIT_SETUP
from tests.support.broken_models import FOUND_BY_LOADING, FOUND_IN_FILES, BrokenModel
from tests.support.server import baton_process, refused_by_serve

SLOW_TO_FIND = pytest.mark.slow
WITHOUT_LOADING = ("hub name", "config no JSON", "weights cut off", "GGUF random")
"""Those that a real process is given too in the quick tests."""


@pytest.fixture
def copy(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny, tmp_path / "m"))


def said_by_serve(*arguments: str) -> str:
    """The only line that a real `baton serve` writes, beside what it is about to do."""
    command = [sys.executable, "-m", "baton", "serve", *arguments, "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if not re.match(r"\[ *\d|.* INFO ", line)]
    assert (done.returncode, done.stdout) == (EXIT_SETUP, ""), done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("baton serve: ")
    return lines[0]


@pytest.mark.parametrize("broken", FOUND_IN_FILES.values(), ids=FOUND_IN_FILES)
def test_a_broken_model_ends_with_one_line(copy: Path, broken: BrokenModel, capfd: pytest.CaptureFixture[str]) -> None:
    status, output = refused_by_serve(str(broken.break_it(copy)))
    lines = (output + capfd.readouterr().err).splitlines()
    assert status == EXIT_SETUP
    assert len(lines) == 1, lines
    assert_line(lines[0], broken)


def assert_line(line: str, broken: BrokenModel) -> None:
    assert line.startswith("baton serve: ")
    assert re.search(broken.said, line), line


@pytest.mark.parametrize("case", WITHOUT_LOADING)
def test_a_real_process_says_nothing_else(copy: Path, case: str) -> None:
    broken = FOUND_IN_FILES[case]
    assert_line(said_by_serve(str(broken.break_it(copy))), broken)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "tensor missing" else SLOW_TO_FIND) for case in FOUND_BY_LOADING]
)
def test_what_only_loading_finds_is_one_line_too(copy: Path, case: str) -> None:
    broken = FOUND_BY_LOADING[case]
    assert_line(said_by_serve(str(broken.break_it(copy))), broken)


def test_a_debug_log_has_the_traceback(copy: Path) -> None:
    FOUND_IN_FILES["weights cut off"].break_it(copy)
    with baton_process("serve", str(copy), "--port", "0", "--log-level", "debug", wait=False) as server:
        assert server.process.wait(60) == EXIT_SETUP
        assert "BadWeights" in server.output()
        assert "Traceback" in server.output()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-model-len", "2000"), r"--max-model-len 2000 is more than the 1024 positions .* give at most 1024"),
        (("--chat-template", "/nowhere.jinja"), r"chat template /nowhere\.jinja cannot be read: No such file"),
        (("--chat-template", "{% if %}"), r"--chat-template does not parse, line 1"),
        pytest.param(
            ("--kv-memory", "1K"), r"--kv-memory 1024 has no room for one block .* at least \d+", marks=SLOW_TO_FIND
        ),
        pytest.param(("--kv-memory", "900T"), r"--kv-memory \d+ is more than there is; at most \d+", marks=SLOW_TO_FIND),
    ],
)
def test_what_a_sound_model_cannot_be_served_with_is_one_line(tiny: Path, options: tuple[str, ...], said: str) -> None:
    assert re.search(said, said_by_serve(str(tiny), *options))


@pytest.mark.slow
def test_a_context_that_the_pool_cannot_hold_is_warned_of_and_served(tiny: Path) -> None:
    options = ("--max-model-len", "1000", "--kv-blocks", "4", "--device", "cpu", "--port", "0")
    with baton_process("serve", str(tiny), *options) as server:
        (line,) = [line for line in server.output().splitlines() if " WARNING " in line]
    assert re.search(
        r"holds sequences of 64 tokens, and --max-model-len is 1000: .* --kv-memory \d+ holds the longest", line
    )


def said_by_up(model: Path, *more: str) -> list[str]:
    """What `baton up` says where it must end for good."""
    options = ("--mixed", "2", "--router-port", "0", "--device", "cpu", *more)
    with baton_process("up", str(model), *options, wait=False) as fleet:
        assert fleet.process.wait(120) == EXIT_SETUP
        return fleet.output().splitlines()


def test_a_fleet_of_a_broken_model_is_not_started(copy: Path) -> None:
    broken = FOUND_IN_FILES["shard missing"]
    (line,) = said_by_up(broken.break_it(copy))
    assert line.startswith("baton up: ")
    assert re.search(broken.said, line)


@pytest.mark.slow
def test_a_fleet_gives_up_at_once_on_what_cannot_be_had_of_a_model(tiny: Path) -> None:
    lines = said_by_up(tiny, "--max-model-len", "2000")
    (line,) = [line for line in lines if "--max-model-len 2000" in line]
    assert line == lines[-1]
    assert line.startswith("baton up: --max-model-len 2000 is more than the 1024 positions")
    assert not [line for line in lines if "started again" in line]


@pytest.mark.slow
def test_a_fleet_gives_up_at_once_on_what_its_instances_find(copy: Path) -> None:
    broken = FOUND_BY_LOADING["tensor missing"]
    lines = said_by_up(broken.break_it(copy))
    assert sum(bool(re.search(broken.said, line)) for line in lines) == 1
    assert lines[-1].startswith("baton up: ")
    assert not [line for line in lines if "started again" in line]
