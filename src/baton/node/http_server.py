"""The parts common to instance and router: a bound port, an HTTP server, signals that mean drain, a log of the engine's
state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from baton.api.engine import Engine
from baton.api.logs import StateLog
from baton.api.logs import state as state_log
from baton.core.errors import BatonError
from baton.executor.cache_folder import cache_folder
from baton.node.peer_options import is_loopback, key_for

Say = Callable[[str], None]
"""Prints a line for the operator."""

CONNECTIONS_CLOSE_S = 5
CONNECTIONS_QUEUED = 2048
STATE_LOG_S = 1.0
"""Least time in seconds between two log lines of the engine's state."""


class CannotServe(BatonError):
    """A server cannot start, or ended because of a fault; the message is for the operator."""


def check_host(host: str, api_keys: Sequence[str]) -> None:
    if not api_keys and not is_loopback(host):
        raise CannotServe(
            f"--host {host} can be reached from other machines, and no API key is set. "
            "Give one with --api-key (or BATON_API_KEY), or stay on 127.0.0.1."
        )


def listener_key(host: str, text: str | None, file: str | None) -> bytes:
    """The cluster key of a process that accepts instances at that address."""
    return key_for([host], text, file, cache_folder())


def model_name(model: str) -> str:
    """The default name of a model in the API."""
    return Path(model).name.removesuffix(".gguf")


def bind(host: str, port: int, option: str) -> socket.socket:
    """Bind the port before anything slow happens, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror}. Choose another with {option}.") from None
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(listener: socket.socket) -> str:
    return f"http://{address_of(listener)}"


class HttpServer(uvicorn.Server):
    """Uvicorn without its own signal handling: here a signal means drain, and the service decides what that is."""

    def __init__(self, app: FastAPI) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            backlog=CONNECTIONS_QUEUED,
            timeout_graceful_shutdown=CONNECTIONS_CLOSE_S,
            lifespan="off",
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def start(self, listener: socket.socket) -> asyncio.Task[None]:
        """Start to serve; from here on no connection is refused. `should_exit` ends it."""
        listener.listen(CONNECTIONS_QUEUED)
        return asyncio.create_task(self.serve(sockets=[listener]))


class StopSignals:
    """SIGTERM and Ctrl-C: the first means drain, the second stop at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()
        self._count = 0

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._count += 1
        self.stop.set()
        if self._count > 1:
            self.at_once.set()


@contextlib.asynccontextmanager
async def state_logged(engine: Engine, tokens: Callable[[], int]) -> AsyncIterator[None]:
    """Log the engine's state periodically inside this context, unless the log level hides it."""
    if not state_log.isEnabledFor(logging.INFO):
        yield
        return
    task = asyncio.create_task(_log_state(StateLog(engine, tokens, time.monotonic())))
    try:
        yield
    finally:
        task.cancel()


async def _log_state(log: StateLog) -> None:
    while True:
        await asyncio.sleep(STATE_LOG_S)
        log.tick(time.monotonic())
