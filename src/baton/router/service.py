"""The router's process: the HTTP server, the listener for instances, and how it stops.

signal        → drain: /ready turns 503, new requests are refused, open ones finish, then exit 0 (a second signal: at once)
router raises → open requests end with an error, /health and /ready turn 503, the last decisions are written, then exit 1

It starts without instances and needs no disk: when it fails or is killed, its instances keep the open requests for a while.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import uvloop
from fastapi import FastAPI

from baton.api.metrics import Metrics
from baton.api.model_text import ModelText, load_text
from baton.api.settings import ApiSettings
from baton.api.tracing.request_tracing import RequestTracing
from baton.core.routing.config import RouterConfig
from baton.core.routing.router import Router
from baton.node.byte_text import load_byte_text
from baton.node.clear_links import clear_links_of_http, clear_links_of_router, tell_clear_links
from baton.node.clock import monotonic_us
from baton.node.constraint_workers import ConstraintWorkers
from baton.node.dashboard import Dashboard
from baton.node.dashboard_state import DashboardState
from baton.node.descriptors import raise_descriptor_limit
from baton.node.gc_pauses import freeze_gc
from baton.node.http_border import HttpLimits
from baton.node.http_server import (
    DEATH_SHOWN_S,
    CannotServe,
    HttpServer,
    Say,
    StopSignals,
    address_of,
    api_settings,
    bind,
    check_admin_key,
    check_host,
    http_limits,
    listener_key,
    model_name,
    state_logged,
    url_of,
)
from baton.node.leftovers import process_scratch
from baton.node.model_cache import used_model
from baton.node.models import mark_of, resolve_model
from baton.node.otlp import check_endpoint
from baton.node.recording import close_recorders, ignore_dump_signal, on_dump_signal, open_recorder
from baton.node.scripted_text import write_byte_tokenizer
from baton.node.secrets import shared_prefix_secret
from baton.node.server_certificate import ServerCertificate, server_certificate
from baton.node.start_stages import StartStages
from baton.node.stderr_queue import stderr_lines_dropped
from baton.node.torch_import import block_torch_import
from baton.node.tracing import ProcessTraces
from baton.router.app import create_router_app
from baton.router.fleet_engine import FleetEngine
from baton.router.fleet_log import FleetEventLog
from baton.router.instance_connections import InstanceConnections
from baton.router.mask_digests import MaskDigests
from baton.router.settings import RouterProcessSettings
from baton.wire.router_sessions import RouterSessions
from baton.wire.watched_sessions import WatchedSessions, weight_of

log = logging.getLogger("baton.router")

SAMPLE_S = 1.0
"""Seconds between two points of the dashboard's curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(RouterProcessSettings):
    config: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        check_host(self.host, self.api_keys)
        check_endpoint(self.otlp_endpoint)
        check_admin_key(self.admin_key)

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (model_name(self.model),)


def route(settings: RouterSettings, say: Say, stages: StartStages) -> None:
    """Route until told to stop. Raises CannotServe, or the error in the settings, where it cannot."""
    ignore_dump_signal()
    raise_descriptor_limit()
    api, limits = api_settings(settings, settings.names), http_limits(settings)
    certificate = server_certificate(settings)
    key = listener_key(settings.join_host, settings.cluster_key, settings.cluster_key_file)
    tell_clear_links(clear_links_of_http(settings) + clear_links_of_router(settings.join_host))
    clients = bind(settings.host, settings.port, "--port")
    try:
        instances = bind(settings.join_host, settings.join_port, "--join-port")
        try:
            with process_scratch() as scratch:
                folder = _text_folder(settings, scratch, stages)
                block_torch_import()
                with used_model(folder):
                    process = _Process(settings, api, limits, certificate, key, say)
                    uvloop.run(process.run(clients, instances, folder))
        finally:
            instances.close()
    finally:
        clients.close()


def _text_folder(settings: RouterSettings, scratch: Path, stages: StartStages) -> Path:
    if not settings.scripted:
        folder = resolve_model(settings.model, stages, own_template=settings.chat_template is None)
        stages.end()
        return folder
    write_byte_tokenizer(scratch)
    return scratch


class _Process:
    def __init__(
        self,
        settings: RouterSettings,
        api: ApiSettings,
        limits: HttpLimits,
        certificate: ServerCertificate | None,
        key: bytes,
        say: Say,
    ) -> None:
        self._settings = settings
        self._api = api
        self._limits = limits
        self._certificate = certificate
        self._key = key
        self._say = say
        self._signals = StopSignals()

    async def run(self, clients: socket.socket, instances: socket.socket, text_folder: Path) -> None:
        """Raises CannotServe where the router failed."""
        self._signals.listen()
        load = load_byte_text if self._settings.scripted else load_text
        text = await asyncio.to_thread(load, text_folder)
        config = await asyncio.to_thread(self._config, text_folder)
        router = Router(config, shared_prefix_secret(self._key), secrets.randbits(63))
        name = f"{address_of(instances)}"
        router_sessions = RouterSessions(router, name, keyed=bool(self._api.api_keys))
        recorder = open_recorder("router", "", router_sessions, router.hashes, weight_of, self._settings)
        if recorder is None:
            await self._route(router_sessions, name, clients, instances, text, text_folder)
            return
        recorder.watch.on_raise = None  # it would write the file while the event loop waits
        on_dump_signal(partial(recorder.dump_soon, "SIGUSR1"))
        watched = WatchedSessions(router_sessions, recorder.watch)
        try:
            await self._route(watched, name, clients, instances, text, text_folder)
        except Exception as error:
            recorder.failed(error)
            raise
        finally:
            close_recorders()

    async def _route(
        self,
        router_sessions: RouterSessions | WatchedSessions,
        name: str,
        clients: socket.socket,
        instances: socket.socket,
        text: ModelText,
        text_folder: Path,
    ) -> None:
        sessions = InstanceConnections(router_sessions, self._key, name)
        state = DashboardState(monotonic_us())
        engine = FleetEngine(sessions, state, text.vocabulary)
        metrics = Metrics(engine, self._settings.names[0], stderr_lines_dropped, self._settings.metrics_names)
        compiler = ConstraintWorkers(text_folder, metrics)
        compiler.start_early()
        sessions.watch(MaskDigests(compiler, sessions).take)
        traces = ProcessTraces(self._settings, "baton-router", name)
        traces.show(metrics)
        app = self._app(engine, sessions, state, text, metrics, compiler, traces.tracing)
        http = HttpServer(app, self._limits, metrics.count_http_refusal, self._certificate)
        await sessions.open(instances)
        serving = http.start(clients)
        freeze_gc()
        self._say(self._banner(clients, instances))
        sampling = asyncio.create_task(_sample(state, engine, sessions.router_sessions.router))
        async with state_logged(engine, lambda: metrics.tokens_given):
            await self._until_over(engine, sessions, serving)
        sampling.cancel()
        engine.give_up()  # open streams end with this error instead of a broken connection
        if sessions.failure is not None:
            sessions.close("this router failed")
            await asyncio.sleep(DEATH_SHOWN_S)
        http.should_exit = True
        await serving
        await traces.close()
        await compiler.close()
        sessions.close("this router was stopped")
        if sessions.failure is not None:
            raise CannotServe(str(sessions.death)) from sessions.failure

    def _config(self, folder: Path) -> RouterConfig:
        """Instances of another model are rejected even while no other instance has joined."""
        mark = mark_of(folder, self._settings.scripted)
        if not mark:
            log.warning("there are no weights in %s: the first instance decides which model this router has", folder)
        return replace(self._settings.config, model=self._settings.model, model_mark=mark)

    def _app(
        self,
        engine: FleetEngine,
        sessions: InstanceConnections,
        state: DashboardState,
        text: ModelText,
        metrics: Metrics,
        compiler: ConstraintWorkers,
        tracing: RequestTracing | None,
    ) -> FastAPI:
        dashboard = Dashboard(state, monotonic_us, engine.views, demo=self._settings.demo)
        event_log = FleetEventLog(sessions, engine)
        grace_s = self._settings.config.orphan_grace_us / 1e6
        admin_key = self._settings.admin_key
        return create_router_app(
            engine, sessions, event_log, dashboard, text, self._api, metrics, grace_s, admin_key, compiler, tracing
        )

    async def _until_over(self, engine: FleetEngine, sessions: InstanceConnections, serving: asyncio.Task[None]) -> None:
        stop = asyncio.ensure_future(self._signals.stop.wait())
        failed = asyncio.ensure_future(sessions.failed.wait())
        await asyncio.wait((stop, serving, failed), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not failed.done():
            await self._drain(engine, failed)
        failed.cancel()

    async def _drain(self, engine: FleetEngine, failed: asyncio.Future[Literal[True]]) -> None:
        engine.draining = True
        if engine.open_requests:
            self._say(f"draining: {engine.open_requests} requests open (once more to stop at once)")
        idle, at_once = asyncio.ensure_future(engine.wait_idle()), asyncio.ensure_future(self._signals.at_once.wait())
        ends = (idle, at_once, failed)
        await asyncio.wait(ends, timeout=self._settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if engine.open_requests and not failed.done():
            self._say(f"stopping with {engine.open_requests} requests open")
        idle.cancel()
        at_once.cancel()

    def _banner(self, clients: socket.socket, instances: socket.socket) -> str:
        url, at = url_of(clients, self._certificate), address_of(instances)
        return (
            f"instances join at {at}, with: baton serve … --router {at}\n"
            f"{self._settings.names[0]} is served at {url}\n"
            f"watch it at {url}/dashboard, talk to it with: baton chat --url {url}"
        )


async def _sample(state: DashboardState, engine: FleetEngine, router: Router) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        state.sample(engine.sample_views(), router.waiting, monotonic_us())
