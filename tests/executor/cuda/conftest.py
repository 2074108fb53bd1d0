"""The interpreter takes milliseconds for what a device does in nanoseconds: tiny models have two layers here, not three."""

from __future__ import annotations

import pytest
from tests.support.masks import wait_for_masks

from baton.executor.model_shapes import SHAPES


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in SHAPES if name.startswith("tiny-")]:
        monkeypatch.setitem(SHAPES, name, {**SHAPES[name], "num_hidden_layers": 2})


@pytest.fixture(autouse=True)
def _masks_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_masks(monkeypatch)
