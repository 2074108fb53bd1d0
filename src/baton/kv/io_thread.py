"""One thread that does all the work of a sender or a receiver, and the way into it.

Everything that touches a line, a book or a pool happens on this thread, between two of its turns; sockets never block. So
nothing needs a lock, and an order that has been carried out (a fence, say) has no write of somebody else still under way.
Orders wait in a bounded queue; urgent ones always fit. However the thread ends, `on_end` runs
on it; what is posted later is done by whoever posts it.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]
Post = Callable[[Work, bool], bool]
"""`IoThread.post`."""


class IoThread:
    def __init__(self, name: str, turn: Callable[[float], float | None], on_end: Work, queue_max: int = 4096) -> None:
        """`turn(now)` is called again and again, and says in how many seconds at the latest; None is whenever."""
        self._turn = turn
        self._on_end = on_end
        self._queue: deque[Work] = deque()
        self._queue_max = queue_max
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._signalled = False
        self._closing = False
        self._over = False
        self._lock = threading.Lock()
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, work: Work, urgent: bool = False) -> bool:
        """From any thread: do this on the lane. False when the queue is full; when the lane is over, done here and now."""
        with self._lock:
            if not self._over:
                if len(self._queue) >= self._queue_max and not urgent:
                    return False
                self._queue.append(work)
                self._signal()
                return True
        work()
        return True

    def wake(self) -> None:
        """From any thread: take a turn soon."""
        with self._lock:
            if not self._over:
                self._signal()

    def close(self) -> None:
        self._closing = True
        self.wake()
        self._thread.join()

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Call `ready(events)` on the lane; 0 stops it."""
        # One that was closed is not known any more; what it was ready for may still be due in this turn.
        known = sock.fileno() >= 0 and sock.fileno() in self._selector.get_map()
        if events and known:
            self._selector.modify(sock, events, ready)
        elif events:
            self._selector.register(sock, events, ready)
        elif known:
            self._selector.unregister(sock)

    def _signal(self) -> None:
        if not self._signalled:
            self._signalled = True
            self._wake_in.send(b"!")

    def _woken(self, _events: int) -> None:
        self._wake_out.recv(64)
        self._signalled = False  # before the queue is looked at: what is posted from here on rings again

    def _run(self) -> None:
        try:
            while not self._closing:
                delay_s = self._turn(time.monotonic())
                for key, events in self._selector.select(delay_s):
                    key.data(events)
                self._run_queue()
        finally:
            self._end()

    def _run_queue(self) -> None:
        for _ in range(len(self._queue)):
            self._queue.popleft()()

    def _end(self) -> None:
        self._on_end()
        with self._lock:
            self._over = True
        self._run_queue()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


def ignore_events(_events: int) -> None:
    """The callback of a socket that is not watched any more."""
