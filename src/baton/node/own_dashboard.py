"""The dashboard of an instance without a router: itself, its requests and its gauges. Same access as at a router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from fastapi import FastAPI
from starlette.middleware import Middleware

from baton.api.app import RouterExtras, create_app
from baton.api.constraint_compiler import ConstraintCompiler
from baton.api.continuation import RequestProofs
from baton.api.engine import Engine
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.api.tracing.request_tracing import RequestTracing
from baton.core.routing.events import Join
from baton.node.admin_auth import AdminAuth
from baton.node.clock import monotonic_us
from baton.node.dashboard import OPEN_PATHS, PAGE, Dashboard
from baton.node.dashboard_state import DashboardState
from baton.node.watched_engine import WatchedEngine

SAMPLE_S = 1.0
"""Seconds between two points of the dashboard's curves."""
INSTANCE = "instance"


class OwnDashboard:
    def __init__(self, engine: Engine, facts: Join, admin_key: str | None) -> None:
        state = DashboardState(monotonic_us())
        self.engine = WatchedEngine(engine, state, facts, monotonic_us)
        self._admin_key = admin_key
        self._page = Dashboard(state, monotonic_us, lambda: [self.engine.view()], server=INSTANCE)

    def app(
        self,
        text: ModelText,
        settings: ApiSettings,
        metrics: Metrics,
        proofs: RequestProofs | None = None,
        compiler: ConstraintCompiler | None = None,
        tracing: RequestTracing | None = None,
    ) -> FastAPI:
        """The HTTP surface of the engine, with the dashboard."""
        key = self._admin_key
        operators = () if key is None else (Middleware(AdminAuth, admin_key=key),)
        if key is not None:
            settings = replace(settings, metrics_keys=(*settings.metrics_keys, key))
        if settings.api_keys and key is not None:
            settings = replace(settings, api_keys=(*settings.api_keys, f":{key}"))  # unchanged
        extras = RouterExtras(
            inner=operators,
            open_paths=frozenset(OPEN_PATHS),
            operator_keys=len(operators),
            links={"dashboard": PAGE},
        )
        made = create_app(self.engine, text, settings, metrics, extras, proofs, compiler, tracing)
        self._page.install(made)
        return made

    @contextlib.asynccontextmanager
    async def sampled(self) -> AsyncIterator[None]:
        """Inside this context the curves go on."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()

    async def _sample(self) -> None:
        while True:
            self.engine.sample()
            await asyncio.sleep(SAMPLE_S)
