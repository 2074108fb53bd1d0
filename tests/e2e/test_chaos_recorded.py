"""A short `baton chaos --record`: every file, also of a process that was killed, replays to the same decisions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.wire.recording_file import Recording
from baton.wire.replaying import Replay

PROCESSES = 4
FAULTS = 4


@pytest.mark.slow
def test_a_fleet_with_faults_replays_to_the_same_decisions(tmp_path: Path) -> None:
    command = (
        sys.executable, "-m", "baton", "chaos", "--executor", "scripted", "--step-ms", "10",
        "--prefill", "1", "--decode", "2", "--suspect-after", "2", "--record", str(tmp_path),
        "--faults", str(FAULTS), "--requests", "40", "--cases", "12", "--concurrency", "4", "--minutes-max", "5",
    )  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    files, decisions = sorted(tmp_path.iterdir()), 0
    assert len(files) > PROCESSES, "some process had a second life"
    for file in files:
        for call in Replay(Recording(file.read_bytes()), with_laws=False).steps():
            assert call.difference is None, f"{file.name}, decision {call.number}: {call.difference}"
            decisions += 1
    assert decisions > 1000
