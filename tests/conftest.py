"""Where there is no GPU, kernels run in Triton's interpreter, which must be chosen before anything imports `triton`.

And what a command sets up of the log is gone with its test: its standard error is. Property tests have no limits of time: a
busy machine says nothing of the code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    ours, access = logging.getLogger("baton"), logging.getLogger("baton.access")
    before = ours.handlers[:], ours.propagate, ours.level, access.level
    yield
    ours.handlers[:], ours.propagate = before[0], before[1]
    ours.setLevel(before[2])
    access.setLevel(before[3])
