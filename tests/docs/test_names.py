"""What README, ARCHITECTURE and docs/ name is there: files, functions, links, pages. And the two stay short.

Files are named from the root, from `src/baton/`, or from the page's own folder. A name in code right after a file
(`core/engine/victims.py` `choose_victim`) is defined in that file.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from tests.docs import pending
from tests.docs.pages import ROOT, blocks_of, page_names, prose_of, read, spans_of, written_pages
from tests.docs.test_commands import PLACEHOLDERS, WRITTEN_FOR

LINES_MAX = {"README.md": 150, "ARCHITECTURE.md": 200}
GLOSSARY_MAX = 25
SOURCE = ROOT / "src" / "baton"
PAGES = page_names()
WRITTEN = written_pages()
FILE = re.compile(r"[\w./-]+\.(?:py|md|json|yml|toml|sh|png|cpp)")
FOLDER = re.compile(r"[\w./-]+/")
CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]*)+")
METHOD = re.compile(r"_\w+|[A-Z]\w+\.[a-z]\w+|(?:make|build|open)_\w+")
NAMED_IN = re.compile(r"`([\w./-]+\.py)`((?:(?:, | and | or | \()?`?[ (]*`[A-Za-z_][\w.]*`)+)")
"""A file, and the names behind it."""
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)]*)?\)")
OTHERS = frozenset({"Retry", "OpenAI", "SmolLM", "README"})
HISTORY = frozenset({"docs/changes.md"})
"""Says what is no longer there."""


def place_of(page: str, name: str) -> Path | None:
    for folder in (ROOT, SOURCE, (ROOT / page).parent):
        if (folder / name).exists():
            return folder / name
    return None


@cache
def python_sources() -> str:
    folders = [folder for folder in (ROOT / "src", ROOT / "tests", ROOT / "benchmarks") if folder.is_dir()]
    return "\n".join(path.read_text() for folder in folders for path in sorted(folder.rglob("*.py")))


def defines(text: str, name: str) -> bool:
    """Whether a module with this text defines a function, method, class or constant of this name."""
    *owners, last = name.split(".")
    if not re.search(rf"^\s*(?:async )?(?:def|class) {last}\b|^\s*{last}\b\s*[:=]", text, re.MULTILINE):
        return False
    return all(defines(text, owner) for owner in owners)


# ── files and functions ──────────────────────────────────────────────────────────────────────────────────────────────────

FILES = [
    pytest.param(span.page, span.text, id=str(span))
    for page in WRITTEN
    for span in spans_of(page)
    if (FILE.fullmatch(span.text) or FOLDER.fullmatch(span.text)) and not span.text.startswith(("/", ".venv"))
    if span.text not in PLACEHOLDERS and span.text not in WRITTEN_FOR
]


@pytest.mark.parametrize(("page", "name"), FILES)
def test_a_file_that_is_named_exists(page: str, name: str) -> None:
    assert name in pending.FILES or place_of(page, name), f"there is no {name}"


@pytest.mark.parametrize("page", WRITTEN)
def test_a_module_in_a_picture_exists(page: str) -> None:
    for block in blocks_of(page):
        if block.language in ("", "python"):
            for name in re.findall(r"[\w/]+\.py\b", block.text):
                assert any(SOURCE.rglob(name)), f"{block}: there is no {name}"


FUNCTIONS = [
    pytest.param(page, file, name, id=f"{page} {file} {name}")
    for page in WRITTEN
    for file, names in NAMED_IN.findall(prose_of(page).replace("\n", " "))
    for name in re.findall(r"`([\w.]+)`", names)
    if not FILE.fullmatch(name)
]


@pytest.mark.parametrize(("page", "file", "name"), FUNCTIONS)
def test_a_name_behind_a_file_is_defined_there(page: str, file: str, name: str) -> None:
    place = place_of(page, file)
    if place is None and file in pending.FILES:
        return
    assert place, f"there is no {file}"
    assert name in pending.NAMES or defines(place.read_text(), name), f"{file} does not define {name}"


@cache
def behind_pending() -> frozenset[str]:
    """Names that are said to be in files which are not there yet."""
    return frozenset(one.values[2] for one in FUNCTIONS if one.values[1] in pending.FILES) | pending.NAMES  # type: ignore[misc]


@pytest.mark.parametrize("page", [page for page in WRITTEN if page not in HISTORY])
def test_classes_and_methods_that_are_named_exist(page: str) -> None:
    for span in spans_of(page):
        if METHOD.fullmatch(span.text) and not FILE.fullmatch(span.text) and span.text not in behind_pending():
            assert defines(python_sources(), span.text), f"{span} is not defined anywhere"
        found = CLASS.match(span.text)
        if (
            found
            and found[0] not in {name.partition(".")[0] for name in pending.NAMES | behind_pending()}
            and not found[0].startswith(tuple(OTHERS))
        ):
            assert re.search(rf"\b{found[0]}\b", python_sources()), f"{span}: there is no {found[0]}"


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", LINES_MAX)
def test_the_first_pages_are_short(page: str) -> None:
    assert len(read(page).splitlines()) <= LINES_MAX[page]


def test_the_glossary_is_small() -> None:
    _, _, rest = read("ARCHITECTURE.md").partition("## Glossary\n")
    words = re.findall(r"^\| (?!word|-)([^|]+) \|", rest.partition("\n## ")[0], re.MULTILINE)
    assert 10 <= len(words) <= GLOSSARY_MAX
    assert words == sorted(words, key=str.casefold)


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def links_of(page: str) -> list[tuple[str, str]]:
    """Target page, from the root, and anchor."""
    found = []
    for target, anchor in LINK.findall(prose_of(page)):
        if "://" not in target:
            path = (PurePosixPath(page).parent / target) if target else PurePosixPath(page)
            parts: list[str] = []
            for part in path.parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            found.append(("/".join(parts), anchor))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in links_of(page):
        if target in pending.FILES:
            continue
        assert (ROOT / target).exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose_of(target), re.MULTILINE)
            assert anchor[1:] in map(slug, headings), f"{page} links to {target}{anchor}"


def test_every_page_is_in_the_navigation_and_linked() -> None:
    in_navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    missing = {name.removeprefix("docs/") for name in pending.FILES if name.startswith("docs/")}
    assert sorted(in_navigation) == sorted({*pages, *missing})
    reached, open_pages = {"README.md"}, ["README.md"]
    while open_pages:
        for target, _ in links_of(open_pages.pop()):
            if target in PAGES and target not in reached:
                reached.add(target)
                open_pages.append(target)
    assert reached == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_title(page: str) -> None:
    assert read(page).startswith("# ")


RIDDLES = re.compile(r"(?:^|[.:|*] )(?:Who|Whoever|Whom|Whose|Nobody|Somebody|So many|So much)\b")
PRIVATE = re.compile(r"/(?:work|root|home)/|\bissue \d|\(#\d+\)")


@pytest.mark.parametrize("page", WRITTEN)
def test_pages_state_facts(page: str) -> None:
    for number, line in enumerate(prose_of(page).splitlines(), start=1):
        assert not RIDDLES.search(line), f"{page}:{number} says it as a riddle"
        assert not PRIVATE.search(line), f"{page}:{number} is about the place where it was written"
