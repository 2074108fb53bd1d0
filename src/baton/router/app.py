"""The HTTP surface of a router: that of an instance, and the routes that only a fleet has.

GET    /v1/instances                the instances, and their latest events
POST   /v1/instances/{name}/drain   place nothing new there; it ends when it is empty
GET    /v1/requests/{id}/stream     resume an answer whose router was lost
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.responses import Response

from baton.api import openapi
from baton.api.app import RouterExtras, create_app
from baton.api.body_limits import PartialBodies
from baton.api.constraint_compiler import ConstraintCompiler
from baton.api.engine import NotServing
from baton.api.errors import ApiError
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText
from baton.api.responses import encode
from baton.api.settings import ApiSettings
from baton.api.tracing.request_tracing import RequestTracing
from baton.core.config import ROLES
from baton.core.engine.gauges import SchedulerGauges
from baton.core.routing.expected_instances import ExpectedInstances
from baton.core.routing.fleet_members import InstanceView
from baton.node.admin_auth import AdminAuth
from baton.node.dashboard import OPEN_PATHS, PAGE, Dashboard
from baton.router.fleet_engine import FleetEngine
from baton.router.fleet_log import FleetEventLog
from baton.router.idempotency import IdempotencyMiddleware
from baton.router.instance_connections import InstanceConnections


def create_router_app(
    engine: FleetEngine,
    sessions: InstanceConnections,
    event_log: FleetEventLog,
    dashboard: Dashboard,
    text: ModelText,
    settings: ApiSettings,
    metrics: Metrics,
    orphan_grace_s: float,
    admin_key: str | None = None,
    compiler: ConstraintCompiler | None = None,
    tracing: RequestTracing | None = None,
) -> FastAPI:
    partial_bodies = PartialBodies()
    idempotency = Middleware(
        IdempotencyMiddleware,
        grace_s=orphan_grace_s,
        body_bytes_max=settings.body_bytes_max,
        partial_bodies=partial_bodies,
    )
    if admin_key is not None:
        settings = replace(settings, metrics_keys=(*settings.metrics_keys, admin_key))
    operators = () if admin_key is None else (Middleware(AdminAuth, admin_key=admin_key),)
    if settings.api_keys and admin_key is not None:
        settings = replace(settings, api_keys=(*settings.api_keys, f":{admin_key}"))  # unchanged
    extras = RouterExtras(
        unclaimed=engine,
        missing=lambda: missing(engine.views(), engine.expected),
        inner=(idempotency, *operators),  # the last one is the outermost
        open_paths=frozenset(OPEN_PATHS),
        operator_keys=len(operators),
        links={"dashboard": PAGE, "instances": "/v1/instances"},
        partial_bodies=partial_bodies,
    )
    metrics.add(event_log)
    app = create_app(engine, text, settings, metrics, extras, compiler=compiler, tracing=tracing)
    _add_routes(app, engine, sessions, event_log)
    dashboard.install(app)
    return app


def _add_routes(app: FastAPI, engine: FleetEngine, sessions: InstanceConnections, event_log: FleetEventLog) -> None:
    async def instances() -> Response:
        data = [shown(view) for view in engine.views()]
        return _json({"object": "list", "data": data, "events": event_log.events()})

    async def drain(name: str, request: Request) -> Response:
        if "origin" in request.headers:  # every browser sends it; without a key any page could have sent this
            raise ApiError(403, "Pages may not drain instances; use: baton drain", code="not_for_pages")
        if not any(view.facts.name == name for view in engine.views()):
            known = ", ".join(view.facts.name for view in engine.views()) or "none"
            message = f"No instance is called '{name[:128]}'; those of this router are: {known}"
            raise ApiError(404, message, param="name", code="not_found")
        sessions.drain(name)
        lacks = missing(engine.views(), engine.expected)
        warning = {} if lacks is None else {"warning": f"{lacks}: new requests wait, and are refused when nobody comes"}
        return _json({"name": name, "object": "instance", "draining": True} | warning)

    for path, method, endpoint, told in (
        ("/v1/instances", "GET", instances, openapi.INSTANCES),
        ("/v1/instances/{name}/drain", "POST", drain, openapi.DRAIN),
    ):
        app.add_api_route(
            path, endpoint, methods=[method], response_model=None, response_class=Response, summary=told.summary,
            responses=told.responses,
        )  # fmt: skip
    app.add_api_route("/v1/instances", instances, methods=["HEAD"], response_model=None, include_in_schema=False)


def shown(view: InstanceView) -> dict[str, object]:
    facts = view.facts
    return {
        "name": facts.name,
        "object": "instance",
        "role": facts.role,
        "state": view.state,
        "pid": facts.pid,
        "incarnation": facts.incarnation,
        "url": facts.url,
        "peer_address": facts.peer_address,
        "slots": facts.slots,
        "blocks": facts.blocks,
        "block_size": facts.block_size,
        "context_tokens": facts.context_tokens,
        "open": view.open,
        "heard_ago_ms": view.heard_ago_us / 1000,
        "ledger": ledger_fields(view.ledger),
    }


def ledger_fields(gauges: SchedulerGauges) -> dict[str, int]:
    """The gauges of an instance, as shown to operators."""
    return {
        "running": gauges.running,
        "waiting": gauges.waiting,
        "free": gauges.free_blocks,
        "evictable": gauges.evictable_blocks,
        "used": gauges.running_blocks,
        "leased": gauges.leased_blocks,
        "receiving": gauges.receiving_blocks,
        "leaving": gauges.leaving_blocks,
        "host_blocks": gauges.storage.host_rows,
        "host_used": gauges.storage.host_used,
        "steps": gauges.steps,
        "preemptions": gauges.preemptions,
        "handovers": gauges.handovers.made,
        "prefix_queries": gauges.prefix_queries,
        "prefix_hits": gauges.prefix_hits,
    }


def missing(views: list[InstanceView], expected: ExpectedInstances) -> NotServing | None:
    """Why a router is not ready; None when it is."""
    if any(view.state == "ready" and ROLES[view.facts.role].serves for view in views):
        return None
    there = ", ".join(f"{view.facts.name} ({view.facts.role}, {view.state})" for view in views) or "nobody"
    reason = "No instance of the role mixed or decode is ready"
    if expected.missing:
        reason += f"; {expected.number - expected.missing} of {expected.number} expected ones have come so far"
    return NotServing(reason, f"there is {there}")


def _json(content: object) -> Response:
    return Response(encode(content), media_type="application/json")
