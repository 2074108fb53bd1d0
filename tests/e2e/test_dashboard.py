"""The dashboard in a real browser: a visitor kills the instance that answers, and reads on."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

import httpx2 as httpx
import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, expect
from starlette.requests import Request
from starlette.responses import Response

from baton.api.auth import ApiKeys, AuthMiddleware
from baton.api.errors import ApiError
from baton.core.engine.gauges import SchedulerGauges
from baton.core.routing.events import FleetChanged, Instance, Join, TimelineNoted, TimelineStage
from baton.core.routing.identity import RequestNumber
from baton.node.admin_auth import AdminAuth
from baton.node.dashboard import OPEN_PATHS, Dashboard
from baton.node.dashboard_state import DashboardState
from tests.support.browser import PALE, UNNAMED, Page, browsing
from tests.support.fleet import FleetProcess, baton_up
from tests.support.server import baton_serve

QUESTION = "Does the answer go on when its instance dies? (3)"
"""The scripted model has more than TOKENS to say to it."""
TOKENS = 128


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def fleet() -> Iterator[FleetProcess]:
    """A router for demonstrations, one instance that prefills and two that decode, slow enough to be watched."""
    with baton_up("--demo", "--executor", "scripted", "--step-ms", "25") as up:
        yield up


def undisturbed(url: str) -> str:
    """What the page's chat asks for, in one piece."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS,
            "temperature": 0.7, "seed": 7}  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == TOKENS
    return str(answer["choices"][0]["message"]["content"])


def test_a_visitor_kills_the_instance_that_answers_and_the_answer_goes_on(browser: Browser, fleet: FleetProcess) -> None:
    with ThreadPoolExecutor(1) as aside:
        whole = aside.submit(undisturbed, fleet.url)
        seen = Page(browser, f"{fleet.url}/dashboard")
        page = seen.page
        expect(page.locator(".card .state-ready")).to_have_count(3)
        expected = whole.result()

    page.select_option("#length", str(TOKENS))
    page.fill("#question", QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".words")).not_to_be_empty()
    served = page.locator("#serving b").first.inner_text()
    expect(page.locator(".card.serves-me h3")).to_have_text(served)
    page.click("#kill")
    expect(page.locator(".said.assistant")).to_have_attribute("aria-busy", "false")

    assert page.locator(".words").text_content() == expected
    assert page.locator(".fault").count() == 0
    told = page.locator(".moved-line").inner_text()
    found = re.fullmatch(rf"Moved from {served} to (decode-\d) after (\d+) tokens\.", told)
    assert found, told
    assert found[1] != served
    assert 0 < int(found[2]) < TOKENS
    before = page.evaluate("document.querySelector('.seam').previousSibling.data")
    assert expected.startswith(before)
    assert len(before) < len(expected)

    mark = page.locator('.lane.mine [data-mark="moved"]')
    expect(mark).to_have_attribute(
        "data-tip", re.compile(rf"moved from {served} to {found[1]} after {found[2]} tokens\nlost")
    )
    expect(page.locator("#events")).to_contain_text(f"{served} lost")
    page.locator(".lane.mine").press("Enter")
    stages = page.locator("#detail tbody tr td:first-child").all_inner_texts()
    assert stages.count("moving") == 1
    assert stages[-1] == "decode"
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    fits_and_is_legible(seen)
    assert seen.complaints == []


def test_a_lone_instance_has_the_dashboard_too(browser: Browser) -> None:
    with baton_serve("--executor", "scripted", "--step-ms", "5", "--admin-key", "sesame") as server:
        assert httpx.get(f"{server.url}/dashboard/state").status_code == 401
        assert httpx.get(f"{server.url}/dashboard/state", headers={"Authorization": "Bearer other"}).status_code == 403
        seen = Page(browser, f"{server.url}/dashboard")
        page = seen.page
        page.get_by_label("Admin key").fill("sesame")
        page.get_by_role("button", name="Use this key").click()
        expect(page.locator(".card .state-ready")).to_have_count(1)
        page.select_option("#length", str(TOKENS))
        page.fill("#question", QUESTION)
        page.keyboard.press("Enter")
        expect(page.locator(".said.assistant")).to_have_attribute("aria-busy", "false")
        assert page.locator(".fault").count() == 0
        assert len(page.locator(".words").text_content() or "") > 0
        expect(page.locator(".lane")).to_have_count(1)
        page.locator(".lane").press("Enter")
        stages = page.locator("#detail tbody tr td:first-child").all_inner_texts()
        assert stages[-2:] == ["prefill", "decode"]
        page.keyboard.press("Escape")
        expect(page.locator("#tiles").get_by_text("Moves")).to_have_count(0)
        assert "router" not in page.locator("body").inner_text()
        fits_and_is_legible(seen)
        assert [one for one in seen.complaints if "401" not in one] == []


def fits_and_is_legible(seen: Page) -> None:
    page = seen.page
    grounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for width in (390, 820, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (
                f"{scheme}, {width} px: it scrolls sideways"
            )
        assert page.evaluate(PALE) == [], scheme
    assert len(grounds) == 2
    assert page.evaluate(UNNAMED) == [], "controls without a name"


# ── without a fleet: a key, hostile text, a router that is away ──────────────────────────────────────────────────────────

HOSTILE = "<img src=x onerror=alert(1)>\u202e'\"&amp;"


LEDGER = SchedulerGauges(free_blocks=60, evictable_blocks=30, running_blocks=10)


@dataclass
class View:
    facts: Join
    ledger: SchedulerGauges = LEDGER
    state: str = "ready"
    open: int = 1


def hostile_state() -> DashboardState:
    state, name = DashboardState(0), Instance(HOSTILE)
    state.request_received(RequestNumber(1), HOSTILE, HOSTILE, 3, 1, 1_000_000)
    for at, stage in enumerate(TimelineStage, 1):
        state.take(TimelineNoted(RequestNumber(1), 0, stage, name, at * 1_000_000, HOSTILE), 0)
    state.take(FleetChanged(name, 1, HOSTILE, HOSTILE), 3_000_000)
    facts = Join(name, 2**62, HOSTILE, b"", HOSTILE, "", 8, 100, 16, 1024, 257)
    state.sample([View(facts)], 0, 9_000_000)
    return state


@contextmanager
def site(state: DashboardState, key: str, admin_key: str) -> Iterator[str]:
    app = FastAPI()

    async def error(_: Request, error: ApiError) -> Response:
        return error.response()

    app.exception_handler(ApiError)(error)
    app.add_middleware(AdminAuth, admin_key=admin_key)
    app.add_middleware(AuthMiddleware, keys=ApiKeys([key, admin_key]), open_paths=OPEN_PATHS)
    Dashboard(state, lambda: 12_000_000, list).install(app)
    app.add_api_route("/v1/models", lambda: {"data": [{"id": HOSTILE}]})
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def test_a_key_is_asked_for_text_stays_text_and_a_router_that_is_away_comes_back(browser: Browser) -> None:
    with site(hostile_state(), key="tenant", admin_key="right") as url:
        seen = Page(browser, f"{url}/dashboard", width=390)
        page = seen.page
        for key, then in (
            ("wrong", "#key-dialog:has-text('not known')"),
            ("tenant", "#key-dialog:has-text('may not see')"),
            ("right", "#link[data-link=live]"),
        ):
            page.fill("#key", key)
            page.click("#key-form button")
            page.wait_for_selector(then)
        expect(page.locator("#kill")).to_be_hidden()

        for place in (".card h3", ".role", "#model", "#events b"):
            expect(page.locator(place).first).to_have_text(HOSTILE)
        page.locator(".lane").press("Enter")
        expect(page.locator("#detail-title")).to_have_text(f"Request {HOSTILE}")
        page.keyboard.press("Escape")
        assert page.locator("img").count() == 1, "the mark of the page itself"
        fits_and_is_legible(seen)
        refused = [text for text in seen.complaints if "401" not in text and "403" not in text]
        assert refused == []

        page.route("**/dashboard/state*", lambda route: route.abort())
        expect(page.locator("#away")).to_contain_text("does not answer")
        page.unroute("**/dashboard/state*")
        expect(page.locator("#away")).to_be_hidden()
        expect(page.locator("#link-text")).to_have_text("Live")
