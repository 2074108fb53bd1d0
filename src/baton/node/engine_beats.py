"""The engine's beats: how far its loop has come, sent to the front end from a thread of their own.

A step that computes for long delays no beat, a stopped process sends none, and a loop that hangs is told of by counts that
do not change. Beats are datagrams: when the front end does not read, the newest are dropped, and nothing waits for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from baton.core.engine.progress_watch import BEAT_US, EngineBeat
from baton.wire.engine_messages import encode_beat

SOCKET_NAME = "beats"


class LoopProgress:
    """Counts of the engine's loop, which writes them; the beats read them."""

    def __init__(self) -> None:
        self.launched = 0
        self.settled = 0
        self.turns = 0
        self.waits = False
        """Whether the loop waits for an event, or for its front end to read."""

    def beat(self) -> EngineBeat:
        settled = self.settled  # first: the loop goes on meanwhile, and no more can be settled than were launched
        return EngineBeat(self.launched, settled, self.turns, self.waits)


class EngineBeats:
    def __init__(self, path: str, progress: LoopProgress) -> None:
        self._path = path
        self._progress = progress
        self._over = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="baton-beats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._over.wait(BEAT_US / 1e6):
            # The front end does not read, or is gone: nobody misses this beat.
            with contextlib.suppress(BlockingIOError, ConnectionError, FileNotFoundError):
                self._socket.sendto(encode_beat(self._progress.beat()), self._path)
