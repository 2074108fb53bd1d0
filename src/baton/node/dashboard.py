"""The dashboard: a page, its parts, the state that it polls, and, for demonstrations only, a way to kill an instance.

    GET  /dashboard              the page; it loads nothing from elsewhere, and no script is inline
    GET  /dashboard/static/…     its parts
    GET  /dashboard/state        the changes since a revision, as JSON
    POST /dashboard/kill         only where the router was started for a demonstration

The page and its parts contain no data and are open; state and kill need an API key where one is set, and the admin key where
there is one. A kill must come from this machine, addressed to a name of this machine, from a page that this process has
served (its token, its origin), and ends a process only if it is an instance on this machine.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from baton.api.body_limits import PartialBodies, read_json_body
from baton.api.engine import ROUTER
from baton.api.errors import ApiError, invalid
from baton.api.responses import encode
from baton.api.static_page import HEADERS, kind_of, packed_files
from baton.node.dashboard_state import DashboardState, ShownInstance
from baton.node.peer_options import is_loopback

log = logging.getLogger("baton.router")

PAGE = "/dashboard"
STATIC = "/dashboard/static/"
TOKEN_HEADER = "X-Baton-Token"  # noqa: S105 -- the name of a header
KILL_BYTES_MAX = 1024

_PARTS = packed_files("baton.node")
OPEN_PATHS = frozenset({PAGE, *(STATIC + name for name in _PARTS)})
"""Paths served without a key."""


class _Kill(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    incarnation: str
    """As in the state that was shown: a later incarnation is not killed."""


class Dashboard:
    def __init__(
        self,
        state: DashboardState,
        clock_us: Callable[[], int],
        instances: Callable[[], Iterable[ShownInstance]],
        demo: bool = False,
        server: str = ROUTER,
    ) -> None:
        """`server`: what shows itself here, a router or an instance."""
        self._state = state
        self._clock_us = clock_us
        self._instances = instances
        self._demo = demo
        self._partial_bodies = PartialBodies()
        self._token = secrets.token_urlsafe(32)
        page = _PARTS["index.html"].replace(b"{{token}}", self._token.encode() if demo else b"")
        self._page = page.replace(b"{{demo}}", b"demo" if demo else b"").replace(b"{{server}}", server.encode())

    def install(self, app: FastAPI) -> None:
        for path, methods, endpoint in (
            (PAGE, ["GET", "HEAD"], self.page),
            (STATIC + "{name}", ["GET", "HEAD"], self.part),
            ("/dashboard/state", ["GET", "HEAD"], self.state),
            ("/dashboard/kill", ["POST"], self.kill),
        ):
            app.add_api_route(path, endpoint, methods=methods, include_in_schema=False, response_model=None)

    async def page(self) -> Response:
        return Response(self._page, headers=HEADERS, media_type=kind_of("index.html"))

    async def part(self, name: str) -> Response:
        if name not in _PARTS:
            raise ApiError(404, "There is no such part of the dashboard", code="not_found")
        return Response(_PARTS[name], headers=HEADERS, media_type=kind_of(name))

    async def state(self, since: int = 0, epoch: str = "") -> Response:
        snapshot = self._state.snapshot(self._clock_us(), since, epoch)
        return Response(encode(snapshot), headers={"Cache-Control": "no-store"}, media_type="application/json")

    async def kill(self, request: Request) -> Response:
        self._check_killer(request)
        raw = await read_json_body(request, "", KILL_BYTES_MAX, self._partial_bodies)
        try:
            wanted = msgspec.json.decode(raw, type=_Kill)
        except msgspec.MsgspecError as error:
            raise invalid(None, f"Not an instance to kill: {error}") from None
        pid = self._pid_of(wanted)
        _end(pid)
        log.warning("killed %s, process %d, as the dashboard asked", wanted.name, pid)
        return Response(encode({"killed": wanted.name, "pid": pid}), media_type="application/json")

    def _check_killer(self, request: Request) -> None:
        """Reject scripts of other sites, other machines, and host names that were made to resolve to this machine."""
        if not self._demo:
            raise ApiError(404, "Instances can be killed only where the router runs with --demo", code="not_found")
        host = request.headers.get("host", "")
        origin = request.headers.get("origin", "")
        proxied = "x-forwarded-for" in request.headers  # whoever is behind a proxy of this machine is not this machine
        if proxied or request.client is None or not is_loopback(request.client.host) or not is_loopback(_hostname(host)):
            raise _forbidden("Only from this machine, under a loopback name")
        if origin != f"{request.url.scheme}://{host}":
            raise _forbidden("Only from the page of this router")
        if not hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), self._token.encode()):
            raise _forbidden("The page is of another run of this router; load it again")

    def _pid_of(self, wanted: _Kill) -> int:
        for view in self._instances():
            facts = view.facts
            if facts.name == wanted.name and str(facts.incarnation) == wanted.incarnation:
                if not is_loopback(_hostname(urlsplit(facts.url).netloc)) or not _is_an_instance(facts.pid):
                    raise _forbidden(f"{wanted.name} does not run on this machine")
                return facts.pid
        raise ApiError(404, f"{wanted.name} has gone meanwhile", code="not_found")


def _hostname(netloc: str) -> str:
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def _is_an_instance(pid: int) -> bool:
    """Whether the process is an instance: the pid is self-reported and may have been reused, so its command line is read."""
    if pid <= 1 or pid == os.getpid():
        return False
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"serve" in words and any(b"baton" in word for word in words)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise ApiError(404, "It has ended meanwhile", code="not_found") from None
    except PermissionError:
        raise _forbidden("It belongs to another user") from None


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, "permission_error", code="forbidden")
