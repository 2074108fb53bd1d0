"""Pictures of the pages are small, load nothing, can be read in light and dark, and say in words what they show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, page_names, prose_of

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SVG = "{http://www.w3.org/2000/svg}"
BYTES_MAX = 12 << 10
ALT_CHARS_LEAST = 40


def elements(picture: Path) -> ET.Element:
    return ET.fromstring(picture.read_text())  # noqa: S314  our own file


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_loads_nothing(picture: Path) -> None:
    text = picture.read_text()
    assert len(text) <= BYTES_MAX
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert {element.tag for element in elements(picture).iter()}.isdisjoint({f"{SVG}script", f"{SVG}image", f"{SVG}a"})


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_every_colour_has_one_for_dark_pages(picture: Path) -> None:
    light, _, dark = picture.read_text().partition("@media (prefers-color-scheme: dark)")
    assert dark
    coloured = set(re.findall(r"(\.?[\w-]+) \{ [^}]*#[0-9a-f]{6}", light))
    again = set(re.findall(r"(\.?[\w-]+) \{ [^}]*#[0-9a-f]{6}", dark))
    assert coloured == again


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_names_itself(picture: Path) -> None:
    drawing = elements(picture)
    for tag in ("title", "desc"):
        found = drawing.find(f"{SVG}{tag}")
        assert found is not None
        assert found.text


def test_every_picture_is_shown_once_and_told_in_words() -> None:
    shown = [(Path(page).parent / path, alt) for page in page_names() for alt, path in SHOWN.findall(prose_of(page))]
    for path, alt in shown:
        assert (ROOT / path).is_file(), path
        assert len(alt) >= ALT_CHARS_LEAST, f"{path}: {alt!r} does not say what it shows"
    drawn = sorted(path.name for path, _ in shown if path.suffix == ".svg")
    assert drawn == [picture.name for picture in PICTURES]
