"""What a router says of itself to whoever comes by, with and without keys: a browser, a load balancer, a page of another
origin."""

from __future__ import annotations

import re

import pytest

from baton import __version__
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from tests.router.fleet import Fleet
from tests.router.fleet import fleet as running

ORIGIN, ELSEWHERE = "https://chat.example", "https://elsewhere.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def settings(*keys: str) -> ApiSettings:
    return ApiSettings(served_model_names=("tiny",), api_keys=keys, allowed_origins=(ORIGIN,))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def allowed(fleet: Fleet, method: str, path: str, origin: str, **headers: str) -> tuple[int, str | None]:
    reply = fleet.served.call(method, path, headers={"Origin": origin, **headers})
    return reply.status, reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("keys", [(), ("tenant",)], ids=["open", "keyed"])
def test_a_balancer_is_answered_without_a_key_and_the_version_is_for_those_who_have_one(
    text: ModelText, keys: tuple[str, ...]
) -> None:
    with running(text, settings(*keys), admin_key="operator") as fleet:
        for method in ("GET", "HEAD"):
            reply = fleet.served.call(method, "/ping")
            assert (reply.status, bool(reply.body)) == (200, method == "GET")
        assert fleet.served.call("GET", "/version").status == (401 if keys else 200)
        assert fleet.served.call("GET", "/version", headers=bearer("other")).status == (401 if keys else 200)
        known = fleet.served.call("GET", "/version", headers=bearer("tenant"))
        assert (known.status, known.json()) == (200, {"version": __version__})


def test_the_root_of_a_router_names_paths_that_are_there(text: ModelText) -> None:
    with running(text, settings(), admin_key="operator") as fleet:
        fleet.add("a")
        about = fleet.served.call("GET", "/").json()
        assert about["name"] == "baton"
        assert "/dashboard" in about["paths"].values()
        for path in about["paths"].values():
            assert fleet.served.call("GET", path, headers=bearer("operator")).status in (200, 405), path


@pytest.mark.parametrize("keys", [(), ("tenant",)], ids=["open", "keyed"])
def test_the_page_of_the_api_loads_nothing_from_elsewhere_and_has_the_routers_own_paths(
    text: ModelText, keys: tuple[str, ...]
) -> None:
    with running(text, settings(*keys), admin_key="operator") as fleet:
        page = fleet.served.call("GET", "/docs")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        parts = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
        assert {"/docs/docs.js", "/openapi.json"} <= set(parts)
        for path in parts:
            reply = fleet.served.call("GET", path)
            assert reply.status == (401 if keys and path == "/openapi.json" else 200), path
            assert reply.status == 401 or not re.search(rb"https?://(?!www\.w3\.org)", reply.body), path
        document = fleet.served.call("GET", "/openapi.json", headers=bearer("tenant")).json()
        assert {"/v1/chat/completions", "/v1/instances", "/version", "/ping"} <= set(document["paths"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_page_of_an_allowed_origin_may_ask_a_router_and_no_other(text: ModelText, path: str) -> None:
    with running(text, settings("tenant"), admin_key="operator") as fleet:
        assert allowed(fleet, "OPTIONS", path, ORIGIN, **PREFLIGHT) == (200, ORIGIN)
        assert allowed(fleet, "OPTIONS", path, ELSEWHERE, **PREFLIGHT)[1] is None


def test_an_answer_and_a_refusal_of_a_router_can_be_read_by_an_allowed_origin_alone(text: ModelText) -> None:
    with running(text, settings("tenant"), admin_key="operator") as fleet:
        fleet.add("a")
        for origin, told in ((ORIGIN, ORIGIN), (ELSEWHERE, None)):
            answer = fleet.served.complete({"Origin": origin, **bearer("tenant")}, max_tokens=2)
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (200, told)
            assert allowed(fleet, "GET", "/v1/models", origin) == (401, told)
            assert allowed(fleet, "GET", "/v1/instances", origin, **bearer("operator")) == (200, told)
