"""A short `benchmarks soak`: aborts, half bodies, wrong keys, kills; every process reaches a plateau, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUESTS = os.environ.get("BATON_TEST_SOAK_REQUESTS", "3000")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_many_requests_and_kills_leave_nothing_behind(tmp_path: Path) -> None:
    told = tmp_path / "soak.json"
    command = (
        sys.executable, "-m", "benchmarks", "soak", "--requests", REQUESTS, "--kills", "2", "--no-flight-recorder",
        "--json", str(told),
    )  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(told.read_text())
    assert report["kills"] == 2
    assert sum(report["sent"].values()) == int(REQUESTS)
    assert all(count > 0 for count in report["sent"].values())
    for process in report["processes"]:
        assert process["resident"][-1] < 1.05 * process["resident"][-2], process
        assert process["descriptors_after"] <= process["descriptors_before"], process
