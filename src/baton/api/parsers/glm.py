"""GLM 4.5: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`, values as JSON or as bare text."""

from __future__ import annotations

import json

from baton.api.parsers.argument_values import ArgumentTypes, ToolSchemas
from baton.api.parsers.blocks import BlockParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKERS = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)


class GlmParser(BlockParser):
    """A block that begins with the name of no tool is content."""

    def __init__(self, tools: ToolSchemas) -> None:
        types = ArgumentTypes(tools)
        super().__init__(OPEN, CLOSE, lambda block: call_in(block, types))


def call_in(block: str, types: ArgumentTypes) -> tuple[str, str] | None:
    head, *pairs = block.split(KEY)
    name = head.strip()
    if name not in types:
        return None
    arguments: dict[str, object] = {}
    for pair in pairs:
        key, end_key, rest = pair.partition(END_KEY)
        before, value, rest = rest.partition(VALUE)
        text, end_value, behind = rest.partition(END_VALUE)
        if not (end_key and value and end_value) or before.strip() or behind.strip():
            return None
        arguments[key.strip()] = types.value(name, key.strip(), text)
    return name, json.dumps(arguments)
