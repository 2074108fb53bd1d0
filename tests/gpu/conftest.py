"""What is marked `cuda` is skipped, and says why, where there is no device."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda") is not None]
    if marked and (reason := _why_not()) is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"
