"""Pages that are packed with Baton: their files, and headers under which a page loads nothing from elsewhere."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
         ".svg": "image/svg+xml"}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def packed_files(package: str, folder: str = "static") -> dict[str, bytes]:
    """The files of a page by name."""
    parts = (resources.files(package) / folder).iterdir()
    return {part.name: part.read_bytes() for part in parts if Path(part.name).suffix in KINDS}


def kind_of(name: str) -> str:
    return KINDS[Path(name).suffix]
