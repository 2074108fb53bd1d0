"""Paths as a user writes them: `~` is their home folder, `~name` that of another user."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import SetupError


def expanded(path: str, refusal: type[SetupError]) -> Path:
    """The path with the home folder in its place. Raises `refusal` where nobody knows that folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise refusal(f"{path!r} begins with a home folder that is not known here: write the whole path") from None
