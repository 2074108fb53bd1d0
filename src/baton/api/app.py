"""The FastAPI application: routes and the order of middlewares.

    CORS (only if origins are allowed) → RequestIdMiddleware (ids, counts) → AuthMiddleware → routes → errors in OpenAI shape

Owns only the wiring; each route is a few lines over `RequestPreparer`, `GenerationService` and `ModelText`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from baton import __version__
from baton.api import openapi
from baton.api.auth import ABOUT_PATH, METRICS_PATH, OPEN_PATHS, ApiKeys, AuthMiddleware, kv_owners
from baton.api.body_limits import PartialBodies, read_json_body
from baton.api.choice_streams import ClientGone
from baton.api.constraint_compiler import ConstraintCompiler, NoConstraints
from baton.api.continuation import RequestProofs, bad_proof
from baton.api.control_tokens import strings_in
from baton.api.docs_page import DOCS_PATHS, PAGE, install_docs
from baton.api.engine import UNKNOWN_CONTEXT, Engine, NotServing
from baton.api.errors import ApiError, InternalField, engine_dead, invalid
from baton.api.generate import CLIENT_CLOSED, CLIENT_LEFT, GenerationService
from baton.api.logs import TENANT_CHARS, RefusalLog
from baton.api.messages.body import CountTokensBody
from baton.api.metrics import Metrics
from baton.api.model_text import ModelText, TextTooLong
from baton.api.open_requests import not_open
from baton.api.original_request import OriginalRequest
from baton.api.parsers.choosing import answer_format
from baton.api.parted_response import PartedResponse
from baton.api.paths import CHAT_PATH, COMPLETION_PATH, COUNT_TOKENS_PATH, MESSAGES_PATH, RESPONSES_PATH
from baton.api.prepare import PreparedRequest, RequestPreparer, texts_of
from baton.api.request_costs import RequestCosts
from baton.api.request_ids import HEADER, RequestIdMiddleware, client_of, owner_of, trace_of
from baton.api.responses import encode
from baton.api.schema import ContinuationFields, DetokenizeBody, TokenizeBody, check_tokenize, parse
from baton.api.settings import ApiSettings
from baton.api.slot_shares import SlotShares
from baton.api.stream_resume import LAST_EVENT_ID, UnclaimedRequests, check_reach, parse_marks
from baton.api.submissions import RequestOwner, RequestRules
from baton.api.text_pool import TextPool
from baton.api.tracing.request_trace import RequestTrace
from baton.api.tracing.request_tracing import RequestTracing
from baton.api.tracing.trace_context import HEADER as TRACE_HEADER

JSON = "application/json"
ABOUT = "A server for language models with the APIs of OpenAI and Anthropic"
LINKS = {
    "models": "/v1/models", "chat": CHAT_PATH, "responses": RESPONSES_PATH, "messages": MESSAGES_PATH, "health": "/health",
    "ready": "/ready", "metrics": METRICS_PATH, "version": "/version", "openapi": "/openapi.json", "docs": PAGE,
}  # fmt: skip
SMALL_BODY_BYTES = 2048
"""Completion bodies up to this size are tokenised in about a millisecond, on the event loop."""
TOKENIZE_BYTES_MAX = 1 << 20
"""Most bytes of text, and most tokens of a chat, that `/tokenize` works on; more than a context may have."""


@dataclass(frozen=True, slots=True)
class RouterExtras:
    """Routes and checks that a router adds to the API of one engine, or that an instance adds because it has a router."""

    unclaimed: UnclaimedRequests | None = None
    missing: Callable[[], NotServing | None] = lambda: None
    """Why the router is not ready yet."""
    inner: tuple[Middleware, ...] = ()
    """Middlewares inside AuthMiddleware, where the tenant is known."""
    open_paths: frozenset[str] = frozenset()
    """Further paths that need no API key."""
    operator_keys: int = 0
    """How many of the API keys are an operator's: these share no slots with clients."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Further paths that `/` names, by what they are."""
    partial_bodies: PartialBodies | None = None
    """Shared with an inner middleware that reads bodies too; by default the routes have their own."""


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
        compiler: ConstraintCompiler,
        tracing: RequestTracing | None,
    ) -> None:
        self._extras = extras
        self._tracing = tracing
        self._compiler = compiler
        self._proofs = proofs
        self._engine = engine
        self._text = text
        self._settings = settings
        self._metrics = metrics
        self._pool = TextPool()
        self._partial_bodies = extras.partial_bodies or PartialBodies()
        costs = RequestCosts(settings.request_cost_max, settings.key_cost_max)
        shares = SlotShares(
            lambda: engine.info.slots, settings.key_share, len(set(settings.api_keys)) - extras.operator_keys
        )
        self._server = GenerationService(engine, metrics, costs, shares, tracing)
        self._refusals = RefusalLog(engine)
        self._defaults = settings.default_sampling.over(settings.model_sampling or text.defaults)
        self._kv_owners = kv_owners(settings.api_keys)
        self._preparer = RequestPreparer(
            text,
            self._policy,
            settings.served_model_names,
            settings.special_tokens_in_prompts,
            answer_format(text.chat_template, settings.tool_parser, settings.reasoning_parser),
        )
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
        client = client_of(request.scope)
        with self._refusals.logged(request.state.request_id, path, request.state.tenant, client):
            raw, asker, trace = await self._body(request), owner_of(request), trace_of(request)
            carried = "" if trace is None else trace.carried
            origin = OriginalRequest(
                path, raw, asker.tenant, asker.request_id, secrets.randbits(63), self._next_arrival_us(), carried
            )
            prepared = replace(await self._prepared(origin, self._proven(request, raw)), client=client)
            self._note_asked(trace, prepared)
            run = await self._server.accept(prepared, request.receive, self._constrained, trace)
        return await self._server.respond(run)

    def _note_asked(self, trace: RequestTrace | None, prepared: PreparedRequest) -> None:
        if trace is not None and self._tracing is not None:
            trace.asked, trace.request_id = prepared.asked, prepared.asker.request_id
            trace.tenant = prepared.asker.tenant[:TENANT_CHARS]
            self._tracing.submitted(trace)

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
        """Prepare in a thread; a small body is prepared directly, since switching threads would take longer.

        Not a chat, however small: its template is a program of the model's, which no size of its input bounds.
        """
        arrived_s = time.perf_counter()
        try:
            if origin.path == COMPLETION_PATH and len(origin.raw) <= SMALL_BODY_BYTES:
                return self._preparer.prepare(origin, proven)
            work = partial(self._preparer.prepare, origin, proven)
            return replace(await self._pool.run(origin.tenant, len(origin.raw), work), arrived_s=arrived_s)
        except InternalField as refusal:
            if self._proofs is None or refusal.field not in ContinuationFields.model_fields:
                raise
            raise refusal.unless(f"a router proves itself with the header {self._proofs.header}") from None

    async def _constrained(self, prepared: PreparedRequest) -> PreparedRequest:
        """With its constraint compiled. A request that is resumed has been submitted with it."""
        wanted = prepared.constraint
        if wanted is None:
            return prepared
        try:
            return prepared.constrained(await self._compiler.compile(prepared.asker.tenant, wanted.job, wanted.param))
        except ApiError as refusal:
            raise wanted.renamed(refusal) from None

    async def resume(self, id: str, request: Request) -> Response:  # noqa: A002
        """Resume a stream after a restart of the router."""
        unclaimed, asker = self._extras.unclaimed, RequestOwner(request.state.tenant, id)
        self._server.open.check_unread(asker)
        found = None if unclaimed is None else await unclaimed.find(asker)
        if found is None or unclaimed is None:
            raise not_open(id)
        prepared = replace(await self._prepared(found.origin), client=client_of(request.scope))
        if (trace := trace_of(request)) is not None and self._tracing is not None:
            self._tracing.join(trace, found.origin.trace)
            self._note_asked(trace, prepared)
        after = request.headers.get(LAST_EVENT_ID) or request.query_params.get("last_event_id", "")
        numbered = prepared.stream and prepared.writer.is_numbered
        marks = parse_marks(after if numbered else "", len(prepared.readers))
        context = self._engine.info.context_tokens
        check_reach(marks, [context if one.max_tokens is None else one.max_tokens for one in prepared.group])
        found.check(marks)
        run = await self._server.resume(prepared, marks, unclaimed, request.receive, trace)
        return await self._server.respond(run)

    async def _body(self, request: Request) -> bytes:
        return await read_json_body(request, request.state.tenant, self._settings.body_bytes_max, self._partial_bodies)

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
        return await self._in_pool(request, self._tokenize)

    async def count_tokens(self, request: Request) -> Response:
        return await self._in_pool(request, self._count_tokens)

    async def detokenize(self, request: Request) -> Response:
        return await self._in_pool(request, self._detokenize)

    async def _in_pool(self, request: Request, work: Callable[[bytes], dict[str, object]]) -> Response:
        """The answer is encoded there too: it may have a million numbers."""
        raw = await self._body(request)
        return await self._pool.run(request.state.tenant, len(raw), lambda: PartedResponse(encode(work(raw)), JSON))

    def _tokenize(self, raw: bytes) -> dict[str, object]:
        body = parse(raw, TokenizeBody, (check_tokenize,))
        self._preparer.check_model(body.model)
        ids = self._tokenized(body)
        strings = [self._text.token(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._context(), "tokens": ids, "token_strs": strings}

    def _tokenized(self, body: TokenizeBody) -> Sequence[int]:
        """Bounded by bytes: what is counted here may be longer than a context."""
        texts = [body.prompt or "", *(text for message in body.messages or () for text in texts_of(message))]
        _check_bytes("messages" if body.prompt is None else "prompt", texts)
        if body.prompt is not None:
            return self._preparer.prompt_ids(body.prompt, body.add_special_tokens)
        try:
            return self._preparer.chat_ids(body, body.messages or [], TOKENIZE_BYTES_MAX)
        except TextTooLong as refusal:
            raise invalid("messages", f"'messages': {refusal}", "request_too_large") from None

    def _count_tokens(self, raw: bytes) -> dict[str, object]:
        body = parse(raw, CountTokensBody).as_chat()
        tools = strings_in([tool.for_template() for tool in body.tools or ()])
        _check_bytes("messages", [*tools, *(text for message in body.messages for text in texts_of(message))])
        try:
            return {"input_tokens": self._preparer.count_tokens(body, TOKENIZE_BYTES_MAX)}
        except TextTooLong as refusal:
            raise invalid("messages", f"'messages': {refusal}", "request_too_large") from None

    def _detokenize(self, raw: bytes) -> dict[str, object]:
        body = parse(raw, DetokenizeBody)
        self._preparer.check_model(body.model)
        vocabulary = self._engine.info.vocabulary
        if body.tokens and max(body.tokens) >= vocabulary:
            raise invalid("tokens", f"'tokens' has id {max(body.tokens)}; the vocabulary has {vocabulary} ids")
        return {"prompt": self._text.decode(body.tokens)}

    async def about(self) -> Response:
        """Tells nobody more than that this is Baton."""
        return _json({"name": "baton", "about": ABOUT, "paths": LINKS | dict(self._extras.links)})

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def health(self, request: Request) -> Response:
        self._check_alive(request)
        return _json({"status": "ok"})

    def _check_alive(self, request: Request) -> None:
        """Raises a 503 when the engine is dead."""
        if (death := self._engine.death) is not None:
            raise engine_dead(_told(death, request))

    async def ready(self, request: Request) -> Response:
        self._check_alive(request)
        if self._engine.draining:
            raise ApiError(503, "Draining: no new requests are taken", "service_unavailable_error", code="draining")
        if (missing := self._extras.missing()) is not None:
            raise ApiError(
                503, _told(missing, request), "service_unavailable_error", code="no_instance", headers={"Retry-After": "1"}
            )
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
    compiler: ConstraintCompiler | None = None,
    tracing: RequestTracing | None = None,
) -> FastAPI:
    """The HTTP surface of one engine. Loads nothing and starts nothing; uvicorn (or a test) runs it.

    Give `metrics` to read them elsewhere too; else the app has its own. With `proofs`, routers that hold the cluster key
    continue answers here. Without a `compiler`, constraints are refused. With `tracing`, requests have traces.
    """
    if settings.chat_template is not None:
        text = text.with_template(settings.chat_template)
    if metrics is None:
        metrics = Metrics(engine, settings.served_model_names[0])
    app = FastAPI(title="Baton", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    routes = ApiRoutes(engine, text, settings, metrics, extras, proofs, compiler or NoConstraints(), tracing)
    _add_routes(app, routes, resumable=extras.unclaimed is not None)
    _add_error_handlers(app, metrics)
    openapi.install(app, secured=bool(settings.api_keys))
    install_docs(app)
    for ring in extras.inner:
        app.add_middleware(ring.cls, *ring.args, **ring.kwargs)
    app.add_middleware(
        AuthMiddleware,
        keys=ApiKeys(settings.api_keys),
        open_paths=OPEN_PATHS | DOCS_PATHS | extras.open_paths,
        metrics_keys=settings.metrics_keys,
    )
    app.add_middleware(RequestIdMiddleware, metrics=metrics, tracing=tracing)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[HEADER, TRACE_HEADER],
        )
    return app


def _add_routes(app: FastAPI, routes: ApiRoutes, resumable: bool) -> None:
    post, get, delete = ["POST"], ["GET"], ["DELETE"]
    table: list[tuple[str, list[str], Callable[..., Awaitable[Response]], openapi.RouteDescription]] = [
        (CHAT_PATH, post, routes.generate, openapi.CHAT),
        (COMPLETION_PATH, post, routes.generate, openapi.COMPLETION),
        (RESPONSES_PATH, post, routes.generate, openapi.RESPONSES),
        (MESSAGES_PATH, post, routes.generate, openapi.MESSAGES),
        (COUNT_TOKENS_PATH, post, routes.count_tokens, openapi.COUNT_TOKENS),
        ("/v1/models", get, routes.models, openapi.MODELS),
        ("/v1/models/{id:path}", get, routes.model, openapi.MODEL),
        ("/v1/requests/{id}", delete, routes.cancel, openapi.CANCEL),
        ("/tokenize", post, routes.tokenize, openapi.TOKENIZE),
        ("/detokenize", post, routes.detokenize, openapi.DETOKENIZE),
        (ABOUT_PATH, get, routes.about, openapi.ABOUT),
        ("/version", get, routes.version, openapi.VERSION),
        ("/ping", get, routes.health, openapi.HEALTH),
        ("/health", get, routes.health, openapi.HEALTH),
        ("/ready", get, routes.ready, openapi.READY),
        (METRICS_PATH, get, routes.metrics, openapi.METRICS),
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
            summary=described.summary,
            openapi_extra=described.extra,
        )
        if methods == get and not path.endswith("/stream"):
            app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def api_error(request: Request, error: ApiError) -> Response:
        if isinstance(error, InternalField):
            metrics.count_refused_field(error.field)
        if (trace := trace_of(request)) is not None:
            trace.fail(error.code or error.type, error.status)
        return error.response(request.scope["path"])

    async def http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        refusal = ApiError(error.status_code, error.detail, code=code, headers=error.headers or {})
        return refusal.response(request.scope["path"])

    async def bad_parameter(request: Request, error: RequestValidationError) -> Response:
        return invalid(None, str(error)).response(request.scope["path"])

    async def client_gone(request: Request, _error: ClientGone) -> Response:
        if (trace := trace_of(request)) is not None:
            trace.fail(CLIENT_LEFT, CLIENT_CLOSED)
        return Response(status_code=CLIENT_CLOSED)

    async def bug(request: Request, _error: Exception) -> Response:
        # Starlette answers this one outside of our middlewares, so the request id is added here.
        headers = {HEADER: request.scope.get("state", {}).get("request_id", "")}
        message = "Internal error; the log has the details"
        return ApiError(500, message, "server_error", code="internal_error", headers=headers).response(request.scope["path"])

    app.exception_handler(ApiError)(api_error)
    app.exception_handler(HTTPException)(http_error)
    app.exception_handler(RequestValidationError)(bad_parameter)
    app.exception_handler(ClientGone)(client_gone)
    app.exception_handler(Exception)(bug)


def _check_bytes(field: str, texts: Sequence[str]) -> None:
    """Raises a 400 where so much text is not counted in one request."""
    if (size := sum(len(text.encode(errors="replace")) for text in texts)) > TOKENIZE_BYTES_MAX:
        message = f"'{field}' has {size} bytes; at most {TOKENIZE_BYTES_MAX} are tokenised in one request"
        raise invalid(field, message, "request_too_large")


def _json(content: object) -> Response:
    return Response(encode(content), media_type=JSON)


def _told(why: NotServing, request: Request) -> str:
    return str(why) if request.state.is_trusted else why.reason
