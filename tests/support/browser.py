"""A real browser for tests, headless: Debian's chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser_path() -> str | None:
    return os.environ.get("BATON_TEST_BROWSER") or next((path for path in map(shutil.which, NAMES) if path), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}, and BATON_TEST_BROWSER is not set (see tools/browser.sh)")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # chromium's sandbox refuses to run as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A page that remembers what its console complained of."""

    def __init__(self, browser: Browser, url: str, width: int = 1280, height: int = 900) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)


PALE = """() => {
  // text whose contrast with the plain ground under it is below 4.5 (below 3 where it is large)
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      const [r, g, b, a = 1] = parts(style.backgroundColor);
      if (a === 1) return [r, g, b];
      if (style.backgroundImage !== "none" && !at.matches(".track")) return null;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest(":disabled, .unseen, option, svg")) continue;
    const under = ground(element);
    if (!under) continue;
    const style = getComputedStyle(element);
    const [high, low] = [light(parts(style.color)), light(under)].sort((a, b) => b - a);
    const enough = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
    const said = `${element.className || element.tagName}: ${element.textContent.slice(0, 40)}`;
    if ((high + 0.05) / (low + 0.05) < enough) found.push(said);
  }
  return found;
}"""

UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea")]
  .filter((control) => !control.labels?.length && !control.ariaLabel && !control.textContent.trim())
  .map((control) => control.outerHTML)"""
