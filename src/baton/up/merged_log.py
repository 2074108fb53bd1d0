"""Merges the output of several processes into one log: whole lines, each with the name of its process.

Promises that a line is never interrupted by another, and wipes what a line of progress has left on a terminal. As JSON, each
line is an object; what a process writes that is none, such as the words of a library, becomes the message of one.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

import msgspec

from baton.node.log_lines import OPERATOR, json_line, object_of

LINE_BYTES_MAX = 16 * 1024
OBJECT_BYTES_MAX = 1024 * 1024
"""Of a line that begins as an object of JSON: in pieces it would be none."""
SUPERVISOR = "baton.up"
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_DIM, _PLAIN, _WIPE = "\033[2m", "\033[0m", "\033[2K"
_MOMENT = re.compile(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d{3} ")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class LineSplitter:
    """Splits bytes into whole lines, however they were chunked. A line beyond its limit comes in pieces."""

    def __init__(self, bytes_max: int = LINE_BYTES_MAX, object_bytes_max: int = OBJECT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._object_bytes_max = object_bytes_max
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        while len(self._rest) > (most := self._object_bytes_max if self._rest.startswith(b"{") else self._bytes_max):
            whole.append(self._rest[:most])
            self._rest = self._rest[most:]
        return [_text(line) for line in whole]

    def close(self) -> list[str]:
        """The text after the last line end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return _ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r")


def _shorter(moment: re.Match[str]) -> str:
    """Keep only the time of day."""
    return f"{moment[1]} "


class MergedLog:
    """Writes whole lines to `out`, by default standard error, which must not block (`node/stderr_queue.py`)."""

    def __init__(self, names: tuple[str, ...], out: TextIO | None = None, colours: bool | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._colours = self._out.isatty() if colours is None else colours
        self._width = max(len(name) for name in names)
        self._colour_of = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}

    def line(self, name: str, text: str) -> None:
        """Log a line of a process's output."""
        if text.strip():
            self._out.write(f"{self._prefix(name)} {_MOMENT.sub(_shorter, text)}\n")

    def note(self, name: str, text: str) -> None:
        """Log an event of a process."""
        dim, plain = (_DIM, _PLAIN) if self._colours else ("", "")
        self._out.write(f"{self._prefix(name)} {dim}── {text}{plain}\n")

    def say(self, text: str) -> None:
        """Log a text of the fleet; several lines stay together."""
        self._out.write(f"{_WIPE if self._colours else ''}{text}\n")

    def _prefix(self, name: str) -> str:
        padded = f"{name:<{self._width}} │"
        return f"{_WIPE}\033[{self._colour_of.get(name, 37)}m{padded}{_PLAIN}" if self._colours else padded


class JsonMergedLog(MergedLog):
    """The same as JSON: `process` names the process."""

    def line(self, name: str, text: str) -> None:
        found = object_of(text)
        if found is not None:
            self._out.write(msgspec.json.encode(found | {"process": name}).decode() + "\n")
        elif text.strip():
            self._write(text, OPERATOR, {"process": name})

    def note(self, name: str, text: str) -> None:
        self._write(text, SUPERVISOR, {"process": name})

    def say(self, text: str) -> None:
        self._write(text, SUPERVISOR, {})

    def _write(self, text: str, logger: str, more: dict[str, object]) -> None:
        self._out.write(json_line(text, "INFO", logger, more=more) + "\n")
