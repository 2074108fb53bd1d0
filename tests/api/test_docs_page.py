"""The page of the API in a real browser: what the document tells is there to read, after a key where one is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from tests.api.conftest import serving
from tests.api.engine import ScriptedEngine
from tests.support.browser import PALE, UNNAMED, Page, browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_operation_shows_its_fields_its_answers_and_a_call_once_a_key_is_given(
    browser: Browser, engine: ScriptedEngine, text: ModelText, scheme: str
) -> None:
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("sesame",))
    with serving(engine, text, settings) as served:
        seen = Page(browser, f"http://127.0.0.1:{served.port}/docs")
        page = seen.page
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("alert")).to_have_text("This key is not known here.")
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Use this key").click()
        chat = page.locator("[id='post/v1/chat/completions']")
        chat.locator("summary").first.click()
        expect(chat.get_by_role("row").filter(has_text="max_tokens").first).to_be_visible()
        expect(chat.locator("pre")).to_contain_text("-H 'Authorization: Bearer KEY'")
        expect(chat.locator("pre")).to_contain_text('"messages":[{"role":"user"')
        expect(chat.get_by_text("The queue is full; see Retry-After")).to_be_visible()
        assert page.evaluate(PALE) == []
        assert page.evaluate(UNNAMED) == []
        assert [one for one in seen.complaints if "401" not in one] == []
