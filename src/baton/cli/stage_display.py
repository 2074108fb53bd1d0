"""The stages of a start on a terminal: one line that counts the seconds, replaced by what the stage took when it has ended.

The line ends with a carriage return, so that what others write meanwhile overwrites it instead of being appended to it.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

TICK_S = 0.25
_WIPE, _DIM, _PLAIN = "\033[2K", "\033[2m", "\033[0m"


class LiveStages:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._stage = ""
        self._since_s = 0.0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def began(self, stage: str, at_s: float) -> None:  # noqa: ARG002
        with self._lock:
            self._stage, self._since_s = stage, time.monotonic()
        self._show()
        if self._thread is None:
            self._thread = threading.Thread(target=self._tick, name="baton-stages", daemon=True)
            self._thread.start()

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
                seconds = time.monotonic() - self._since_s
                text = f"{seconds:6.1f} s  {self._stage} …"[: shutil.get_terminal_size().columns - 1]  # never two lines
                self._out.write(f"{_WIPE}{_DIM}{text}{_PLAIN}\r")
