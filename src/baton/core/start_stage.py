"""The name of what a process does at its start, such as "loading the weights": it begins with its verb, in one word."""

from __future__ import annotations

from collections.abc import Callable

OnStage = Callable[[str], None]
"""Called when a stage begins, which ends the one before."""


def no_stages(_: str) -> None:
    """For callers that need not know."""
