"""One instance: the engine process, the HTTP server in this process, and how either stops.

signal      → drain: /ready turns 503, new requests are refused, open ones finish, then exit 0 (a second signal: at once)
engine dies → open requests end with a typed error, /health and /ready turn 503, then exit 1 with the reason

Under a router: an order to drain acts as a signal; being fenced exits 1 at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop
from starlette.middleware import Middleware

from baton.api.app import NO_ROUTER, RouterExtras, create_app
from baton.api.engine import EngineDead
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText, load_text
from baton.api.router_only import RouterOnlyMiddleware, closed_port_error
from baton.api.settings import ApiSettings
from baton.core.config import ROLES
from baton.core.engine.orders import ReportChanges
from baton.core.routing.events import Instance, Join
from baton.executor.cache_folder import cache_folder
from baton.executor.torch_build import need_torch
from baton.node.byte_text import load_byte_text
from baton.node.clear_links import clear_links_of_http, clear_links_of_instance, tell_clear_links
from baton.node.clock import monotonic_us
from baton.node.constraint_workers import ConstraintWorkers
from baton.node.descriptors import raise_descriptor_limit
from baton.node.devices import check_device, wants_safetensors
from baton.node.engine_client import EngineClient
from baton.node.engine_launch import LaunchedEngine
from baton.node.gc_pauses import freeze_gc
from baton.node.http_border import HttpLimits
from baton.node.http_server import (
    DEATH_SHOWN_S,
    CannotServe,
    HttpServer,
    Say,
    StopSignals,
    api_settings,
    bind,
    check_admin_key,
    check_host,
    http_limits,
    model_name,
    state_logged,
    url_of,
)
from baton.node.kv_event_options import check_kv_events
from baton.node.kv_storage import check_storage
from baton.node.leftovers import process_scratch
from baton.node.model_cache import used_model
from baton.node.models import check_load_format, resolve_model
from baton.node.network_trust import check_events_trust, check_trust
from baton.node.otlp import check_endpoint
from baton.node.own_dashboard import OwnDashboard
from baton.node.peer_options import check_pairing, cluster_key, key_for, split_address
from baton.node.phase_history import PhaseHistories
from baton.node.recording import ignore_dump_signal, on_dump_signal
from baton.node.router_membership import InstanceFenced, RouterAddress, RouterMembership
from baton.node.scripted_text import write_byte_tokenizer
from baton.node.secrets import prefix_secret, shared_prefix_secret, store_key
from baton.node.server_certificate import ServerCertificate, server_certificate
from baton.node.settings import EngineSettings, InstanceSettings
from baton.node.start_stages import StartStages
from baton.node.starting_share import full_share, lower_share
from baton.node.stderr_queue import stderr_lines_dropped
from baton.node.torch_import import block_torch_import
from baton.node.tracing import ProcessTraces
from baton.wire.instance_sessions import InstanceSessions
from baton.wire.request_proof import ProofChecker

HOST_CHARS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(InstanceSettings):
    engine: EngineSettings = field(default_factory=lambda: EngineSettings("", None, b""))
    """Endpoint, model folder, secret and cluster key are filled in at the start."""

    def __post_init__(self) -> None:
        check_load_format(self.model, self.load_format)
        check_device(self.engine)
        check_pairing(self.engine)
        check_storage(self.engine)
        check_trust(self.engine.transfer, self.engine.kv_store, self.engine.trust_network)
        check_kv_events(self.engine)
        check_events_trust(self.engine)
        check_endpoint(self.otlp_endpoint)
        check_host(self.host, self.api_keys)
        check_admin_key(self.admin_key)

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_names or (model_name(self.model),)


def serve(settings: ServeSettings, say: Say, stages: StartStages, launched: LaunchedEngine | None = None) -> None:
    """Serve until told to stop. Raises CannotServe where it ends for another reason. `launched`: the engine's process, where
    it waits for its settings already."""
    ignore_dump_signal()
    raise_descriptor_limit()
    if settings.engine.router is not None:
        lower_share()
    api, limits = api_settings(settings, settings.names), http_limits(settings)
    certificate = server_certificate(settings)
    tell_clear_links(clear_links_of_http(settings) + clear_links_of_instance(settings.engine))
    listener = bind(settings.host, settings.port, "--port")
    try:
        with process_scratch() as scratch:
            text_folder, engine = _prepare(settings, scratch, stages)
            block_torch_import()
            with used_model(text_folder):
                instance = _Instance(settings, api, limits, certificate, engine, say, stages, launched)
                uvloop.run(instance.run(listener, text_folder))
    finally:
        listener.close()


def _prepare(settings: ServeSettings, scratch: Path, stages: StartStages) -> tuple[Path, EngineSettings]:
    """The folder of the tokeniser, and the completed engine settings."""
    if not settings.scripted:
        need_torch()
    key = cluster_key(settings.engine, settings.cluster_key, settings.cluster_key_file, cache_folder())
    secret = _prefix_secret(settings, key)
    base = replace(settings.engine, prefix_secret=secret, cluster_key=key)
    if settings.scripted:
        write_byte_tokenizer(scratch)
        return scratch, base
    own_template = settings.chat_template is None and settings.engine.router is None  # a router writes the prompts
    folder = resolve_model(
        settings.model,
        stages,
        own_template=own_template,
        context_tokens=base.context_tokens,
        as_safetensors=wants_safetensors(base),
    )
    return folder, replace(base, model_folder=str(folder))


def _prefix_secret(settings: ServeSettings, key: bytes) -> bytes:
    """Under a router or with a store, derived from what all sharers of prefixes have; else this machine's own."""
    store = settings.engine.kv_store
    if settings.engine.router is not None:
        return shared_prefix_secret(key)
    if store is None:
        return prefix_secret(cache_folder())
    is_given = settings.cluster_key is not None or settings.cluster_key_file is not None
    return shared_prefix_secret(key if is_given else key_for((), store_key(store, cache_folder()), None, cache_folder()))


def default_name(host: str, role: str, port: int) -> str:
    """Includes the host: two machines with the same role and port are two instances."""
    short = re.sub(r"[^A-Za-z0-9_-]+", "-", host.partition(".")[0])[:HOST_CHARS_MAX].strip("-")
    return f"{short or 'host'}-{role}-{port}"


class _Instance:
    def __init__(
        self,
        settings: ServeSettings,
        api: ApiSettings,
        limits: HttpLimits,
        certificate: ServerCertificate | None,
        engine: EngineSettings,
        say: Say,
        stages: StartStages,
        launched: LaunchedEngine | None,
    ) -> None:
        self._settings = settings
        self._api = api
        self._limits = limits
        self._certificate = certificate
        self._engine_settings = engine
        self._say = say
        self._stages = stages
        self._launched = launched
        self._incarnation = time.time_ns()
        self._signals = StopSignals()

    async def run(self, listener: socket.socket, text_folder: Path) -> None:
        self._signals.listen()
        engine = EngineClient(self._engine_settings, self._stages.begin, self._launched)
        on_dump_signal(engine.order_dump)
        try:
            self._stages.begin("starting the engine")
            await engine.start()
            load = load_byte_text if self._settings.scripted else load_text
            text = await asyncio.to_thread(load, text_folder)
            if self._engine_settings.router is not None:
                await asyncio.to_thread(full_share)
            if not await self._ready(engine):
                return
            metrics = Metrics(engine, self._settings.names[0], stderr_lines_dropped, self._settings.metrics_names)
            compiler = ConstraintWorkers(text_folder, metrics)
            if ROLES[self._engine_settings.role].serves and self._engine_settings.router is None:
                compiler.start_early()  # behind a router, clients ask the router
            try:
                await self._serve(engine, text, listener, metrics, compiler)
            finally:
                await compiler.close()
        finally:
            await engine.close()

    async def _ready(self, engine: EngineClient) -> bool:
        """Wait for the engine; False when a signal came first."""
        ready, stop = asyncio.ensure_future(engine.wait_ready()), asyncio.ensure_future(self._signals.stop.wait())
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not ready.done():
            ready.cancel()
            return False
        try:
            ready.result()
        except EngineDead as death:
            raise CannotServe(f"the engine did not start: {death}") from None
        return True

    async def _serve(
        self,
        engine: EngineClient,
        text: ModelText,
        listener: socket.socket,
        metrics: Metrics,
        compiler: ConstraintWorkers,
    ) -> None:
        key = self._engine_settings.cluster_key
        proofs = ProofChecker(key, time.time) if key else None
        facts = self._facts(engine, listener)
        membership = self._membership(engine, facts)
        traces = self._traces(engine, facts.name, metrics)
        own = None if membership is not None else OwnDashboard(engine, facts, self._settings.admin_key)
        if own is None:
            admins = () if self._settings.admin_key is None else (self._settings.admin_key,)
            api = replace(self._api, metrics_keys=(*self._api.metrics_keys, *admins))
            app = create_app(engine, text, api, metrics, self._extras(membership), proofs, compiler, traces.tracing)
        else:
            app = own.app(text, self._api, metrics, proofs, compiler, traces.tracing)
        http = HttpServer(app, self._limits, metrics.count_http_refusal, self._certificate)
        serving = http.start(listener)
        freeze_gc()
        self._say(f"{self._stages.summary()}\n{self._banner(engine, listener)}")
        async with (
            state_logged(engine, lambda: engine.tokens_made),
            contextlib.nullcontext() if own is None else own.sampled(),
        ):
            death = await self._until_over(engine, serving, membership)
        engine.give_up("this instance was stopped")  # open streams end with this error instead of a broken connection
        http.should_exit = True
        await serving
        await traces.close()
        if death is not None:
            raise CannotServe(death)

    def _traces(self, engine: EngineClient, name: str, metrics: Metrics) -> ProcessTraces:
        """Of clients that ask this instance; those of a router's clients are made by the router."""
        traces = ProcessTraces(self._settings, "baton", name)
        traces.show(metrics)
        if traces.tracing is not None:
            engine.histories = PhaseHistories(name, monotonic_us)
            engine.post(ReportChanges())
        return traces

    async def _until_over(
        self, engine: EngineClient, serving: asyncio.Task[None], membership: RouterMembership | None
    ) -> str | None:
        """Wait for the end of service. Returns the reason where it was not ordered."""
        dead, stop = asyncio.ensure_future(engine.wait_dead()), asyncio.ensure_future(self._signals.stop.wait())
        member = asyncio.ensure_future(_never() if membership is None else membership.run())
        await asyncio.wait((dead, stop, serving, member), return_when=asyncio.FIRST_COMPLETED)
        if stop.done() and not dead.done() and not member.done():
            await self._drain(engine, dead, member, membership)
        why = None
        if dead.done():
            why = f"the engine died: {dead.result()}"
        elif member.done():
            why = _why_fenced(member)
        await _leave_router(member, membership, why or "this instance was stopped")
        stop.cancel()
        dead.cancel()
        if engine.death is not None:
            await asyncio.sleep(DEATH_SHOWN_S)
        return why

    def _facts(self, engine: EngineClient, listener: socket.socket) -> Join:
        settings, info, port = self._engine_settings, engine.info, listener.getsockname()[1]
        return Join(
            name=Instance(settings.name or default_name(socket.gethostname(), settings.role, port)),
            incarnation=self._incarnation,
            role=settings.role,
            fingerprint=engine.fingerprint,
            url=url_of(listener, self._certificate),
            peer_address=engine.peer_address,
            slots=info.slots,
            blocks=info.blocks,
            block_size=info.block_size,
            context_tokens=info.context_tokens,
            vocabulary=info.vocabulary,
            pid=os.getpid(),
            draining=False,
        )

    def _membership(self, engine: EngineClient, facts: Join) -> RouterMembership | None:
        settings = self._engine_settings
        if settings.router is None:
            return None
        at = RouterAddress(*split_address("--router", settings.router), settings.cluster_key)
        membership = RouterMembership(facts.name, at, InstanceSessions(facts), engine, self._signals.stop.set)
        engine.share(membership)
        return membership

    def _extras(self, membership: RouterMembership | None) -> RouterExtras:
        """Without keys of its own, an instance leaves it to its router's keys who may generate."""
        router = self._engine_settings.router
        if membership is None or router is None or self._api.api_keys:
            return NO_ROUTER
        closed = Middleware(
            RouterOnlyMiddleware,
            error=lambda: closed_port_error(router, membership.router_is_keyed),
            proof_header=ProofChecker.header,
        )
        return RouterExtras(inner=(closed,))

    async def _drain(
        self,
        engine: EngineClient,
        dead: asyncio.Future[str],
        fenced: asyncio.Future[None],
        membership: RouterMembership | None,
    ) -> None:
        self._say(f"draining: {engine.open_requests} requests open (once more to stop at once)")
        if membership is not None:
            membership.leave()
        engine.drain()
        idle = asyncio.ensure_future(engine.wait_idle())
        at_once = asyncio.ensure_future(self._signals.at_once.wait())
        ends = (idle, at_once, dead, fenced)
        await asyncio.wait(ends, timeout=self._settings.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if engine.open_requests and not (dead.done() or fenced.done()):
            self._say(f"stopping with {engine.open_requests} requests open")
        idle.cancel()
        at_once.cancel()

    def _banner(self, engine: EngineClient, listener: socket.socket) -> str:
        info, url = engine.info, url_of(listener, self._certificate)
        served = (
            f"{self._settings.names[0]} is served at {url} — {engine.details}, "
            f"{info.slots} slots, {info.blocks} blocks of {info.block_size} tokens, context {info.context_tokens}\n"
        )
        if self._engine_settings.router is not None:
            return f"{served}for the router at {self._engine_settings.router}"
        if ROLES[self._engine_settings.role].serves:
            return f"{served}watch it at {url}/dashboard, talk to it with: baton chat --url {url}"
        return f"{served}ask it through an instance with --role decode and --peer to that address"


async def _never() -> None:
    await asyncio.Event().wait()


def _why_fenced(member: asyncio.Future[None]) -> str:
    error = member.exception()
    if not isinstance(error, InstanceFenced):
        raise error or CannotServe("the membership ended by itself")
    return str(error)


async def _leave_router(member: asyncio.Future[None], membership: RouterMembership | None, reason: str) -> None:
    """Stop reconnecting to the router; sent messages still arrive."""
    member.cancel()
    await asyncio.wait((member,))
    if membership is not None:
        await membership.close(reason)
