"""Whether a chat template can be compiled: found out at the start, not at the first chat.

The environment has the same syntax as the one of `transformers`, which renders: its `generation` blocks and the statements
`break` and `continue`. Nothing is run.
"""

from __future__ import annotations

from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import SetupError


class BadTemplate(SetupError):
    """The chat template is missing or cannot be compiled; the message names file and line."""


class _GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks what the model writes."""

    tags = {"generation"}  # noqa: RUF012  a set of the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(template: str | Path) -> str:
    """A path is read; a string is a path if it has no template syntax in it."""
    if isinstance(template, str) and ("{{" in template or "{%" in template):
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except OSError as error:
        raise BadTemplate(f"the chat template {template} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadTemplate(f"the chat template {template} is no text in UTF-8") from None


def check_template(text: str, where: str) -> None:
    """Raises BadTemplate unless the template can be compiled. `where`: the file, as the operator knows it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, LoopControlExtension]
    )
    try:
        environment.compile(text)
    except jinja2.TemplateSyntaxError as error:  # also of a filter or test that does not exist
        raise BadTemplate(f"the chat template {where} does not parse, line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise BadTemplate(f"the chat template {where} is nested too deeply") from None
