"""A server and a command that removes models from the cache agree on what is there."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.node import model_cache
from baton.node.model_cache import USED, ModelCacheError, used_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    folder = tmp_path / "models" / "m-1"
    folder.mkdir(parents=True)
    (folder / USED).touch()
    return folder


@pytest.mark.parametrize("becomes", [shutil.rmtree, lambda folder: folder.rename(folder.with_name(".making-removed"))])
def test_a_model_that_is_removed_while_its_lock_is_waited_for_is_not_taken_for_held(
    model: Path, monkeypatch: pytest.MonkeyPatch, becomes: Callable[[Path], object]
) -> None:
    remover = os.open(model / USED, os.O_RDWR)
    fcntl.flock(remover, fcntl.LOCK_EX)

    def removed_meanwhile(seconds: float) -> None:
        becomes(model)
        os.close(remover)

    monkeypatch.setattr(time, "sleep", removed_meanwhile)
    with pytest.raises(ModelCacheError, match="was removed from the cache just now"), used_model(model):
        pass


def test_a_lock_that_is_free_again_is_taken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lister = os.open(model / USED, os.O_RDWR)
    fcntl.flock(lister, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(lister))
    with used_model(model):
        (found,) = model_cache.cached_models()
        assert found.is_used
