"""What the site is built from, checked without its tools: links, anchors, lists, pins, and nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, page_names, prose_of, read
from tests.docs.test_names import links_of, slug

TOOLS = ROOT / "tools" / "docs"
CHECKER = TOOLS / "check_site.py"
SITE = [page for page in page_names() if page.startswith("docs/")]
PINNED = re.compile(r"^([\w.-]+)==(\S+?)(?: \\)?$", re.MULTILINE)
ITEM = re.compile(r"^(?:[-*] |\d+\. )")


def headings(page: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)


def anchor_of(heading: str) -> str:
    """As the site makes it. GitHub's (`slug`) differs where signs stand between spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = text.encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", SITE)
def test_pages_link_to_pages_of_the_site_alone(page: str) -> None:
    for target, _ in links_of(page):
        assert target.startswith("docs/"), f"{page}: {target} is not in the site"


def test_the_first_page_links_to_every_other() -> None:
    linked = {target for target, _ in links_of("docs/index.md")}
    assert linked == set(SITE) - {"docs/index.md"}


@pytest.mark.parametrize("page", SITE)
def test_an_anchor_is_the_same_in_the_site_and_on_github(page: str) -> None:
    for target, anchor in links_of(page):
        if anchor:
            found = [one for one in headings(target) if slug(one) == anchor[1:]]
            assert [anchor_of(one) for one in found][:1] == [anchor[1:]], f"{page}: {target}{anchor}"


@pytest.mark.parametrize("page", SITE)
def test_headings_of_a_page_have_anchors_of_their_own(page: str) -> None:
    """A second anchor of the same name is numbered, and a link to it moves when headings do."""
    linked = {anchor[1:] for other in page_names() for target, anchor in links_of(other) if target == page and anchor}
    anchors = [anchor_of(one) for one in headings(page)]
    assert all(anchors.count(anchor) == 1 for anchor in linked)


@pytest.mark.parametrize("page", SITE)
def test_lists_and_tables_stand_behind_an_empty_line(page: str) -> None:
    """GitHub shows them otherwise too, the site as one paragraph."""
    lines = ["", *prose_of(page).splitlines()]
    for above, line in pairwise(lines):
        if ITEM.match(line) and above.strip():
            assert ITEM.match(above) or above.startswith("  "), f"{page}: {line[:60]}"
        if line.startswith("|") and above.strip():
            assert above.startswith("|"), f"{page}: {line[:60]}"


@pytest.mark.parametrize("page", SITE)
def test_code_in_a_table_has_no_bar(page: str) -> None:
    """GitHub wants it escaped there, the site shows the escape: <code>…&#124;…</code> is the same in both."""
    for number, line in enumerate(prose_of(page).splitlines(), start=1):
        if line.startswith("|"):
            assert not any("\\|" in code for code in re.findall(r"`([^`]*)`", line)), f"{page}:{number}"


# ── how it is built ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_of_the_site_comes_from_elsewhere() -> None:
    settings = read("mkdocs.yml")
    assert "font: false" in settings
    assert not re.search(r"https?://", settings)
    assert re.findall(r"^(?:extra\w*|hooks):", settings, re.MULTILINE) == ["extra_css:"]
    assert "url(" not in read("docs/site.css")
    assert "@import" not in read("docs/site.css")


def test_every_warning_ends_the_build() -> None:
    settings, makefile = read("mkdocs.yml"), read("Makefile")
    assert re.search(r"mkdocs build .*--strict", makefile)
    for kind in ("omitted_files", "absolute_links", "unrecognized_links", "anchors"):
        assert f"  {kind}: warn\n" in settings


def test_tools_of_the_site_are_pinned_by_hash_and_in_no_other_environment() -> None:
    pinned = dict(PINNED.findall((TOOLS / "constraints.txt").read_text()))
    locked = (TOOLS / "requirements.lock").read_text()
    assert dict(PINNED.findall(locked)) == pinned, "write it anew with: python -m tools.docs.lock ADDRESS"
    for name in pinned:
        assert re.search(rf"^{re.escape(name)}==\S+ \\\n    --hash=sha256:[0-9a-f]{{64}}", locked, re.MULTILINE)
    for ours in ("pyproject.toml", "constraints.txt"):
        assert "mkdocs" not in (ROOT / ours).read_text()


# ── the check of a built site ────────────────────────────────────────────────────────────────────────────────────────────


def checked(folder: Path, **pages: str) -> subprocess.CompletedProcess[str]:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    command = [sys.executable, str(CHECKER), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_sound_site_passes(tmp_path: Path) -> None:
    (tmp_path / "style.css").touch()
    links = '<a href="other.html#there">x</a> <a href="#here">x</a> <a href="https://elsewhere.example/">x</a>'
    done = checked(
        tmp_path,
        index=f'<link rel="stylesheet" href="style.css"><h1 id="here">x</h1>{links}',
        other='<h1 id="there">x</h1><a href="./">x</a><link rel="canonical" href="https://elsewhere.example/">',
    )
    assert done.returncode == 0, done.stdout
    assert "2 pages" in done.stdout


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ('<a href="gone.html">x</a>', "index.html links to gone.html"),
        ('<a href="index.html#gone">x</a>', "index.html links to index.html#gone"),
        ('<a href="#gone">x</a>', "index.html links to #gone"),
        ('<img src="gone.png">', "index.html links to gone.png"),
        ('<script src="https://cdn.example/x.js"></script>', "index.html loads https://cdn.example/x.js"),
        ('<script src="//cdn.example/x.js"></script>', "index.html loads //cdn.example/x.js"),
        ('<link rel="stylesheet" href="https://fonts.example/">', "index.html loads https://fonts.example/"),
    ],
)
def test_a_fault_of_a_site_is_told(tmp_path: Path, page: str, told: str) -> None:
    done = checked(tmp_path, index=page)
    assert (done.returncode, done.stdout.strip()) == (1, told)
