"""Two calls in the form of each family, as a model writes them."""

from __future__ import annotations

from baton.api.parsers.argument_values import ToolSchemas

TOOLS: ToolSchemas = {
    "look_up": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": None,
}
CALLS = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>',
    "llama3-json": '<|python_tag|>{"name": "look_up", "parameters": {"city": "Paris"}}; '
    '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "look_up", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"a": 1}}]',
    "pythonic": '[look_up(city="Paris"), add(a=1)]',
    "deepseek": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "glm": "Let me see.\n<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "qwen3-coder": "Let me see.\n<tool_call>\n<function=look_up>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>\n"
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "gpt-oss": "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.look_up "
    '<|constrain|>json<|message|>{"city": "Paris"}<|call|><|start|>assistant to=functions.add<|channel|>commentary'
    '<|message|>{"a": 1}<|call|>',
}
