"""Commands that need torch, where none is installed: one line and what to do, exit code 2. Others do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_MAX = 120
ABSENT = "import sys\nsys.modules['torch'] = None\n"
"""Makes torch look as if it were not installed, to this process and its children."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds no torch."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "BATON_CACHE": str(tmp_path / "cache"), "COLUMNS": "300"}


def _run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ("baton", "serve", "--port", "0"),
        ("baton", "up", "--router-port", "0"),
        ("baton", "bench", "gpu"),
        ("baton.bench.gpu",),
    ],
    ids=" ".join,
)
def test_a_command_that_needs_torch_says_how_to_get_it(words: tuple[str, ...], bare: dict[str, str]) -> None:
    done = _run(bare, *words)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "torch is not installed" in said
    assert "install selector" in said
    assert "pip install 'baton-serve[cuda]'" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 3
    assert not Path(bare["BATON_CACHE"], "models").exists(), "no model is fetched for nothing"


def test_help_and_a_simulated_cluster_need_no_torch(bare: dict[str, str]) -> None:
    assert _run(bare, "baton", "serve", "--help").returncode == 0
    assert _run(bare, "baton", "sim", "fuzz", "--seeds", "1").returncode == 0
