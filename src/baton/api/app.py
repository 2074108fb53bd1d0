"""The FastAPI application: routes and the order of middlewares.

    CORS (only if origins are allowed) → RequestIdMiddleware (ids, counts) → AuthMiddleware → routes → errors in OpenAI shape

Owns only the wiring; each route is a few lines over `RequestPreparer`, `GenerationService` and `ModelText`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from baton.api import openapi
from baton.api.auth import OPEN_PATHS, ApiKeys, AuthMiddleware, kv_owners
from baton.api.body_limits import read_json_body
from baton.api.choice_streams import ClientGone
from baton.api.continuation import RequestProofs, bad_proof
from baton.api.engine import UNKNOWN_CONTEXT, Engine
from baton.api.errors import ApiError, InternalField, engine_dead, invalid
from baton.api.generate import CLIENT_CLOSED, GenerationService
from baton.api.logs import refusals_logged
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText
from baton.api.open_requests import not_open
from baton.api.original_request import OriginalRequest
from baton.api.prepare import CHAT_PATH, COMPLETION_PATH, PreparedRequest, RequestPreparer
from baton.api.request_ids import HEADER, RequestIdMiddleware, owner_of
from baton.api.responses import encode
from baton.api.schema import ContinuationFields, DetokenizeBody, TokenizeBody, check_tokenize, parse
from baton.api.settings import ApiSettings
from baton.api.stream_resume import LAST_EVENT_ID, UnclaimedRequests, check_reach, parse_marks
from baton.api.submissions import RequestOwner, RequestRules

SMALL_BODY_BYTES = 2048
"""Bodies up to this size are tokenised in about a millisecond, on the event loop."""


@dataclass(frozen=True, slots=True)
class RouterExtras:
    """Routes and checks that a router adds to the API of one engine."""

    unclaimed: UnclaimedRequests | None = None
    missing: Callable[[], str | None] = lambda: None
    """Why the router is not ready yet."""
    inner: tuple[Middleware, ...] = ()
    """Middlewares inside AuthMiddleware, where the tenant is known."""
    open_paths: frozenset[str] = frozenset()
    """Further paths that need no API key."""


NO_ROUTER = RouterExtras()


class ApiRoutes:
    def __init__(
        self,
        engine: Engine,
        text: ModelText,
        settings: ApiSettings,
        metrics: Metrics,
        extras: RouterExtras,
        proofs: RequestProofs | None,
    ) -> None:
        self._extras = extras
        self._proofs = proofs
        self._engine = engine
        self._text = text
        self._settings = settings
        self._metrics = metrics
        self._server = GenerationService(engine, metrics)
        self._defaults = settings.default_sampling.over(text.defaults)
        self._kv_owners = kv_owners(settings.api_keys)
        self._preparer = RequestPreparer(text, self._policy, settings.served_model_names)
        self._started_s = int(time.time())
        self._arrived_us = 0
        """Of the last request."""

    def _policy(self) -> RequestRules:
        info = self._engine.info
        return RequestRules(
            info, frozenset(i for i in self._text.eos_ids if i < info.vocabulary), self._defaults, self._kv_owners
        )

    async def generate(self, request: Request) -> Response:
        path: str = request.scope["path"]
        with refusals_logged(self._engine, request.state.request_id, path):
            raw, asker = await self._body(request), owner_of(request)
            origin = OriginalRequest(
                path, raw, asker.tenant, asker.request_id, secrets.randbits(63), self._next_arrival_us()
            )
            prepared = await self._prepared(origin, self._proven(request, raw))
            run = await self._server.accept(prepared, request.receive)
        return await self._server.respond(run)

    def _next_arrival_us(self) -> int:
        """Later than every arrival before: a clock that is set back must not make who waits younger than who comes."""
        self._arrived_us = max(time.time_ns() // 1000, self._arrived_us + 1)
        return self._arrived_us

    def _proven(self, request: Request, raw: bytes) -> bool:
        """Whether the sender proved that it holds the cluster key; a proof that does not hold is a 400."""
        proofs = self._proofs
        if proofs is None or (proof := request.headers.get(proofs.header)) is None:
            return False
        if (reason := proofs.why_not(request.method, request.scope["path"], raw, proof)) is not None:
            raise bad_proof(proofs.header, reason)
        return True

    async def _prepared(self, origin: OriginalRequest, proven: bool = False) -> PreparedRequest:
        """Prepare in a thread; a small body is prepared directly, since switching threads would take longer."""
        try:
            if len(origin.raw) <= SMALL_BODY_BYTES:
                return self._preparer.prepare(origin, proven)
            return await asyncio.to_thread(self._preparer.prepare, origin, proven)
        except InternalField as refusal:
            if self._proofs is None or refusal.field not in ContinuationFields.model_fields:
                raise
            raise refusal.unless(f"a router proves itself with the header {self._proofs.header}") from None

    async def resume(self, id: str, request: Request) -> Response:  # noqa: A002
        """Resume a stream after a restart of the router."""
        unclaimed, asker = self._extras.unclaimed, RequestOwner(request.state.tenant, id)
        self._server.open.check_unread(asker)
        found = None if unclaimed is None else await unclaimed.find(asker)
        if found is None or unclaimed is None:
            raise not_open(id)
        prepared = await self._prepared(found.origin)
        after = request.headers.get(LAST_EVENT_ID) or request.query_params.get("last_event_id", "")
        marks = parse_marks(after if prepared.stream else "", len(prepared.readers))
        context = self._engine.info.context_tokens
        check_reach(marks, [context if one.max_tokens is None else one.max_tokens for one in prepared.group])
        found.check(marks)
        run = await self._server.resume(prepared, marks, unclaimed, request.receive)
        return await self._server.respond(run)

    async def _body(self, request: Request) -> bytes:
        return await read_json_body(request, self._settings.body_bytes_max)

    async def cancel(self, id: str, request: Request) -> Response:  # noqa: A002
        asker, unclaimed = RequestOwner(request.state.tenant, id), self._extras.unclaimed
        if not self._server.open.cancel(asker) and (unclaimed is None or not unclaimed.drop(asker)):
            raise not_open(id)
        return _json({"id": id, "object": "request", "cancelled": True})

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._model(name) for name in self._settings.served_model_names]})

    async def model(self, id: str) -> Response:  # noqa: A002
        self._preparer.check_model(id)
        return _json(self._model(id))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "baton",
            "root": self._settings.served_model_names[0],
            "max_model_len": self._context(),
        }

    def _context(self) -> int | None:
        tokens = self._engine.info.context_tokens
        return None if tokens == UNKNOWN_CONTEXT else tokens

    async def tokenize(self, request: Request) -> Response:
        raw = await self._body(request)
        return _json(await asyncio.to_thread(self._tokenize, raw))

    def _tokenize(self, raw: bytes) -> dict[str, object]:
        body = parse(raw, TokenizeBody, (check_tokenize,))
        self._preparer.check_model(body.model)
        if body.prompt is not None:
            ids = self._text.encode(body.prompt, body.add_special_tokens is not False)
        else:
            ids = self._preparer.chat_ids(body, body.messages or [])
        strings = [self._text.token(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._context(), "tokens": ids, "token_strs": strings}

    async def detokenize(self, request: Request) -> Response:
        raw = await self._body(request)
        return _json(await asyncio.to_thread(self._detokenize, raw))

    def _detokenize(self, raw: bytes) -> dict[str, object]:
        body = parse(raw, DetokenizeBody)
        self._preparer.check_model(body.model)
        vocabulary = self._engine.info.vocabulary
        if body.tokens and max(body.tokens) >= vocabulary:
            raise invalid("tokens", f"'tokens' has id {max(body.tokens)}; the vocabulary has {vocabulary} ids")
        return {"prompt": self._text.decode(body.tokens)}

    async def health(self) -> Response:
        if self._engine.death is not None:
            raise engine_dead(self._engine.death)
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        if self._engine.death is not None:
            raise engine_dead(self._engine.death)
        if self._engine.draining:
            raise ApiError(503, "Draining: no new requests are taken", "service_unavailable_error", code="draining")
        if (missing := self._extras.missing()) is not None:
            raise ApiError(503, missing, "service_unavailable_error", code="no_instance", headers={"Retry-After": "1"})
        return _json({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")


def create_app(
    engine: Engine,
    text: ModelText,
    settings: ApiSettings,
    metrics: Metrics | None = None,
    extras: RouterExtras = NO_ROUTER,
    proofs: RequestProofs | None = None,
) -> FastAPI:
    """The HTTP surface of one engine. Loads nothing and starts nothing; uvicorn (or a test) runs it.

    Give `metrics` to read them elsewhere too; else the app has its own. With `proofs`, routers that hold the cluster key
    continue answers here.
    """
    if settings.chat_template is not None:
        text = text.with_template(settings.chat_template)
    if metrics is None:
        metrics = Metrics(engine, settings.served_model_names[0])
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_routes(app, ApiRoutes(engine, text, settings, metrics, extras, proofs), resumable=extras.unclaimed is not None)
    _add_error_handlers(app, metrics)
    openapi.install(app, secured=bool(settings.api_keys))
    for ring in extras.inner:
        app.add_middleware(ring.cls, *ring.args, **ring.kwargs)
    app.add_middleware(AuthMiddleware, keys=ApiKeys(settings.api_keys), open_paths=OPEN_PATHS | extras.open_paths)
    app.add_middleware(RequestIdMiddleware, metrics=metrics)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[HEADER],
        )
    return app


def _add_routes(app: FastAPI, routes: ApiRoutes, resumable: bool) -> None:
    post, get, delete = ["POST"], ["GET"], ["DELETE"]
    table: list[tuple[str, list[str], Callable[..., Awaitable[Response]], openapi.RouteDescription]] = [
        (CHAT_PATH, post, routes.generate, openapi.CHAT),
        (COMPLETION_PATH, post, routes.generate, openapi.COMPLETION),
        ("/v1/models", get, routes.models, openapi.MODELS),
        ("/v1/models/{id:path}", get, routes.model, openapi.MODEL),
        ("/v1/requests/{id}", delete, routes.cancel, openapi.CANCEL),
        ("/tokenize", post, routes.tokenize, openapi.TOKENIZE),
        ("/detokenize", post, routes.detokenize, openapi.DETOKENIZE),
        ("/health", get, routes.health, openapi.HEALTH),
        ("/ready", get, routes.ready, openapi.HEALTH),
        ("/metrics", get, routes.metrics, openapi.METRICS),
    ]
    if resumable:
        table.append(("/v1/requests/{id}/stream", get, routes.resume, openapi.RESUME))
    for path, methods, endpoint, described in table:
        app.add_api_route(
            path,
            endpoint,
            methods=methods,
            response_model=None,
            response_class=Response,
            responses=described.responses,
            openapi_extra=described.extra,
        )


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def api_error(_: Request, error: ApiError) -> Response:
        if isinstance(error, InternalField):
            metrics.count_refused_field(error.field)
        return error.response()

    async def http_error(_: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, error.detail, code=code, headers=error.headers or {}).response()

    async def bad_parameter(_: Request, error: RequestValidationError) -> Response:
        return invalid(None, str(error)).response()

    async def client_gone(_: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    async def bug(request: Request, _error: Exception) -> Response:
        # Starlette answers this one outside of our middlewares, so the request id is added here.
        headers = {HEADER: request.scope.get("state", {}).get("request_id", "")}
        message = "Internal error; the log has the details"
        return ApiError(500, message, "server_error", code="internal_error", headers=headers).response()

    app.exception_handler(ApiError)(api_error)
    app.exception_handler(HTTPException)(http_error)
    app.exception_handler(RequestValidationError)(bad_parameter)
    app.exception_handler(ClientGone)(client_gone)
    app.exception_handler(Exception)(bug)


def _json(content: object) -> Response:
    return Response(encode(content), media_type="application/json")
