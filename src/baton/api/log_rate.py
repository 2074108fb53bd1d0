"""Decides which of many equal log lines are written: the first of a kind at once, then few in a while, with a count.

What a stranger can cause must not fill a disk. Has no clock and no logger.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS_MAX = 64
"""Kinds are named by code, not by clients; further ones are counted as one."""
OTHERS = "others"


@dataclass(slots=True)
class _Window:
    begun_s: float
    written: int = 1
    left_out: int = 0
    latest: str = ""


class LogRate:
    """At most `lines` lines of a kind in `every_s`; the others are counted, and a later line tells the count."""

    def __init__(self, lines: int = 1, every_s: float = 10.0) -> None:
        self._lines = lines
        self._every_s = every_s
        self._windows: dict[str, _Window] = {}

    def take(self, kind: str, now_s: float, line: str = "") -> int | None:
        """How many of its kind were left out before a line that is to be written; None: it is left out, and counted."""
        if kind not in self._windows and len(self._windows) >= KINDS_MAX:
            kind = OTHERS
        window = self._windows.get(kind)
        if window is None or now_s - window.begun_s >= self._every_s:
            self._windows[kind] = _Window(now_s)
            return 0 if window is None else window.left_out
        if window.written < self._lines:
            window.written += 1
            return 0
        window.left_out += 1
        window.latest = line
        return None

    def due(self, now_s: float) -> list[tuple[str, int]]:
        """Of windows that are over and left something out: the latest line, and how many others. Ask now and then."""
        over = [kind for kind, window in self._windows.items() if now_s - window.begun_s >= self._every_s]
        lines = []
        for kind in over:
            window = self._windows.pop(kind)
            if window.left_out:
                lines.append((window.latest, window.left_out - 1))
                self._windows[kind] = _Window(now_s)
        return lines
