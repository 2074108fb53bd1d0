"""A start collects nothing, and a collection skips the objects that existed when serving began."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from baton.node.gc_pauses import freeze_gc, without_gc


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


@pytest.mark.usefixtures("thawed")
def test_a_start_collects_nothing_until_everything_is_loaded() -> None:
    with without_gc():
        assert not gc.isenabled()
        freeze_gc()
        assert gc.isenabled()
    assert gc.isenabled()


def test_a_start_that_fails_leaves_collecting_on() -> None:
    with pytest.raises(KeyError), without_gc():
        raise KeyError
    assert gc.isenabled()
