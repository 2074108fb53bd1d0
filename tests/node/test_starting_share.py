"""The processor share of a starting process, read back from the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.node.starting_share import AUTOGROUP, STARTING_NICE

SHOW = """
from baton.node.starting_share import AUTOGROUP, full_share, lower_share

def show():
    print(AUTOGROUP.read_text().rsplit(maxsplit=1)[-1])

show(); lower_share(); show(); full_share(); show()
"""
BELOW = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-P', '-c', {SHOW!r}]).returncode)"
"""A child of the session's leader. (The session of the tests themselves may have no share to read.)"""

pytestmark = pytest.mark.skipif(not AUTOGROUP.exists(), reason="needs a Linux kernel with autogroups")


def shares(program: str) -> list[int]:
    """What PROGRAM, the leader of a session, prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_the_leader_of_a_session_starts_with_a_lower_share_and_serves_with_all_of_it() -> None:
    assert shares(SHOW) == [0, STARTING_NICE, 0]


def test_a_process_in_the_session_of_another_changes_nothing() -> None:
    assert shares(BELOW) == [0, 0, 0]
