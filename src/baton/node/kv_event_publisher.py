"""Publishes KV events over ZeroMQ, on a thread of its own, with what is needed to repeat them.

    publisher = KvEventPublisher(settings, block_size)    raises CannotPublish
    while worker.has_block_events and publisher.has_room:
        publisher.publish(worker.block_events())          returns at once
    publisher.close()

A PUB socket sends batches to whoever subscribes, and drops them for a subscriber that has HWM of them unread: it sees a gap
in the sequence numbers. A ROUTER socket answers requests for what was missed, from the last batches, as vLLM's does:

    request   empty, first sequence number (8 bytes)
    answer    empty, sequence number, batch     for each batch that is still kept; the last one with number -1, and empty

For a reader that asks for batches which are no longer kept, everything is told anew (`asked_for_all`).

While QUEUED_MAX batches wait for the thread there is no room, and changes stay where they are, merged: none is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque

import zmq

from baton.core.engine.block_contents import BlockEvents
from baton.core.engine.gauges import KvEventTraffic
from baton.core.errors import BatonError, SetupError
from baton.node.settings import EngineSettings, KvEventSettings, KvEventsFormat
from baton.wire.kv_events import END_OF_REPLAY, SEQUENCE_BYTES, batch_of

log = logging.getLogger("baton.kv-events")

QUEUED_MAX = 64
"""Batches that wait for the thread."""
KEPT_BYTES_MAX = 256 << 20
"""Of batches kept for replays; the oldest go first, also where there are fewer than `kv_events_buffer_steps`."""
CLOSE_S = 2.0
LINGER_MS = 500
RETELL_S = 10.0
"""Shortest time between two readers for whom everything is told anew."""


class CannotPublish(SetupError):
    """An endpoint that cannot be used; the message names the option."""


class EndpointInUse(BatonError):
    """Another process listens there: perhaps one that is about to end, so that another start may help."""


class KvEventPublisher:
    def __init__(self, settings: KvEventSettings, block_size: int) -> None:
        if settings.kv_events_endpoint is None:
            raise CannotPublish("KV events have no endpoint")
        self._block_size = block_size
        self._topic = settings.kv_events_topic.encode()
        self._named = settings.kv_events_format is KvEventsFormat.MAP
        self._queued: deque[BlockEvents | None] = deque()
        """None ends the thread."""
        self._batches = _KeptBatches(settings.kv_events_buffer_steps)
        self._context = zmq.Context()
        replays = settings.kv_events_replay_endpoint
        self._publishing = self._opened(zmq.PUB, settings.kv_events_hwm, settings.kv_events_endpoint)
        self._replaying = self._opened(zmq.ROUTER, settings.kv_events_buffer_steps + 1, replays or "")
        try:
            self.endpoint, self.replay_endpoint = self._listen(settings, settings.kv_events_endpoint)
        except BatonError:
            self._context.destroy(0)
            raise
        self._stored = self._removed = self._cleared = self._replays = 0
        self._asked_for_all = False
        self._last_asked_s = -RETELL_S
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._run, name="baton-kv-events", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        return len(self._queued) < QUEUED_MAX

    def publish(self, changes: BlockEvents) -> None:
        self._put(changes)

    def asked_for_all(self) -> bool:
        """Whether a reader has asked, since the last call, for batches that are no longer kept."""
        asked, self._asked_for_all = self._asked_for_all, False
        return asked

    def traffic(self) -> KvEventTraffic:
        return KvEventTraffic(self._batches.next_number, self._stored, self._removed, self._cleared, self._replays)

    def close(self) -> None:
        """What was handed in is still sent, unless a subscriber is too slow."""
        if not self._thread.is_alive():
            return
        self._put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._read_end)
            os.close(self._write_end)

    def _put(self, item: BlockEvents | None) -> None:
        self._queued.append(item)
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread will wake anyway
            os.write(self._write_end, b"!")

    def _opened(self, kind: int, unread_max: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(unread_max)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        return socket

    def _listen(self, settings: KvEventSettings, endpoint: str) -> tuple[str, str]:
        """The addresses in use; the second is empty without replays."""
        try:
            if settings.kv_events_connect:
                self._publishing.connect(endpoint)
                used = endpoint
            else:
                used = _bound(self._publishing, "--kv-events-endpoint", endpoint)
            replay = settings.kv_events_replay_endpoint
            return used, "" if replay is None else _bound(self._replaying, "--kv-events-replay-endpoint", replay)
        except zmq.ZMQError as error:
            raise CannotPublish(f"--kv-events-endpoint {endpoint}: {_reason(error)}") from None

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("no KV events are published any more; a restart brings them back")
            raise
        finally:
            self._publishing.close()
            self._replaying.close()
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._read_end, zmq.POLLIN)
        poller.register(self._replaying, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replaying in ready:
                self._replay(self._replaying.recv_multipart())
            if self._read_end in ready:
                os.read(self._read_end, 4096)
                if not self._send_queued():
                    return

    def _send_queued(self) -> bool:
        """False at the end."""
        while self._queued:
            changes = self._queued.popleft()
            if changes is None:
                return False
            self._send(changes)
        return True

    def _send(self, changes: BlockEvents) -> None:
        batch = batch_of(changes, self._block_size, time.time(), self._named)
        number = self._batches.keep(batch)
        self._publishing.send_multipart((self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), batch))
        self._stored += len(changes.stored)
        self._removed += len(changes.removed)
        self._cleared += changes.fresh

    def _replay(self, frames: list[bytes]) -> None:
        """Anything else than a request is left without an answer."""
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            return
        self._replays += 1
        first = int.from_bytes(frames[2], "big")
        if first < self._batches.oldest and time.monotonic() - self._last_asked_s >= RETELL_S:
            self._asked_for_all, self._last_asked_s = True, time.monotonic()
        for number, batch in self._batches.since(first):
            self._replaying.send_multipart((frames[0], b"", number.to_bytes(SEQUENCE_BYTES, "big"), batch))
        self._replaying.send_multipart((frames[0], b"", END_OF_REPLAY, b""))


def open_kv_events(settings: EngineSettings, closing: contextlib.ExitStack) -> KvEventPublisher | None:
    """The publisher, if one is configured. Raises CannotPublish."""
    if settings.kv_events_endpoint is None:
        return None
    publisher = KvEventPublisher(settings, settings.block_size)
    closing.callback(publisher.close)
    verb = "go to" if settings.kv_events_connect else "can be had at"
    replays = f", missed ones at {publisher.replay_endpoint}" if publisher.replay_endpoint else ""
    log.warning(
        "KV events %s %s%s: whoever reads them there reads the token ids of all prompts and answers",
        verb, publisher.endpoint, replays,
    )  # fmt: skip
    return publisher


class _KeptBatches:
    """The last batches, by number."""

    def __init__(self, batches_max: int) -> None:
        self._batches_max = batches_max
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self.next_number = 0

    def keep(self, batch: bytes) -> int:
        """The number of this batch."""
        self._kept.append(batch)
        self._bytes += len(batch)
        while len(self._kept) > self._batches_max or self._bytes > KEPT_BYTES_MAX:
            self._bytes -= len(self._kept.popleft())
        self.next_number += 1
        return self.next_number - 1

    @property
    def oldest(self) -> int:
        """The number of the first one that is kept."""
        return self.next_number - len(self._kept)

    def since(self, number: int) -> list[tuple[int, bytes]]:
        return [(at, batch) for at, batch in enumerate(self._kept, start=self.oldest) if at >= number]


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)


def _bound(socket: zmq.Socket[bytes], option: str, endpoint: str) -> str:
    """Where it listens: with the port that was picked, if any was wanted."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        refusal = EndpointInUse if error.errno == zmq.EADDRINUSE else CannotPublish
        raise refusal(f"{option} {endpoint}: {_reason(error)}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
