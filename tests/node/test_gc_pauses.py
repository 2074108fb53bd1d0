"""A collection skips the objects that existed when serving began."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from baton.node.gc_pauses import freeze_gc


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_what_was_loaded_is_not_looked_at_again() -> None:
    loaded = [[number] for number in range(1000)]
    freeze_gc()
    assert gc.get_freeze_count() >= len(loaded)
    assert len(gc.get_objects()) < len(loaded)
