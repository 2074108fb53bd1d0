"""Files of the flight recorder of one process: the last decisions when something goes wrong, or all of them.

    recorder = open_recorder("engine", name, worker, worker.hashes, weight_of, settings)     None if it is switched off
    watched  = WatchedWorker(worker, recorder.watch)
    recorder.dump("the engine stalls")        from any thread; writes a file and logs its name
    recorder.close()

A file is written when a call raises what is no fault of another process, on SIGUSR1, and by order. A thread of its own waits
for the signal, so that it is answered while the main thread computes or hangs. A front end passes it on to its engine, and
sends it to an engine that stalls; `baton up` sends it to what hangs. A process that is stopped (SIGSTOP) cannot answer it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from baton import __version__
from baton.core.content_hashes import ContentHashes
from baton.core.errors import BatonError
from baton.executor.cache_folder import cache_folder
from baton.node.settings import RecordSettings
from baton.wire.engine_messages import WireError
from baton.wire.flight_recorder import FlightRecorder, Segment
from baton.wire.recording_file import (
    RecordingHeader,
    write_calls,
    write_gap,
    write_header,
    write_recording,
    write_snapshot,
)
from baton.wire.recording_mask import RecordingMask

log = logging.getLogger("baton.recorder")

SUFFIX = ".baton"
KEPT_FILES = 16
"""Files of this kind of process in the folder; older ones are removed."""
FLUSH_S = 1.0
"""With --record: the longest time for which a decision is not in the file."""
LAGGING_SEGMENTS = 8
"""With --record: segments that wait for being written; beyond that some are left out."""
CLOSE_S = 4.0
"""The longest time for which the end of a process waits for a file that is being written."""
DUMP_SIGNAL = signal.SIGUSR1
DUMPED_NAME = "recorded"
"""A file in the folder that an engine shares with its front end: the last signal was answered."""
_UNWRITABLE = (OSError, BatonError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""A process does not end because its decisions cannot be written."""


_open: list[ProcessRecorder] = []
"""The recorders of this process, for its end."""


class CannotRecord(BatonError):
    """The file of --record cannot be written."""


class ProcessRecorder:
    def __init__(
        self,
        of: str,
        name: str,
        watched: object,
        hashes: ContentHashes,
        weight_of: Callable[[tuple[Any, ...]], int],
        settings: RecordSettings,
    ) -> None:
        self._of = of
        self._name = name
        self._settings = settings
        self._writer = None if settings.record is None else AllDecisionsWriter(self._new_file(settings.record))
        self._dumping = threading.Lock()
        self._raised: Exception | None = None
        self.watch = FlightRecorder(watched, hashes, weight_of)
        self.watch.on_raise = self._on_raise
        if self._writer is not None:
            self._writer.start(self.watch, self._header("--record"), self._mask())

    def close(self) -> None:
        """Write what --record has not written yet, and end what is being written."""
        if self._dumping.acquire(timeout=CLOSE_S):
            self._dumping.release()
        if self._writer is not None:
            self._writer.close()

    def failed(self, error: Exception) -> None:
        """The process ends with this error."""
        if error is not self._raised:  # else it is written already
            self.dump(f"crash: {type(error).__name__}: {error}")

    def _on_raise(self, error: Exception) -> None:
        if not isinstance(error, WireError):  # that is the fault of another process
            self._raised = error
            self.dump(f"{type(error).__name__}: {error}")

    def dump(self, reason: str) -> Path | None:
        """Write the last decisions to a file in the folder of recordings. A second order meanwhile waits."""
        with self._dumping:
            try:
                data = write_recording(self._header(reason), self.watch.segments(), self._mask())
                with self._new_file(f"{self._folder}{os.sep}") as file:
                    file.write(data)
                self._remove_old()
            except _UNWRITABLE as error:
                log.warning("the last decisions cannot be written: %s", error)
                return None
            path = Path(file.name)
        log.warning("%s: the last decisions are in %s; see them with: baton replay %s", reason, path, path)
        return path

    def dump_soon(self, reason: str) -> None:
        """The same in a thread: it may take a second."""
        threading.Thread(target=self.dump, args=(reason,), name="baton-dump", daemon=True).start()

    def _header(self, reason: str) -> RecordingHeader:
        written = datetime.now(UTC).isoformat(timespec="milliseconds")
        return RecordingHeader(__version__, self._of, self._name, reason, written, not self._settings.record_tokens)

    def _mask(self) -> RecordingMask | None:
        return None if self._settings.record_tokens else RecordingMask(secrets.token_bytes(32))

    @property
    def _folder(self) -> Path:
        given = self._settings.record_folder
        return cache_folder() / "recordings" if given is None else Path(given)

    def _new_file(self, where: str) -> BinaryIO:
        """A new file; one that exists is kept, and a number added. In a folder, which is made, it has the process's name."""
        path = Path(where)
        if where.endswith(os.sep) or path.is_dir():
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path /= f"{self._of}-{self._name or os.getpid()}{SUFFIX}"
        for number in range(1, 10_000):
            with contextlib.suppress(FileExistsError):
                numbered = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
                return open(numbered, "xb", opener=_private)
        raise CannotRecord(f"there are too many files called {path}")

    def _remove_old(self) -> None:
        files = sorted(self._folder.glob(f"{self._of}-*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in files[:-KEPT_FILES]:
            path.unlink(missing_ok=True)


class AllDecisionsWriter:
    """Writes every segment to one file, in a thread: encoding takes longer than deciding does."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting: deque[Segment] = deque()
        """Segments with calls that are not in the file. All but the last are complete."""
        self._written = 0
        """Calls of the first of them that are in the file."""
        self._failed = False
        self._closing = threading.Event()
        self._mask: RecordingMask | None = None
        self._thread = threading.Thread(target=self._run, name="baton-recording", daemon=True)

    def start(self, recorder: FlightRecorder, header: RecordingHeader, mask: RecordingMask | None) -> None:
        self._mask = mask
        self._file.write(write_header(header))
        self._waiting.append(recorder.newer)
        recorder.on_open = self._waiting.append
        self._file.write(write_snapshot(recorder.newer.state, mask))
        self._thread.start()

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._file.close()

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        if self._failed:
            self._waiting.clear()
            return
        try:
            for frames in self._frames():
                self._file.write(frames)
            self._file.flush()
        except _UNWRITABLE as error:
            self._failed = True
            log.warning("the recording ends here: %s: %s", type(error).__name__, error)

    def _frames(self) -> Iterator[bytes]:
        while True:
            is_complete, segment = len(self._waiting) > 1, self._waiting[0]
            end = len(segment.calls)
            yield write_calls(segment, self._written, end, self._mask)
            self._written = end
            if not is_complete:
                return
            self._waiting.popleft()
            self._written = 0
            left_out = 0
            while len(self._waiting) > LAGGING_SEGMENTS:
                left_out += len(self._waiting.popleft().calls)
            if left_out:
                log.warning("%d decisions are left out of the recording: they come faster than they are written", left_out)
                yield write_gap(left_out)
            yield write_snapshot(self._waiting[0].state, self._mask)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def open_recorder(
    of: str,
    name: str,
    watched: object,
    hashes: ContentHashes,
    weight_of: Callable[[tuple[Any, ...]], int],
    settings: RecordSettings,
) -> ProcessRecorder | None:
    """The recorder of this process; None if it is switched off. Raises CannotRecord."""
    if not settings.flight_recorder and settings.record is None:
        return None
    try:
        recorder = ProcessRecorder(of, name, watched, hashes, weight_of, settings)
    except OSError as error:
        raise CannotRecord(f"--record {settings.record}: {error}") from None
    _open.append(recorder)
    return recorder


def close_recorders() -> None:
    """The process ends: write what --record has not written yet."""
    for recorder in _open:
        recorder.close()


def ignore_dump_signal() -> None:
    """Until there is a recorder, SIGUSR1 does nothing."""
    signal.signal(DUMP_SIGNAL, signal.SIG_IGN)


def dump_on_signal(recorder: ProcessRecorder, dumped: Path | None = None) -> None:
    """Write the last decisions whenever SIGUSR1 comes, and then the file `dumped`."""

    def dump() -> None:
        recorder.dump("SIGUSR1")
        if dumped is not None:
            with contextlib.suppress(OSError):  # the front end is gone, and its folder with it
                dumped.touch()

    on_dump_signal(dump)


def on_dump_signal(act: Callable[[], object]) -> None:
    """Call `act` in a thread whenever SIGUSR1 comes. To be called from the main thread; where it runs an event loop, on that
    loop, whose other signals wait while `act` runs.

    The C handler writes the number of the signal to a pipe at once, whichever thread it interrupts and whatever the main
    thread does. A loop is woken by such a pipe too: it gets every number from here.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(DUMP_SIGNAL, lambda _number, _frame: None)
    woken_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    loop = None if woken_before < 0 else os.dup(woken_before)  # the loop closes its own at its end

    def wait() -> None:
        while numbers := os.read(reader, 64):
            if loop is not None:
                with contextlib.suppress(OSError):  # it has ended, or does not read
                    os.write(loop, numbers)
            if DUMP_SIGNAL in numbers:
                act()

    threading.Thread(target=wait, name="baton-dumps", daemon=True).start()
