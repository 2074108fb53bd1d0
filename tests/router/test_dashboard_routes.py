"""The dashboard's routes: what is open, what the browser must refuse, and the checks of a kill."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.testclient import TestClient

from baton.api.errors import ApiError
from baton.core.engine.gauges import SchedulerGauges
from baton.core.routing.events import Instance, Join
from baton.core.routing.identity import RequestNumber
from baton.node.dashboard import OPEN_PATHS, TOKEN_HEADER, Dashboard
from baton.node.dashboard_state import DashboardState
from baton.node.peer_options import is_loopback
from tests.support.waiting import wait_until

HOST = "127.0.0.1:8000"
FACTS = Join(Instance("d1"), 7, "decode", b"", "http://127.0.0.1:9", "", 8, 100, 16, 1024, 257)


@dataclass
class View:
    facts: Join
    ledger: SchedulerGauges
    state: str = "ready"
    open: int = 0


class Site:
    """A dashboard in front of one instance, and a browser on this machine."""

    def __init__(self, facts: Join = FACTS, demo: bool = True, client: str = "127.0.0.1") -> None:
        state = DashboardState(0)
        state.request_received(RequestNumber(1), "</script><img src=x onerror=alert(1)>", "/v1/completions", 3, 1, 0)
        state.sample([View(facts, SchedulerGauges())], 0, 1)
        app = FastAPI()
        app.exception_handler(ApiError)(lambda _, error: error.response())
        Dashboard(state, lambda: 2, lambda: [View(facts, SchedulerGauges())], demo).install(app)
        self.http = TestClient(app, base_url=f"http://{HOST}", client=(client, 5))
        found = re.search(r'name="baton-token" content="([^"]*)"', self.http.get("/dashboard").text)
        assert found
        self.token = found[1]

    def kill(self, body: object = None, **headers: str) -> Any:
        wanted = {"name": "d1", "incarnation": "7"} if body is None else body
        given = {
            "Origin": f"http://{HOST}",
            TOKEN_HEADER: self.token,
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        return self.http.post("/dashboard/kill", json=wanted, headers=given)


@pytest.fixture
def instance() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like an instance."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "baton", "serve"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_page_loads_nothing_from_elsewhere_and_has_no_script_of_its_own_inline() -> None:
    http = Site().http
    page = http.get("/dashboard")
    assert page.status_code == 200
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page.text) == [""]
    assert not re.search(r"\son\w+=|style=|<style|https?://", page.text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy
    assert "require-trusted-types-for 'script'" in policy
    for path in OPEN_PATHS - {"/dashboard"}:
        part = http.get(path)
        assert part.status_code == 200
        assert part.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", part.text), path
        assert not re.search(r"""(import|from|url\(|href=|src=)\s*["'(]?https?://""", part.text), path
    assert http.get("/dashboard/static/nothing.js").status_code == 404
    assert http.get("/dashboard/static/..%2fdashboard.py").status_code == 404


def test_every_part_that_the_page_and_its_scripts_name_is_packed() -> None:
    http = Site().http
    named = set(re.findall(r'"(/dashboard/static/[^"]+)"', http.get("/dashboard").text))
    for path in sorted(OPEN_PATHS):
        named |= {f"/dashboard/static/{name}" for name in re.findall(r'from "\./([^"]+)"', http.get(path).text)}
    assert named == OPEN_PATHS - {"/dashboard", "/dashboard/static/index.html"}


def test_the_state_is_json_that_is_not_cached_and_bad_questions_are_refused() -> None:
    http = Site().http
    state = http.get("/dashboard/state")
    assert state.headers["content-type"] == "application/json"
    assert state.headers["cache-control"] == "no-store"
    told = json.loads(state.content)
    assert told["requests"][0]["id"].startswith("</script>"), "text goes as it is; the page shows it as text"
    again = http.get("/dashboard/state", params={"since": told["rev"], "epoch": told["epoch"]})
    assert json.loads(again.content)["requests"] == []
    assert http.get("/dashboard/state", params={"since": "x"}).status_code in (400, 422)


def test_a_kill_ends_the_process_of_the_instance_that_was_named(instance: subprocess.Popen[bytes]) -> None:
    site = Site(replace(FACTS, pid=instance.pid))
    wait_until(lambda: site.kill().status_code != 403)  # its command line is not there before it has begun
    assert instance.wait(10) == -9


def test_no_kill_without_demo(instance: subprocess.Popen[bytes]) -> None:
    site = Site(replace(FACTS, pid=instance.pid), demo=False)
    assert site.token == ""
    assert site.kill().status_code == 404
    assert instance.poll() is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": f"https://{HOST}"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "localhost.evil.example", "Origin": "http://localhost.evil.example"},
        {"Host": "[::1", "Origin": "http://[::1"},
        {"Host": "10.0.0.7:8000", "Origin": "http://10.0.0.7:8000"},
        {"X-Forwarded-For": "127.0.0.1"},
        {TOKEN_HEADER.replace("-", "_"): ""},
        {TOKEN_HEADER.replace("-", "_"): "x" * 43},
        {TOKEN_HEADER.replace("-", "_"): "é"},
    ],
    ids=lambda headers: " ".join(f"{name}={value[:24]}" for name, value in headers.items()),
)
def test_a_kill_that_this_page_did_not_send_is_refused(headers: dict[str, str], instance: subprocess.Popen[bytes]) -> None:
    site = Site(replace(FACTS, pid=instance.pid))
    encoded: Any = {name: value.encode("latin-1") if not value.isascii() else value for name, value in headers.items()}
    answer = site.kill(**encoded)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert instance.poll() is None


def test_a_kill_from_another_machine_is_refused(instance: subprocess.Popen[bytes]) -> None:
    assert Site(replace(FACTS, pid=instance.pid), client="10.0.0.7").kill().status_code == 403
    assert instance.poll() is None


def test_only_an_instance_of_this_machine_that_is_meant_is_killed(instance: subprocess.Popen[bytes]) -> None:
    here = replace(FACTS, pid=instance.pid)
    assert Site(here).kill({"name": "d1", "incarnation": "6"}).status_code == 404, "another life"
    assert Site(here).kill({"name": "d2", "incarnation": "7"}).status_code == 404
    assert Site(replace(here, url="http://10.0.0.7:9")).kill().status_code == 403, "a pid of another machine"
    for pid in (0, 1, -1, 2**30):
        assert Site(replace(FACTS, pid=pid)).kill().status_code == 403
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "other"])
    try:
        assert Site(replace(FACTS, pid=other.pid)).kill().status_code == 403, "not an instance: the pid is another's by now"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    for body in (
        [],
        {"name": "d1"},
        {"name": 1, "incarnation": "7"},
        {"name": "d1", "incarnation": "7", "pid": instance.pid},
    ):
        assert Site(here).kill(body).status_code == 400
    assert instance.poll() is None


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("", False), ("1.2.3.4", False),
     ("10.0.0.1", False), ("localhost.example", False), ("127.0.0.1.nip.io", False)],
)  # fmt: skip
def test_names_of_this_machine(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here
