"""One process that compiles constraints, as the front end that started it sees it: its pipes, its start and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from baton.executor.python_command import python_command
from baton.node.constraint_messages import (
    FRAME_BYTES_MAX,
    LENGTH,
    FromWorker,
    WorkerReady,
    WorkerUnable,
    decoded,
    framed,
)

END_S_MAX = 1.0
"""A process whose pipe is closed ends by itself."""


class WorkerLost(Exception):
    """A worker ended without an answer, or answered something else."""


class WorkerOverLimit(Exception):
    """A worker ended because a job took more CPU time than it may."""


class WorkerLate(Exception):
    """A worker did not answer in time, and was ended: the machine is busy."""


class WorkerUnavailable(Exception):
    """No worker can be had now; the message says why."""


class ConstraintsUnsupported(Exception):
    """No worker can ever be had for this model; the message says why."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    backend: str = ""
    version: str = ""

    async def ask(self, payload: bytes, limit_s: float) -> FromWorker:
        """Raises WorkerLost, WorkerOverLimit or WorkerLate; the worker is gone then. `limit_s` of the clock."""
        try:
            async with asyncio.timeout(limit_s):
                self.writer.write(framed(payload))
                await self.writer.drain()
                return await self._hear()
        except TimeoutError:
            self.kill()
            raise WorkerLate(f"no answer within {limit_s:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            if await self._ended() == -signal.SIGPROF:
                raise WorkerOverLimit from None
            raise WorkerLost(f"{type(error).__name__} {error}") from None
        except asyncio.CancelledError:
            self.kill()
            raise

    async def begin(self, limit_s: float) -> None:
        """Wait for its first message. Raises WorkerUnavailable or ConstraintsUnsupported; the worker is gone then."""
        try:
            async with asyncio.timeout(limit_s):
                message = await self._hear()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self.kill()
            raise WorkerUnavailable(f"a worker for constraints did not start: {type(error).__name__} {error}") from None
        match message:
            case WorkerReady(backend, version):
                self.backend, self.version = backend, version
            case WorkerUnable(reason):
                raise ConstraintsUnsupported(reason)
            case _:
                self.kill()
                raise WorkerUnavailable("a worker for constraints began with something else")

    async def _hear(self) -> FromWorker:
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"a worker sent {length} bytes")
        return decoded(await self.reader.readexactly(length))

    async def _ended(self) -> int | None:
        """Its exit status; None where it had to be killed. Not killed at once: Popen.kill reaps a child that has ended, and
        asyncio then cannot tell how."""
        try:
            async with asyncio.timeout(END_S_MAX):
                return await self.process.wait()
        except TimeoutError:
            self.kill()
            return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


async def spawned(folder: Path, cpu_s: float, *options: str) -> WorkerProcess:
    """A worker that has not begun yet. `cpu_s`: CPU time that a job may take. Raises WorkerUnavailable where the
    system has no process or no pipes for it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *python_command("baton.node.constraint_worker", str(folder), str(cpu_s), *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerUnavailable(f"a worker for constraints cannot be started: {error}") from None
    if process.stdin is None or process.stdout is None:
        raise WorkerUnavailable("a worker for constraints has no pipes")
    return WorkerProcess(process, process.stdout, process.stdin)
