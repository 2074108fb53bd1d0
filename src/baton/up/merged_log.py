"""Merges the output of several processes into one log: whole lines, each prefixed with the name of its process.

Promises that a line is never interrupted by another, and that writers never block: where standard error takes nothing (a
paused terminal, a full pipe), lines beyond the queue are dropped and counted.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
from typing import TextIO

LINE_BYTES_MAX = 16 * 1024
LINES_QUEUED_MAX = 4096
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_DIM, _PLAIN = "\033[2m", "\033[0m"
_MOMENT = re.compile(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d{3} ")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class LineSplitter:
    """Splits bytes into whole lines, however they were chunked. A line beyond the limit comes in pieces."""

    def __init__(self, bytes_max: int = LINE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        while len(self._rest) > self._bytes_max:
            whole.append(self._rest[: self._bytes_max])
            self._rest = self._rest[self._bytes_max :]
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
    """A context manager: inside, a thread writes the queued lines."""

    def __init__(self, names: tuple[str, ...], out: TextIO | None = None, colours: bool | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._colours = self._out.isatty() if colours is None else colours
        self._width = max(len(name) for name in names)
        self._colour_of = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_QUEUED_MAX)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="baton-up-log", daemon=True)

    def __enter__(self) -> MergedLog:
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=1.0)
        self._writer.join(timeout=2.0)  # a reader that takes nothing does not block the exit: the thread is a daemon

    def line(self, name: str, text: str) -> None:
        """Log a line of a process's output."""
        if text.strip():
            self._put(f"{self._prefix(name)} {_MOMENT.sub(_shorter, text)}\n")

    def note(self, name: str, text: str) -> None:
        """Log an event of a process."""
        dim, plain = (_DIM, _PLAIN) if self._colours else ("", "")
        self._put(f"{self._prefix(name)} {dim}── {text}{plain}\n")

    def say(self, text: str) -> None:
        """Log a text of the fleet; several lines stay together."""
        self._put(text + "\n")

    def _prefix(self, name: str) -> str:
        padded = f"{name:<{self._width}} │"
        return f"\033[{self._colour_of.get(name, 37)}m{padded}{_PLAIN}" if self._colours else padded

    def _put(self, text: str) -> None:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def _write_all(self) -> None:
        while (text := self._lines.get()) is not None:
            if self._dropped:
                lost, self._dropped = self._dropped, 0
                text += f"({lost} lines were dropped: nobody read them)\n"
            try:
                self._out.write(text)
                self._out.flush()
            except OSError:
                return  # the reader has closed the pipe
