"""Standard error that never blocks: a thread writes it, from a queue of bounded size.

A pipe that nobody reads takes 64 KiB; the next write to it waits, and with it the event loop. `queue_stderr` therefore puts
a stream in the place of `sys.stderr` which only queues: log records, tracebacks, warnings and lines for the operator all
pass through it. What finds no room is dropped and counted, and a line in its place says how much is missing.

Libraries that write to the file descriptor themselves are not covered.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from collections import deque

from baton.node.log_lines import OPERATOR, json_line
from baton.node.settings import LogFormat

QUEUED_CHARS_MAX = 1 << 18
WRITE_CHARS_MAX = 1 << 16
EXIT_S_MAX = 1.0
"""Seconds that the end of the process waits for queued lines to be taken."""


class LineQueue:
    """Text in the order it came, at most `chars_max` characters of it. Notices of what was dropped come on top of that."""

    def __init__(self, chars_max: int = QUEUED_CHARS_MAX, log_format: LogFormat = LogFormat.TEXT) -> None:
        self._chars_max = chars_max
        self._log_format = log_format
        self._pieces: deque[str] = deque()
        self._chars = 0
        self._missing = 0
        self.dropped = 0
        """Lines dropped since the start."""

    def put(self, text: str) -> None:
        if self._chars + len(text) > self._chars_max:
            lines = max(1, text.count("\n"))
            self._missing += lines
            self.dropped += lines
            return
        self._note_missing()
        self._pieces.append(text)
        self._chars += len(text)

    def take(self, chars_max: int = WRITE_CHARS_MAX) -> str:
        """The oldest pieces, at least one; empty when there is nothing to write."""
        if not self._pieces:
            self._note_missing()
        taken: list[str] = []
        chars = 0
        while self._pieces and (not taken or chars + len(self._pieces[0]) <= chars_max):
            piece = self._pieces.popleft()
            taken.append(piece)
            chars += len(piece)
        self._chars -= chars
        return "".join(taken)

    def __bool__(self) -> bool:
        """Whether there is something to write."""
        return bool(self._pieces) or self._missing > 0

    def _note_missing(self) -> None:
        if self._missing:
            notice = f"{self._missing} log lines dropped: nobody read them"
            notice = (json_line(notice, "WARNING", OPERATOR) if self._log_format is LogFormat.JSON else notice) + "\n"
            self._missing = 0
            self._pieces.append(notice)
            self._chars += len(notice)


class QueuedStderr(io.TextIOBase):
    """A text stream whose writes return at once, from any thread. Flushing it does nothing; `drain` waits."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, log_format: LogFormat = LogFormat.TEXT) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._queue = LineQueue(log_format=log_format)
        # Reentrant: a signal handler may log while its thread is inside `write`.
        self._changed = threading.Condition(threading.RLock())
        self._is_writing = False
        self._is_broken = False
        threading.Thread(target=self._write_all, name="baton-stderr", daemon=True).start()

    def write(self, text: str, /) -> int:
        if text:
            with self._changed:
                self._queue.put(text)
                self._changed.notify_all()
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    @property
    def dropped(self) -> int:
        return self._queue.dropped

    def drain(self, seconds_max: float) -> bool:
        """Wait until everything is written; False if the time was too short or the reader is gone."""
        with self._changed:
            return self._changed.wait_for(self._is_drained, seconds_max) and not self._is_broken

    def _is_drained(self) -> bool:
        return self._is_broken or not (self._is_writing or self._queue)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                text, self._is_writing = self._queue.take(), True
            is_written = self._write_out(text.encode(self.encoding, self.errors))
            with self._changed:
                self._is_writing, self._is_broken = False, not is_written
                self._changed.notify_all()
            if not is_written:
                return  # the reader has closed the pipe: the queue fills, and the rest is dropped

    def _write_out(self, data: bytes) -> bool:
        # Not through a buffered stream: the end of the process would wait for the lock that this thread holds in a write.
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                return False
        return True


def queue_stderr(log_format: LogFormat = LogFormat.TEXT) -> None:
    """Put a QueuedStderr in the place of `sys.stderr`, unless something else already stands there (as in tests).

    `log_format`: of the line that says how many are missing.
    """
    own = sys.__stderr__
    if own is None or sys.stderr is not own:
        return
    with contextlib.suppress(OSError, ValueError):  # a closed standard error stays as it is
        sys.stderr = QueuedStderr(own.fileno(), log_format)
        atexit.register(drain_stderr, EXIT_S_MAX)


def drain_stderr(seconds_max: float) -> None:
    """Wait for queued lines, for so long at most. Needed before `os._exit`; the usual end of a process does it."""
    if isinstance(sys.stderr, QueuedStderr):
        sys.stderr.drain(seconds_max)


def stderr_lines_dropped() -> int:
    """Lines that this process could not write because nobody read its standard error."""
    return sys.stderr.dropped if isinstance(sys.stderr, QueuedStderr) else 0
