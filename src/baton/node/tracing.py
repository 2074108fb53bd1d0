"""Traces of one server's process, from its settings: made where there is an endpoint to send them to."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from baton.api.metrics import Metrics
from baton.api.tracing.request_tracing import RequestTracing
from baton.api.tracing.span_counts import SpanCounts
from baton.node.otlp import OtlpExporter
from baton.node.settings import HttpSettings
from baton.node.span_export import SpanExport


class ProcessTraces:
    def __init__(self, settings: HttpSettings, service: str, instance: str) -> None:
        """`service` and `instance` name this process in traces."""
        self._export: SpanExport | None = None
        self.tracing: RequestTracing | None = None
        endpoint = settings.otlp_endpoint
        if endpoint is not None:
            self._export = SpanExport(OtlpExporter(endpoint, service, instance), _shown(endpoint))
            self._export.start()
            self.tracing = RequestTracing(self._export, settings.otlp_sample_ratio)

    def show(self, metrics: Metrics) -> None:
        metrics.add(SpanCounts() if self._export is None else SpanCounts(self._export.totals))

    async def close(self) -> None:
        """Send what is left, within a bounded time."""
        if self.tracing is not None and self._export is not None:
            self.tracing.flush()
            await asyncio.to_thread(self._export.close)


def _shown(endpoint: str) -> str:
    """Without what may be a secret: a name and password, a query."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
