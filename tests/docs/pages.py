"""README.md, ARCHITECTURE.md and the pages of docs/, taken apart: fenced blocks with their marks, and code inside of lines.

A block of commands may have a mark in the line above it, which a reader of the rendered page does not see:

    <!-- not run: WHY -->          its commands are only held against the parser
    <!-- run with a server -->     its commands or its Python are run beside a server that has no model

Commands of a block without a mark are run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)$")
MARK = re.compile(r"^<!-- (.+) -->$")
LANGUAGES = frozenset({"", "ini", "json", "python", "sh", "text", "toml", "yaml"})
"""Of blocks: each is checked somewhere, or has nothing that could be run."""
SEPARATORS = frozenset({"|", "&&", ";"})


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    mark: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Span:
    """Code inside of a line."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} `{self.text}`"


def page_names() -> list[str]:
    pages = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", "ARCHITECTURE.md", *pages]


def written_pages() -> list[str]:
    """Those that are written by hand: what is generated is held against its source elsewhere."""
    return [page for page in page_names() if not page.startswith("docs/reference/")]


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    blocks, lines = list[Block](), read(page).splitlines()
    begin: int | None = None
    for at, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and begin is None:
            begin = at
        elif fence and begin is not None:
            above = MARK.match(lines[begin - 1]) if begin else None
            language = lines[begin].removeprefix("```")
            blocks.append(Block(page, begin + 1, language, above[1] if above else None, "\n".join(lines[begin + 1 : at])))
            begin = None
    assert begin is None, f"{page}: a block has no end"
    return tuple(blocks)


def prose_of(page: str) -> str:
    """The page without its blocks, line by line as it was."""
    lines, inside = list[str](), False
    for line in read(page).splitlines():
        fence = FENCE.match(line) is not None
        lines.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(lines)


def spans_of(page: str) -> Iterator[Span]:
    for number, line in enumerate(prose_of(page).splitlines(), start=1):
        for text in re.findall(r"`([^`]+)`", line):
            yield Span(page, number, text)


def blocks(language: str) -> list[Block]:
    return [block for page in written_pages() for block in blocks_of(page) if block.language == language]


def lines_of(block: Block) -> list[str]:
    """Its command lines, those that go over several lines as one."""
    whole, lines = "", list[str]()
    for line in block.text.splitlines():
        whole = f"{whole}\n{line}" if whole else line
        try:
            words = _words(whole)
        except ValueError:
            continue  # a quote is open
        if words:
            lines.append(whole)
        whole = ""
    assert not whole, f"{block}: a quote has no end"
    return lines


def _words(line: str) -> list[str]:
    """A semicolon is a word; a line that ends with a backslash goes on."""
    reader = shlex.shlex(re.sub(r"\\\n\s*", "", line), posix=True, punctuation_chars=";")
    reader.whitespace_split = True
    return list(reader)


def commands_of(line: str) -> list[list[str]]:
    """The words of each command of a line, without what is redirected. A loop is its body, for the first of its words."""
    commands: list[list[str]] = [[]]
    words = iter(_words(line))
    for word in words:
        if word in SEPARATORS:
            commands.append([])
        elif word == ">":
            next(words)
        else:
            commands[-1].append(word)
    return _unrolled(commands)


def _unrolled(commands: list[list[str]]) -> list[list[str]]:
    plain: list[list[str]] = []
    variable, value = "", ""
    for words in commands:
        match words:
            case ["for", name, "in", first, *_]:
                variable, value = f"${name}", first
            case ["done"]:
                variable, value = "", ""
            case ["do", *body]:
                plain.append([value if word == variable else word for word in body])
            case _:
                plain.append([value if variable and word == variable else word for word in words])
    return plain
