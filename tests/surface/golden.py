"""The golden file of what users hold, and how a list differs from it."""

from __future__ import annotations

import difflib
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden.txt"


def difference(found: list[str]) -> list[str]:
    """Lines that were lost (-) or are new (+)."""
    held = GOLDEN.read_text().splitlines()
    return [line for line in difflib.unified_diff(held, found, n=0, lineterm="") if line[0] in "+-"][2:]
