"""Qwen3-Coder: `<tool_call><function=name><parameter=k>v</parameter>…</function></tool_call>`, values as bare text.

The outer markers may be missing, and the end of a parameter too: the next line that begins a parameter, or the end of the
call, ends it then. Values are often source code, in which markers may stand: a call ends where the end of a parameter stands
before, or the end of the outer markers behind; a parameter begins behind the end of another.
"""

from __future__ import annotations

import json
import re

from baton.api.parsers.argument_values import ArgumentTypes, ToolSchemas
from baton.api.parsers.blocks import BlockParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MARKERS = (OPEN, CLOSE)
LOOK = 64
"""Characters around the end of a call in which the end of a parameter, or of the outer markers, is looked for."""
_NEXT = re.compile(rf"(?:\A|(?<={END_PARAMETER}))\s*{PARAMETER}")


class Qwen3CoderParser(BlockParser):
    """A block that begins with the name of no tool is content."""

    def __init__(self, tools: ToolSchemas) -> None:
        types = ArgumentTypes(tools)
        super().__init__(FUNCTION, END_FUNCTION, lambda block: call_in(block, types), ignored=(OPEN, CLOSE))

    def _is_end(self, at: int) -> bool | None:
        text, end = self._text, at + len(END_FUNCTION)
        before, behind = text[max(0, at - LOOK) : at], text[end : end + LOOK].lstrip()
        if text.find(PARAMETER, 0, at) < 0 or before.rstrip().endswith(END_PARAMETER) or behind.startswith(CLOSE):
            return True
        return None if CLOSE.startswith(behind) and len(text) < end + LOOK else False


def call_in(block: str, types: ArgumentTypes) -> tuple[str, str] | None:
    """Of a call that was cut short, what there is."""
    name, end, rest = block.partition(">")
    if name not in types or not end:
        return None
    rest = rest.rstrip().removesuffix(CLOSE).rstrip().removesuffix(END_FUNCTION).rstrip()
    first, *pairs = _NEXT.split(rest)
    if first.strip():
        return None
    arguments: dict[str, object] = {}
    for pair in (part for whole in pairs for part in _parts_without_ends(whole)):
        key, end, text = pair.partition(">")
        if not end:
            return None
        value = text.removesuffix(END_PARAMETER).removeprefix("\n").removesuffix("\n")
        arguments[key] = types.value(name, key, value)
    return name, json.dumps(arguments)


def _parts_without_ends(pair: str) -> list[str]:
    """Parameters of which all but the last have no end."""
    return [pair] if pair.endswith(END_PARAMETER) else pair.split(f"\n{PARAMETER}")
