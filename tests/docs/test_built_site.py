"""The site that `make docs` builds: no warning, nothing loaded from elsewhere, a search that finds, light and dark.

Needs the environment of `make docs`, and is skipped without it: nothing else installs those tools.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.support.browser import browsing

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.exists(), reason="make docs has not been run here"),
]


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Not to standard error."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_every_link_of_the_site_leads_somewhere_and_no_page_loads_from_elsewhere(site: Path) -> None:
    checker = ROOT / "tools" / "docs" / "check_site.py"
    done = subprocess.run(
        [sys.executable, str(checker), str(site)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_search_finds_a_page_and_asks_nobody_else(address: str) -> None:
    with browsing() as browser:
        page = browser.new_page()
        asked = list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        page.click(".md-search__input")
        page.get_by_text("Type to start searching").wait_for(state="attached")
        page.locator(".md-search__input").press_sequentially("engine_dead")  # it searches when a key is released
        page.wait_for_selector(".md-search-result__item a[href*='runbook.html']", state="attached")
        assert all(url.startswith((address, "data:")) for url in asked), asked


@pytest.mark.parametrize(("scheme", "named"), [("light", "default"), ("dark", "slate")])
def test_the_page_is_light_or_dark_as_the_reader_wishes(address: str, scheme: Any, named: str) -> None:
    with browsing() as browser:
        page = browser.new_page(color_scheme=scheme)
        page.goto(f"{address}/fleet.html")
        page.wait_for_selector(f"body[data-md-color-scheme='{named}']")
        assert page.evaluate("document.querySelector('img[src$=\"move.svg\"]').naturalWidth") > 0
