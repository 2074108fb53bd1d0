"""The parts common to instance and router: a bound port, an HTTP server, signals that mean drain, a log of the engine's
state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from baton.api.chat_template import check_template, read_template
from baton.api.engine import Engine
from baton.api.generation_config import AUTO, given_defaults, overrides
from baton.api.logs import StateLog
from baton.api.logs import state as state_log
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.settings import ApiSettings
from baton.core.errors import BatonError
from baton.executor.cache_folder import cache_folder
from baton.node.client_address import parse_networks
from baton.node.descriptors import connections_possible, has_descriptors
from baton.node.http_border import HttpBorder, HttpLimits
from baton.node.http_protocol import BoundedHttpProtocol
from baton.node.models import BUILT_INS
from baton.node.peer_options import is_loopback, key_for
from baton.node.server_certificate import ServerCertificate
from baton.node.settings import HttpSettings
from baton.node.tls_protocol import TlsHttpProtocol

Say = Callable[[str], None]
"""Prints a line for the operator."""

CONNECTIONS_CLOSE_S = 5
CONNECTIONS_MAX = 16384
"""Default limit where more descriptors are left; every connection costs memory too."""
CONNECTIONS_QUEUED = 2048
LOOK_TICKS = 10
_ORIGIN = re.compile(r"\*|https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
"""As browsers send it: in small letters, without a path."""
DEATH_SHOWN_S = 2.0
"""Seconds that a process with a dead engine or router answers 503, so that its watchers learn why before the port closes."""
STATE_LOG_S = 10.0
"""Seconds between two log lines of the engine's state."""


class CannotServe(BatonError):
    """A server cannot start, or ended because of a fault; the message is for the operator."""


def check_admin_key(key: str | None) -> None:
    if key is not None and key.split() != [key]:
        raise CannotServe("--admin-key is empty or has white space in it")


def check_host(host: str, api_keys: Sequence[str]) -> None:
    if not api_keys and not is_loopback(host):
        raise CannotServe(
            f"--host {host} can be reached from other machines, and no API key is set. "
            "Give one with --api-key (or BATON_API_KEY), or stay on 127.0.0.1."
        )


def check_origins(origins: Sequence[str], api_keys: Sequence[str]) -> None:
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise CannotServe(
                f"--allowed-origins {origin} is not an origin. Write https://host or https://host:port in small letters, "
                "or *."
            )
    if "*" in origins and not api_keys:
        raise CannotServe(
            "--allowed-origins * lets every page that somebody here opens use this server, and no API key is set. "
            "Give one with --api-key (or BATON_API_KEY), or name the origins."
        )


def http_limits(settings: HttpSettings) -> HttpLimits:
    """The limits that follow from options and from how many files this process may open."""
    possible = connections_possible()
    if settings.max_connections is not None and settings.max_connections > possible:
        raise CannotServe(
            f"--max-connections {settings.max_connections} is more than the {possible} that there are file descriptors for. "
            "Raise the limit of open files (ulimit -n), or give fewer."
        )
    return HttpLimits(
        connections=settings.max_connections or min(possible, CONNECTIONS_MAX),
        connections_per_address=settings.max_connections_per_address,
        trusted_proxies=parse_networks(settings.trusted_proxies),
        hosts=None if settings.api_keys else frozenset(name.lower() for name in settings.allowed_hosts),
    )


def listener_key(host: str, text: str | None, file: str | None) -> bytes:
    """The cluster key of a process that accepts instances at that address."""
    return key_for([host], text, file, cache_folder())


def api_settings(settings: HttpSettings, names: tuple[str, ...]) -> ApiSettings:
    """Made, and so validated, before anything slow happens."""
    check_origins(settings.allowed_origins, settings.api_keys)
    return ApiSettings(
        served_model_names=names,
        api_keys=settings.api_keys,
        metrics_keys=() if settings.metrics_key is None else (settings.metrics_key,),
        chat_template=_chat_template(settings.chat_template),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        model_sampling=_model_sampling(settings),
        default_sampling=overrides(settings.override_generation_config),
        allowed_origins=settings.allowed_origins,
        special_tokens_in_prompts=settings.special_tokens_in_prompts,
        request_cost_max=settings.request_cost_max,
        key_cost_max=settings.key_cost_max,
        key_share=settings.key_share,
    )


def _chat_template(given: str | None) -> str | None:
    if given is None:
        return None
    template = read_template(given)
    check_template(template, "given with --chat-template" if template == given else given)
    return template


def _model_sampling(settings: HttpSettings) -> SamplingDefaults | None:
    """What takes the place of the model's generation_config.json; a built-in model has none in its package."""
    built_in = None if settings.scripted else BUILT_INS.get(settings.model)
    if built_in is not None and settings.generation_config == AUTO:
        return built_in.sampling
    return given_defaults(settings.generation_config)


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


def url_of(listener: socket.socket, certificate: ServerCertificate | None) -> str:
    return f"{'http' if certificate is None else 'https'}://{address_of(listener)}"


class HttpServer(uvicorn.Server):
    """Uvicorn with limits on its clients, and without its own signal handling: a signal means drain, and the service decides
    what that is."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        count: Callable[[str], None],
        certificate: ServerCertificate | None = None,
    ) -> None:
        """`count` is told the reason whenever a client is refused. With a certificate it speaks TLS."""
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol if certificate is None else TlsHttpProtocol,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            backlog=CONNECTIONS_QUEUED,
            timeout_keep_alive=math.ceil(limits.times.idle_s),
            timeout_graceful_shutdown=CONNECTIONS_CLOSE_S,
            lifespan="off",
            proxy_headers=bool(limits.trusted_proxies),
            forwarded_allow_ips=[str(network) for network in limits.trusted_proxies],
        )
        super().__init__(config)
        self.border = HttpBorder(limits, count, time.monotonic, certificate)
        self.server_state = self.border

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn calls it ten times a second."""
        if counter % LOOK_TICKS == 0:
            self.border.look()
            if self.border.certificate is not None:
                self.border.certificate.look()
            if not has_descriptors():
                self.border.relieve()
        return await super().on_tick(counter)

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
