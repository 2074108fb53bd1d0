"""The tiny model, and one server of it that prefills and decodes, for all files here: to start another takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bench.tiny_model import make_tiny
from tests.support.server import ServerProcess, baton_serve


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose answers depend on no batch: it computes in float64."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_options(tiny: Path) -> tuple[str, ...]:
    return (str(tiny), "--dtype", "float64", "--threads", "1", "--served-model-name", "m")


@pytest.fixture(scope="session")
def plain_tiny(tiny_options: tuple[str, ...]) -> Iterator[ServerProcess]:
    """Prefills and decodes, guesses nothing, has room for everything."""
    with baton_serve(
        *tiny_options, "--kv-memory", "64M", "--max-num-seqs", "16", "--max-num-batched-tokens", "48"
    ) as server:
        yield server
