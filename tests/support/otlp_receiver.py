"""A collector of traces on a free port of loopback: takes OTLP over HTTP and keeps the spans, decoded."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.waiting import wait_until

INSTANCE, SERVER_KIND, ERROR_STATUS = "baton.instance", 2, 2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    links: tuple[tuple[str, str], ...]
    """(trace id, span id)"""
    status: int
    service: str
    """`service.name` of the sender."""

    @property
    def instance(self) -> str:
        return str(self.attributes.get(INSTANCE, ""))


class OtlpReceiver:
    def __init__(self, url: str) -> None:
        self.url = url
        self.headers: list[Mapping[str, str]] = []
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()

    def take(self, body: bytes, headers: Mapping[str, str]) -> None:
        spans = list(spans_in(gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else body))
        with self._lock:
            self._spans += spans
            self.headers.append(headers)

    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def trace_of(self, request_id: str, servers: int = 1) -> list[ReceivedSpan]:
        """All spans of the trace of a request, by their beginning, once so many server spans of it are there."""

        def found() -> list[ReceivedSpan]:
            return [span for span in self.spans() if span.attributes.get("baton.request.id") == request_id]

        wait_until(lambda: len(found()) >= servers, f"{servers} server spans of {request_id}")
        trace_id = found()[0].trace_id
        return sorted((span for span in self.spans() if span.trace_id == trace_id), key=lambda span: span.began_ns)


def spans_in(body: bytes) -> Iterator[ReceivedSpan]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    for resource in request.resource_spans:
        named = attributes_of(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name, span.kind, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    span.start_time_unix_nano, span.end_time_unix_nano, attributes_of(span.attributes),
                    tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links), span.status.code,
                    named["service.name"],
                )  # fmt: skip


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces", self.path
            receiver.take(body, dict(self.headers))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
