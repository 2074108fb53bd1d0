"""The admin key: access to the fleet's state where one is set, and that all other paths are as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.cli.main import app
from baton.core.config import PREFILL
from baton.node.admin_auth import is_guarded
from baton.node.dashboard import OPEN_PATHS
from tests.router.fleet import Fleet
from tests.router.fleet import fleet as running
from tests.support.waiting import wait_until

GUARDED = [
    ("GET", "/v1/instances"),
    ("POST", "/v1/instances/a/drain"),
    ("GET", "/dashboard/state"),
    ("POST", "/dashboard/kill"),
    ("GET", "/dashboard/whatever-comes"),
]


def settings(*keys: str) -> ApiSettings:
    return ApiSettings(served_model_names=("tiny",), api_keys=keys)


def status(fleet: Fleet, method: str, path: str, key: str | None) -> tuple[int, str | None]:
    """The status, and the code of the error if it is one."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    reply = fleet.served.call(method, path, headers=headers)
    return reply.status, reply.error["code"] if reply.status >= 400 else None


@pytest.mark.parametrize("keys", [("tenant",), ()], ids=["keys for clients too", "no other keys"])
def test_only_the_admin_key_sees_and_changes_the_fleet(text: ModelText, keys: tuple[str, ...]) -> None:
    with running(text, settings(*keys), admin_key="operator") as fleet:
        member = fleet.add("a")
        for method, path in GUARDED:
            assert status(fleet, method, path, None) == (401, "invalid_api_key"), path
            assert status(fleet, method, path, "tenant") == (403, "admin_key_needed"), path
        assert status(fleet, "GET", "/v1/instances", "unknown")[0] == (401 if keys else 403)
        assert not member.drained
        assert status(fleet, "GET", "/v1/instances", "operator") == (200, None)
        assert status(fleet, "GET", "/dashboard/state", "operator") == (200, None)
        assert status(fleet, "POST", "/dashboard/kill", "operator") == (404, "not_found"), "no demonstration"


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/state", "/dashboard/static/app.js", "/v1/instances"])
def test_whatever_can_be_read_answers_head(text: ModelText, path: str) -> None:
    with running(text, settings(), admin_key="operator") as fleet:
        fleet.add("a")
        headers = {"Authorization": "Bearer operator"}
        got, asked = (fleet.served.call(method, path, headers=headers) for method in ("GET", "HEAD"))
        assert (asked.status, asked.body) == (200, b"")
        assert got.body
        is_open = path in OPEN_PATHS or path.startswith("/dashboard/static/")
        assert fleet.served.call("HEAD", path).status == (200 if is_open else 401)


def test_clients_and_probes_are_served_as_before_and_the_dashboards_chat_by_the_admin_key(text: ModelText) -> None:
    with running(text, settings("group:tenant"), admin_key="op:erator") as fleet:
        fleet.add("a")
        for key in ("tenant", "op:erator"):
            headers = {"Authorization": f"Bearer {key}"}
            assert fleet.served.complete(headers, max_tokens=2).status == 200
        for path in ("/health", "/ready", "/dashboard", "/dashboard/static/app.js"):
            assert status(fleet, "GET", path, None)[0] == 200
        assert status(fleet, "GET", "/v1/models", None)[0] == 401


@pytest.mark.parametrize(
    ("keys", "admin_key", "told"),
    [(("tenant",), None, {"tenant"}), (("tenant",), "operator", {"operator"}), ((), "operator", {"operator"})],
)
def test_a_router_that_is_not_ready_names_instances_to_those_only_who_may_see_them(
    text: ModelText, keys: tuple[str, ...], admin_key: str | None, told: set[str]
) -> None:
    with running(text, settings(*keys), admin_key=admin_key) as fleet:
        fleet.add("a-secret-name", role=PREFILL)
        for key in ("", "unknown", "tenant", "operator"):
            reply = fleet.served.call("GET", "/ready", headers={"Authorization": f"Bearer {key}"})
            assert (reply.status, reply.error["code"]) == (503, "no_instance")
            assert reply.error["message"].startswith("No instance of the role mixed or decode is ready")
            assert ("a-secret-name" in reply.error["message"]) == (key in told)


@pytest.mark.parametrize("keys", [("tenant",), ()], ids=["keys for clients too", "no other keys"])
def test_the_metrics_of_a_router_with_an_admin_key_are_read_with_it_or_the_metrics_key(
    text: ModelText, keys: tuple[str, ...]
) -> None:
    asked = replace(settings(*keys), metrics_keys=("scraper",))
    with running(text, asked, admin_key="operator") as fleet:
        assert status(fleet, "GET", "/metrics", "operator") == (200, None)
        assert status(fleet, "GET", "/metrics", "scraper") == (200, None)
        assert status(fleet, "GET", "/metrics", "tenant") == (403, "metrics_key_needed")
        assert status(fleet, "GET", "/metrics", "unknown")[0] == (401 if keys else 403)
        assert status(fleet, "GET", "/metrics", None) == (401, "invalid_api_key")
        if keys:
            assert status(fleet, "GET", "/v1/models", "scraper")[0] == 401, "it is no API key"
        assert status(fleet, "GET", "/v1/instances", "scraper")[0] == (401 if keys else 403), "nor an operator's"


def test_the_admin_key_alone_guards_the_metrics_too(text: ModelText) -> None:
    with running(text, settings("tenant"), admin_key="operator") as fleet:
        assert status(fleet, "GET", "/metrics", "operator") == (200, None)
        assert status(fleet, "GET", "/metrics", "tenant") == (403, "metrics_key_needed")


def test_without_an_admin_key_every_key_is_an_operators(text: ModelText) -> None:
    with running(text, settings("tenant")) as fleet:
        member = fleet.add("a")
        assert status(fleet, "GET", "/dashboard/state", "tenant")[0] == 200
        assert status(fleet, "POST", "/v1/instances/a/drain", "tenant")[0] == 200
        assert status(fleet, "GET", "/v1/instances", None)[0] == 401
        assert member.name == "a"


def test_baton_drain_takes_the_admin_key_and_says_so_where_it_is_another(text: ModelText) -> None:
    with running(text, settings("tenant"), admin_key="operator") as fleet:
        member = fleet.add("a")

        def drain(key: str) -> tuple[int, str]:
            url = f"http://127.0.0.1:{fleet.served.port}"
            result = CliRunner().invoke(app, ["drain", "a", "--url", url, "--api-key", key, "--no-wait"])
            return result.exit_code, result.output

        code, said = drain("tenant")
        assert (code, "admin key" in said, member.drained) == (1, True, False)
        assert drain("operator")[0] == 0
        wait_until(lambda: member.drained)


def test_what_is_guarded_is_a_path_and_all_below_it() -> None:
    assert not any(is_guarded(path) for path in OPEN_PATHS)
    assert not is_guarded("/v1/instances-of-something-else")
    assert is_guarded("/dashboard/")
    assert is_guarded("/v1/instances/")
