"""The port of an instance without keys, whose router has some: it computes nothing there."""

from __future__ import annotations

import asyncio

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from baton.api.app import create_app
from baton.api.model_text import ModelText
from baton.api.router_only import CLOSED_PATHS, PROVABLE_PATHS, RouterOnlyMiddleware, closed_port_error
from baton.api.settings import ApiSettings
from tests.api.engine import ScriptedEngine

PROOF = "Baton-Cluster-Proof"
OPEN_PATHS = ("/health", "/ready", "/metrics", "/v1/models")


def status_of(path: str, router_is_keyed: bool | None, **headers: str) -> int:
    async def reached(_: Request) -> PlainTextResponse:
        return PlainTextResponse("reached")

    closed = Middleware(
        RouterOnlyMiddleware, error=lambda: closed_port_error("127.0.0.1:8200", router_is_keyed), proof_header=PROOF
    )
    app = Starlette(routes=[Route("/{path:path}", reached, methods=["GET", "POST"])], middleware=[closed])

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.post(path, headers=sent, content=b"{}")

    answer = asyncio.run(ask())
    if answer.status_code != 200:
        assert "127.0.0.1:8200" in answer.json()["error"]["message"]
    return answer.status_code


@pytest.mark.parametrize(("router_is_keyed", "status"), [(True, 403), (None, 503), (False, 200)])
def test_what_computes_is_closed_unless_the_router_needs_no_key(router_is_keyed: bool | None, status: int) -> None:
    for path in sorted(CLOSED_PATHS):
        assert status_of(path, router_is_keyed) == status, path
        assert status_of(path, router_is_keyed, Authorization="Bearer sk-any") == status, path
    for path in OPEN_PATHS:
        assert status_of(path, router_is_keyed) == 200, path


def test_every_path_that_takes_a_body_is_closed(engine: ScriptedEngine, text: ModelText) -> None:
    app = create_app(engine, text, ApiSettings(served_model_names=("tiny",)))
    taking = {route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    assert taking == CLOSED_PATHS


def test_a_proof_passes_only_where_the_route_checks_it() -> None:
    for path in sorted(CLOSED_PATHS):
        expected = 200 if path in PROVABLE_PATHS else 403
        assert status_of(path, True, Baton_Cluster_Proof="v1 …".encode("ascii", "replace").decode()) == expected, path
