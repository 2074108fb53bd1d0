"""The help of a command with many options: each name whole at any width, by panel, with what it does beside or below it."""

from __future__ import annotations

import re
from typing import Any

from rich.markup import render
from typer.core import TyperCommand

OPTIONS, ARGUMENTS = "Options", "Arguments"
WIDTH_MAX = 110
_TEXT, _NUMBER = re.compile(r"<(list\[)?str\]?>"), re.compile(r"<(int|float)( range)?>")


class ListedCommand(TyperCommand):
    """Typer's own help is a table, which cuts names off where the terminal is narrow."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self._format_text(formatter)
        self.format_options(ctx, formatter)

    def _format_text(self, formatter: Any) -> None:
        for paragraph in render(self.help or "").plain.split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                for line in paragraph.splitlines() if ";\n" in paragraph else [" ".join(paragraph.split())]:
                    formatter.write_text(line.strip())

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            shown = parameter.get_help_record(ctx)
            if shown is not None:
                usual = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
                panel = getattr(parameter, "rich_help_panel", None) or usual
                panels.setdefault(panel, []).append((_NUMBER.sub("N", _TEXT.sub("TEXT", shown[0])), shown[1]))
        for panel, options in panels.items():
            with formatter.section(panel):
                formatter.write_dl(options, col_max=30)
