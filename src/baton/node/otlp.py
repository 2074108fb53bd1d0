"""Spans in OpenTelemetry's protocol over HTTP, by the libraries of the extra `otel`. They are imported only where traces
are made.

The exporter's own variables apply: OTEL_EXPORTER_OTLP_HEADERS, _TIMEOUT, _COMPRESSION and _CERTIFICATE, and their forms for
traces; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES name the service.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton import __version__
from baton.api.tracing.spans import FinishedSpan
from baton.api.tracing.trace_context import TraceContext
from baton.core.errors import SetupError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

TRACES_PATH = "/v1/traces"
_UNNAMED = "unknown_service"
"""The service's name where the environment gives none."""
_LIBRARY = "opentelemetry.exporter.otlp.proto.http"


class NoTraces(SetupError):
    """Traces were asked for and cannot be sent."""


def check_endpoint(endpoint: str | None) -> None:
    """Raises NoTraces in one line: for an address that is none, and where the libraries are not installed."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_address = False
    if not is_address:
        raise NoTraces(f"--otlp-endpoint must be an address such as http://127.0.0.1:4318, not '{endpoint[:200]}'")
    if not _is_installed():
        raise NoTraces("--otlp-endpoint needs the extra 'otel': pip install 'baton-serve[otel]'")


def _is_installed() -> bool:
    try:
        return find_spec(_LIBRARY) is not None and find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:  # one of its parent packages
        return False


def traces_url(endpoint: str) -> str:
    """An address without a path gets the path of the standard."""
    return endpoint.rstrip("/") + TRACES_PATH if urlsplit(endpoint).path in ("", "/") else endpoint


class OtlpExporter:
    """`span_export.SpanExporter` over OpenTelemetry's."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        """`service` is the default of OTEL_SERVICE_NAME."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `span_export` says what is lost, once
        self._exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
        self._success = SpanExportResult.SUCCESS
        self._resource = _resource(service, instance)

    def export(self, spans: Sequence[FinishedSpan]) -> bool:
        try:
            return self._exporter.export([readable(span, self._resource) for span in spans]) is self._success
        except (OSError, ValueError, RuntimeError):  # such as headers in the environment that are none
            return False

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _resource(service: str, instance: str) -> Resource:
    from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource

    is_named = not str(Resource.create({}).attributes[SERVICE_NAME]).startswith(_UNNAMED)
    name = {} if is_named else {SERVICE_NAME: service}
    return Resource.create({SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: instance, **name})


def readable(span: FinishedSpan, resource: Resource) -> ReadableSpan:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode

    parent = TraceContext(span.context.trace_id, span.parent_id, span.context.sampled) if span.parent_id else None
    return ReadableSpan(
        name=span.name,
        context=_context(span.context),
        parent=None if parent is None else _context(parent),
        resource=resource,
        attributes=dict(span.attributes),
        links=[Link(_context(link.to), dict(link.attributes)) for link in span.links],
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.UNSET),
        start_time=span.began_ns,
        end_time=span.ended_ns,
        instrumentation_scope=InstrumentationScope("baton", __version__),
    )


def _context(context: TraceContext) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=False, trace_flags=flags)
