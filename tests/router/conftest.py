from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from tests.api.conftest import every_server_ends, text
from tests.router.fleet import Fleet
from tests.router.fleet import fleet as running

__all__ = ["every_server_ends", "fleet", "text"]


@pytest.fixture
def fleet(text: ModelText) -> Iterator[Fleet]:
    with running(text, ApiSettings(served_model_names=("tiny",))) as made:
        yield made
