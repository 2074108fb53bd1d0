"""Steps of tests that count what each yields: no row sits out, however busy the machine is."""

from __future__ import annotations

import pytest

from baton.executor.constraints import slot_matchers

LONG_S = 60.0


def wait_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRACE_S", "POLL_S", "ALONE_S"):
        monkeypatch.setattr(slot_matchers, name, LONG_S)
