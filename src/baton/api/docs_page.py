"""`/docs`: the OpenAPI document of this server as a page, without anything from elsewhere.

    GET /docs            the page
    GET /docs/NAME       its parts

The page and its parts contain no data and need no key; the document that they show, `/openapi.json`, needs one where keys
are set.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import Response

from baton.api.errors import ApiError
from baton.api.static_page import HEADERS, kind_of, packed_files

PAGE = "/docs"
_HTML = "docs.html"
_PARTS = packed_files("baton.api")
DOCS_PATHS = frozenset({PAGE, *(f"{PAGE}/{name}" for name in _PARTS)})


def install_docs(app: FastAPI) -> None:
    async def page() -> Response:
        return Response(_PARTS[_HTML], headers=HEADERS, media_type=kind_of(_HTML))

    async def part(name: str) -> Response:
        if name not in _PARTS:
            raise ApiError(404, "There is no such part of this page", code="not_found")
        return Response(_PARTS[name], headers=HEADERS, media_type=kind_of(name))

    for path, endpoint in ((PAGE, page), (f"{PAGE}/{{name}}", part)):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)
