"""What a server says of itself to whoever comes by: a person with a browser, a load balancer, a page of another origin."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton import __version__
from baton.api.engine import NotServing
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.node.http_server import CannotServe, check_origins
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine

ORIGIN = "https://chat.example"


@pytest.fixture
def open_to_a_page(engine: ScriptedEngine, text: ModelText) -> Iterator[Served]:
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("one",), allowed_origins=(ORIGIN,))
    with serving(engine, text, settings) as running:
        yield running


def test_the_root_tells_what_this_is_and_where_to_look(served: Served) -> None:
    about = served.call("GET", "/").json()
    assert about["name"] == "baton"
    for path in about["paths"].values():
        assert served.call("GET", path).status in (200, 405), path
    assert served.call("GET", "/version").json() == {"version": __version__}


def test_without_a_key_the_root_and_ping_answer_and_the_version_does_not(open_to_a_page: Served) -> None:
    assert open_to_a_page.call("GET", "/").status == open_to_a_page.call("GET", "/ping").status == 200
    assert "tiny" not in open_to_a_page.call("GET", "/").body.decode()
    assert open_to_a_page.call("GET", "/version").status == 401


def test_a_dead_engine_does_not_answer_a_ping(served: Served, engine: ScriptedEngine) -> None:
    assert served.call("GET", "/ping").status == 200
    engine.death = NotServing("it has crashed")
    assert served.call("GET", "/ping").status == 503


@pytest.mark.parametrize(
    "path", ["/", "/ping", "/version", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny"]
)
def test_head_has_the_headers_of_get_and_no_body(served: Served, path: str) -> None:
    got, head = served.call("GET", path), served.call("HEAD", path)
    assert (head.status, head.headers["content-type"]) == (got.status, got.headers["content-type"])
    assert head.body == b""
    assert got.body


def test_only_pages_of_an_allowed_origin_may_call(open_to_a_page: Served) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in ((ORIGIN, ORIGIN), ("https://elsewhere.example", None)):
        before = open_to_a_page.call("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **asked})
        assert before.headers.get("access-control-allow-origin") == allowed
        reply = open_to_a_page.chat(headers={"Origin": origin, "Authorization": "Bearer one"})
        assert (reply.status, reply.headers.get("access-control-allow-origin")) == (200, allowed)


@pytest.mark.parametrize(
    "origin",
    ["chat.example", "https://chat.example/", "ftp://x", "https://a b", "", "https://*.example", "https://A.example"],
)
def test_what_is_no_origin_is_refused_by_name(origin: str) -> None:
    with pytest.raises(CannotServe, match=r"--allowed-origins .* is not an origin"):
        check_origins([origin], ["key"])


def test_every_origin_needs_a_key() -> None:
    check_origins(["*"], ["key"])
    check_origins(["http://127.0.0.1:3000"], [])
    with pytest.raises(CannotServe, match="no API key is set"):
        check_origins(["*"], [])


def test_the_page_of_the_api_loads_nothing_from_elsewhere_and_needs_no_key(open_to_a_page: Served) -> None:
    page = open_to_a_page.call("GET", "/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    parts = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
    assert "/docs/docs.js" in parts
    for path in parts:
        wanted = 401 if path == "/openapi.json" else 200
        assert open_to_a_page.call("GET", path).status == wanted, path
        if wanted == 200:
            assert not re.search(rb"https?://(?!www\.w3\.org)", open_to_a_page.call("GET", path).body), path
    assert open_to_a_page.call("GET", "/docs/app.py").status == 401
    assert open_to_a_page.call("GET", "/docs/app.py", headers={"Authorization": "Bearer one"}).status == 404


def test_the_document_says_which_paths_need_no_key(open_to_a_page: Served) -> None:
    document = open_to_a_page.call("GET", "/openapi.json", headers={"Authorization": "Bearer one"}).json()
    assert document["info"]["version"] == __version__
    for path, operations in document["paths"].items():
        for operation in operations.values():
            needs_none = operation.get("security", document["security"]) == []
            assert needs_none == (path in ("/", "/ping", "/health", "/ready")), path
            assert operation["summary"]
