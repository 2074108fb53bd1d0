"""The engine's child process as the front end holds it: its socket, the messages queued for it, its exit.

Messages of the engine go to `on_message`, in order. `on_end` gets the reason when the process exits unasked, or when talking
to it fails; it may be called more than once. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from baton.api.engine import EngineDead
from baton.node.clock import monotonic_us
from baton.node.engine import QUEUED_MESSAGES_MAX
from baton.node.recording import DUMP_SIGNAL
from baton.node.settings import EngineSettings
from baton.wire.engine_messages import FromEngine, decode_from_engine

KILL_AFTER_S = 5.0


class EngineProcess:
    def __init__(
        self, settings: EngineSettings, on_message: Callable[[FromEngine], None], on_end: Callable[[str], None]
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="baton-"))  # mode 0700: no other user reaches the socket
        self._settings = replace(settings, endpoint=f"ipc://{self._folder}/engine")
        self._on_message = on_message
        self._on_end = on_end
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(QUEUED_MESSAGES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        """Frames for the engine, in order. Unbounded: stops and cancels are never refused."""
        self._last_message_us = monotonic_us()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start the process; its ReadyMessage says when it serves."""
        self._socket.bind(self._settings.endpoint)
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.node.engine", stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        if process.stdin is None:
            raise EngineDead("the engine process has no standard input")
        process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        await process.stdin.drain()
        self._tasks = [asyncio.create_task(work) for work in (self._receive(), self._send_all(), self._watch(process))]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Stop the process, by force after KILL_AFTER_S, and release socket and folder."""
        self._stopping = True
        if self._process is not None:
            await _stop(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, frame: bytes) -> None:
        """Send without waiting."""
        self._outbox.put_nowait(frame)

    def order_dump(self) -> None:
        """Have the engine write its last decisions to a file."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(DUMP_SIGNAL)

    @property
    def is_behind(self) -> bool:
        """Whether so many messages are queued that submissions are refused."""
        return self._outbox.qsize() > QUEUED_MESSAGES_MAX

    @property
    def silent_us(self) -> int:
        """Microseconds since the engine's last message."""
        return monotonic_us() - self._last_message_us

    async def _send_all(self) -> None:
        while True:
            await self._socket.send(await self._outbox.get())

    async def _receive(self) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            self._last_message_us = monotonic_us()
            self._on_message(message)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self._stopping:
            # A FailedMessage may still be in the socket; its reason says more than the exit status does.
            await asyncio.sleep(0.05)
            self._on_end(f"the engine process ended with status {code}")

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A failed task is as final as the engine's exit: without it no request can end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_end(f"the front end cannot talk to the engine: {type(error).__name__}: {error}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)
    except TimeoutError:
        process.kill()
        await process.wait()
