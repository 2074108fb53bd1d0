"""Checks a built site: every link inside of it leads to a page and an anchor, and no page loads anything from elsewhere.

    python tools/docs/check_site.py FOLDER

Links to other sites are counted and not followed. Needs the standard library alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "link": "href"}
"""Elements whose address a browser fetches by itself."""
ONLY_NAMED = frozenset({"canonical", "next", "prev", "alternate"})
"""Kinds of `link` that are not fetched."""
NOT_FOUND = "404.html"
"""Its addresses begin at the root of a server, wherever the site is put."""


@dataclass
class Page(HTMLParser):
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADED and LOADED[tag] in given and given.get("rel") not in ONLY_NAMED:
            self.loads.append(given[LOADED[tag]])


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).scheme or urlsplit(address).netloc)


def faults(folder: Path) -> list[str]:
    """One line for each address that is wrong."""
    root = folder.resolve()
    pages = {path: read(path) for path in sorted(root.rglob("*.html")) if path.name != NOT_FOUND}
    found = []
    for path, page in pages.items():
        name = path.relative_to(root).as_posix()
        found += [f"{name} loads {address}" for address in page.loads if is_elsewhere(address)]
        inside = [address for address in (*page.links, *page.loads) if not is_elsewhere(address)]
        found += [f"{name} links to {address}" for address in inside if not leads_somewhere(path, address, pages)]
    return found


def leads_somewhere(path: Path, address: str, pages: dict[Path, Page]) -> bool:
    file, anchor = urldefrag(address)
    target = (path.parent / unquote(urlsplit(file).path)).resolve() if file else path
    if target.is_dir():
        target /= "index.html"
    if target not in pages:
        return target.is_file()
    return not anchor or unquote(anchor) in pages[target].anchors


def main(folder: Path) -> int:
    found = faults(folder)
    told = "\n".join(found) or f"{folder}: {len(list(folder.rglob('*.html')))} pages, all links lead somewhere"
    sys.stdout.write(f"{told}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
