"""The engine's child process as the front end holds it: its sockets, the messages queued for it, its beats, its exit.

Messages of the engine go to `on_message`, in order. `on_end` gets the reason when the process exits unasked, when it stalls
(`core/engine/progress_watch.py` decides that; the process then writes its last decisions and is killed), or when talking to
it fails; it may be called more than once. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from baton.api.engine import NotServing
from baton.core.engine.progress_watch import LOOK_US, EngineBeat, ProgressWatch
from baton.core.start_stage import OnStage, no_stages
from baton.executor.scratch_folder import ScratchFolder
from baton.node.clock import monotonic_us
from baton.node.engine_beats import SOCKET_NAME
from baton.node.engine_launch import LaunchedEngine
from baton.node.leftovers import SCRATCH_PREFIX
from baton.node.process_activity import ProcessActivity
from baton.node.recording import DUMP_SIGNAL, DUMPED_NAME
from baton.node.settings import EngineSettings
from baton.wire.engine_messages import (
    QUEUED_MESSAGES_MAX,
    FromEngine,
    ReadyMessage,
    StartStage,
    decode_beat,
    decode_from_engine,
    decode_from_starting_engine,
)

log = logging.getLogger("baton.engine")

KILL_AFTER_S = 5.0
RECORDED_WITHIN_S = 20.0
"""Seconds that a stalled engine has for writing its last decisions: two full segments take seconds, and more on a busy
machine. Its requests have ended by then."""
BUSY_US_MAX = 5_000
"""Time for which messages of the engine are taken in before other work of the event loop has a turn."""
LOOK_FOR_RECORD_S = 0.02
BEAT_BYTES_MAX = 4096


class EngineProcess:
    def __init__(
        self,
        settings: EngineSettings,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[NotServing], None],
        on_stage: OnStage = no_stages,
        launched: LaunchedEngine | None = None,
    ) -> None:
        """`launched`: the process, where it was started before."""
        self._scratch = ScratchFolder(SCRATCH_PREFIX)  # mode 0700: no other user reaches the socket
        self._folder = self._scratch.path
        self._settings = replace(settings, endpoint=f"ipc://{self._folder}/engine")
        self._on_message = on_message
        self._on_end = on_end
        self._on_stage = on_stage
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(QUEUED_MESSAGES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        """Frames for the engine, in order. Unbounded: stops and cancels are never refused."""
        self._progress = ProgressWatch(settings.stall_us)
        self._activity: ProcessActivity | None = None
        self._launched = launched
        self._process: LaunchedEngine | None = None
        self._beats: _BeatReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False
        self._may_stop = asyncio.Event()
        """Not set while a stalled engine writes its last decisions."""
        self._may_stop.set()
        self._stopping = False

    async def start(self) -> None:
        """Start the process, or give one that was started its settings; its ReadyMessage says when it serves."""
        self._socket.bind(self._settings.endpoint)
        self._beats = _BeatReader(f"{self._folder}/{SOCKET_NAME}", self._beaten)
        self._process = process = self._launched or LaunchedEngine()
        process.give(msgspec.json.encode(self._settings) + b"\n")
        self._activity = ProcessActivity(process.pid)
        works = (self._receive(), self._send_all(), self._watch(process), self._watch_progress(process))
        self._tasks = [asyncio.create_task(work) for work in works]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Stop the process, by force after KILL_AFTER_S, and release socket and folder."""
        self._stopping = True
        await self._may_stop.wait()
        if self._process is not None:
            await _stop(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._beats is not None:
            self._beats.close()
        self._socket.close()
        self._context.term()
        self._scratch.remove()

    def send(self, frame: bytes) -> None:
        """Send without waiting."""
        self._outbox.put_nowait(frame)

    def order_dump(self) -> None:
        """Have the engine write its last decisions to a file; from any thread, also while the event loop hangs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, DUMP_SIGNAL)

    @property
    def is_behind(self) -> bool:
        """Whether so many messages are queued that submissions are refused."""
        return self._outbox.qsize() > QUEUED_MESSAGES_MAX

    @property
    def silent_us(self) -> int:
        """Microseconds since the engine's last message or beat, less those in which this process stood still."""
        return self._progress.silent_us(monotonic_us())

    @property
    def runs(self) -> bool:
        """Whether a silent engine's process uses a CPU or waits for one, as far as the system tells."""
        return self._activity is None or self._activity.runs()

    @property
    def stall_limit_us(self) -> int:
        """Time after which a step that has not ended is a stall."""
        return self._progress.limit_us

    async def _send_all(self) -> None:
        while True:
            await self._socket.send(await self._outbox.get())

    async def _receive(self) -> None:
        yielded_us = monotonic_us()
        while True:
            frame = await self._socket.recv()
            message = decode_from_engine(frame) if self._is_ready else decode_from_starting_engine(frame)
            if isinstance(message, StartStage):
                self._on_stage(message.name)
                continue
            if isinstance(message, ReadyMessage):
                self._is_ready = True
                self._progress.ready(message.tried_step_us, monotonic_us())
            self._spoke(monotonic_us())
            self._on_message(message)
            # A message that is there already is received without a turn of the loop; a row of them would stop all else.
            if monotonic_us() - yielded_us > BUSY_US_MAX:
                await asyncio.sleep(0)
                yielded_us = monotonic_us()

    def _spoke(self, now_us: int) -> None:
        self._progress.heard(now_us)
        if self._activity is not None:
            self._activity.spoke()

    def _beaten(self, beat: EngineBeat) -> None:
        now_us = monotonic_us()
        self._progress.beaten(beat, now_us)
        self._spoke(now_us)

    async def _watch_progress(self, process: LaunchedEngine) -> None:
        while (stall := self._progress.look(monotonic_us())) is None:  # noqa: ASYNC110  who is silent tells nobody
            await asyncio.sleep(LOOK_US / 1e6)
        if self._stopping or process.returncode is not None:
            return
        log.error("the engine is stalled: %s", stall)
        self._on_end(NotServing(f"it stalled and was killed; {stall}", is_stall=True))
        self._stopping = True  # its exit is no further news
        self._may_stop.clear()
        try:
            await self._recorded(process)
        finally:
            self._may_stop.set()
        if process.returncode is None:
            process.kill()  # also ends a process that is stopped

    async def _recorded(self, process: LaunchedEngine) -> None:
        """Have a stalled engine write its last decisions, if it records them and is not stopped, and wait for that."""
        records = self._settings.flight_recorder or self._settings.record is not None
        if not (records and self._is_ready) or (self._activity is not None and self._activity.is_stopped()):
            return
        written = self._folder / DUMPED_NAME
        written.unlink(missing_ok=True)
        self.order_dump()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RECORDED_WITHIN_S
        while process.returncode is None and not written.exists() and loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_FOR_RECORD_S)  # a file tells nobody

    async def _watch(self, process: LaunchedEngine) -> None:
        code = await process.wait()
        if not self._stopping:
            # A FailedMessage may still be in the socket; its reason says more than the exit status does.
            await asyncio.sleep(0.05)
            self._on_end(NotServing(f"the engine process ended with status {code}"))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A failed task is as final as the engine's exit: without it no request can end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_end(NotServing("the front end cannot talk to the engine", f"{type(error).__name__}: {error}"))


async def _stop(process: LaunchedEngine) -> None:
    process.order_exit()
    try:
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)
    except TimeoutError:
        process.kill()
        await process.wait()


class _BeatReader:
    """The socket for beats; not every event loop has endpoints for datagrams of this family."""

    def __init__(self, path: str, on_beat: Callable[[EngineBeat], None]) -> None:
        self._on_beat = on_beat
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        """One beat; the loop calls again while there are more."""
        with contextlib.suppress(BlockingIOError):
            self._on_beat(decode_beat(self._socket.recv(BEAT_BYTES_MAX)))
