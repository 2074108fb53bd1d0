"""The stages of a start on a terminal: one line with a bar and the seconds, replaced at its end by what the stage took.

       7.2 s  ━━━━━━━━━╺━━━━━━━━━━  43 of 93 MB  fetching the package …

The bar fills where it is known how much there is to do, else it moves. The line ends with a carriage return, so that what
others write meanwhile overwrites it instead of being appended to it.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.progress_bar import ProgressBar

from baton.node.stage_progress import StageProgress

TICK_S = 0.25
BAR_COLUMNS = 20
COLUMNS_LEAST = 60
"""A narrower terminal has no room for a bar beside the words."""
_WIPE, _DIM, _PLAIN = "\033[2K", "\033[2m", "\033[0m"


class LiveStages:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._console = Console(file=self._out, force_terminal=True, width=BAR_COLUMNS)
        self._stage = ""
        self._progress: StageProgress | None = None
        self._since_s = 0.0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def began(self, stage: str, at_s: float) -> None:  # noqa: ARG002
        with self._lock:
            self._stage, self._progress, self._since_s = stage, None, time.monotonic()
        self._show()
        if self._thread is None:
            self._thread = threading.Thread(target=self._tick, name="baton-stages", daemon=True)
            self._thread.start()

    def advanced(self, progress: StageProgress) -> None:
        """Shown when the line is written next."""
        with self._lock:
            self._progress = progress

    def ended(self, stage: str, took_s: float) -> None:
        with self._lock:
            self._stage = ""
            self._out.write(f"{_WIPE}{_DIM}{took_s:6.1f} s  {stage}{_PLAIN}\n")

    def close(self) -> None:
        self._is_over.set()
        with self._lock:
            if self._stage:
                self._stage = ""
                self._out.write(_WIPE)

    def _tick(self) -> None:
        while not self._is_over.wait(TICK_S):
            self._show()

    def _show(self) -> None:
        with self._lock:
            if self._stage and not self._is_over.is_set():
                self._out.write(f"{_WIPE}{self._line(time.monotonic() - self._since_s)}\r")

    def _line(self, seconds: float) -> str:
        """Never longer than one line of the terminal."""
        columns = shutil.get_terminal_size().columns - 1
        time_text, words = f"{seconds:6.1f} s  ", f"{self._stage} …"
        if self._progress is not None:
            words = f"{self._progress}  {words}"
        if columns < COLUMNS_LEAST:
            return f"{_DIM}{(time_text + words)[:columns]}{_PLAIN}"
        rest = columns - len(time_text) - BAR_COLUMNS - 2
        return f"{_DIM}{time_text}{_PLAIN}{self._bar(seconds)}  {_DIM}{words[:rest]}{_PLAIN}"

    def _bar(self, seconds: float) -> str:
        done, total = (0, None) if self._progress is None else (self._progress.done, self._progress.total)
        with self._console.capture() as written:
            # Padded, because without colours nothing is drawn of what is not done.
            self._console.print(Padding(ProgressBar(total, done, width=BAR_COLUMNS, animation_time=seconds), 0))
        return written.get().rstrip("\n") or " " * BAR_COLUMNS
