from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from tests.api.conftest import eventually, every_server_ends, text
from tests.router.fleet import Fleet
from tests.router.fleet import fleet as running

__all__ = ["eventually", "every_server_ends", "fleet", "text"]

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def fleet(text: ModelText) -> Iterator[Fleet]:
    with running(text, ApiSettings(served_model_names=("tiny",))) as made:
        yield made
