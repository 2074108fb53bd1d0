"""A short `baton chaos`: kills, stops, drains and restarts under load, and not one answer differs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = os.environ.get("BATON_TEST_FAULTS", "6")
SEED = os.environ.get("BATON_TEST_SEED", "1")


@pytest.mark.slow
def test_answers_survive_what_happens_to_instances() -> None:
    command = (
        sys.executable, "-m", "baton", "chaos", "--executor", "scripted", "--step-ms", "10",
        "--prefill", "1", "--decode", "2", "--suspect-after", "2",  # a busy machine is no fault
        "--faults", FAULTS, "--requests", "60", "--cases", "24", "--concurrency", "6", "--seed", SEED, "--minutes-max", "5",
    )  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"chaos: {FAULTS} faults" in run.stdout


@pytest.mark.slow
@pytest.mark.timed
def test_nobody_is_suspected_under_load_to_which_nothing_was_done() -> None:
    """At the default limits of suspicion, for twenty seconds."""
    command = (
        sys.executable, "-m", "baton", "chaos", "--executor", "scripted", "--step-ms", "10",
        "--prefill", "1", "--decode", "2", "--calm", "0.33", "--requests", "60", "--cases", "24",
    )  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 faults" in run.stdout
