"""The engine's process as its front end starts it: early, so that each imports what it needs while the other does.

The process waits on its standard input for its settings. A front end that finds that it cannot serve abandons it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading

from baton.executor.python_command import python_command

IMPORT_TORCH = "--import-torch"
"""Tells the process to import torch before it has its settings."""


class LaunchedEngine:
    def __init__(self, *, imports_torch: bool = False) -> None:
        options = (IMPORT_TORCH,) if imports_torch else ()
        self._popen = subprocess.Popen(
            python_command("baton.node.engine", *options), stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._exit: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def give(self, settings: bytes) -> None:
        """A line of settings. If the process has ended, `wait` tells."""
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.write(settings)

    def order_exit(self) -> None:
        """Close its standard input."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()

    def kill(self) -> None:
        self._popen.kill()

    async def wait(self) -> int:
        """Its exit status. From one event loop."""
        if self._exit is None:
            loop = asyncio.get_running_loop()
            self._exit = loop.create_future()
            threading.Thread(target=self._reap, args=(loop, self._exit), daemon=True).start()
        return await asyncio.shield(self._exit)

    def abandon(self) -> None:
        """End it now, unless it has ended."""
        if self.returncode is None:
            self.kill()
        self._popen.wait()
        self.order_exit()

    def _reap(self, loop: asyncio.AbstractEventLoop, exit_status: asyncio.Future[int]) -> None:
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(_settle, exit_status, code)


def _settle(exit_status: asyncio.Future[int], code: int) -> None:
    if not exit_status.done():
        exit_status.set_result(code)
