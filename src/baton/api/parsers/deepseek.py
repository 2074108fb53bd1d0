"""DeepSeek V3 and R1: calls between markers of their own, the arguments as JSON, in a code block or bare."""

from __future__ import annotations

import json
from collections.abc import Collection

from baton.api.parsers.blocks import BlockParser

OPEN, CLOSE, BETWEEN = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
MARKERS = (OPEN, CLOSE, BETWEEN, *AROUND)
FENCE = "```"


class DeepSeekParser(BlockParser):
    def __init__(self, tools: Collection[str]) -> None:  # noqa: ARG002  a name that is no tool's is the client's to judge
        super().__init__(OPEN, CLOSE, call_in, AROUND)


def call_in(block: str) -> tuple[str, str] | None:
    """`function<sep>name` and a code block (V3, R1), or `name<sep>{…}` (V3.1)."""
    first, between, second = block.partition(BETWEEN)
    if not between:
        return None
    name, fence, fenced = second.strip().partition(FENCE + "json")
    if not fence:
        return _checked(first.strip(), second.strip())
    return _checked(name.strip(), fenced.removesuffix(FENCE).strip())


def _checked(name: str, arguments: str) -> tuple[str, str] | None:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return (name, arguments) if name else None
