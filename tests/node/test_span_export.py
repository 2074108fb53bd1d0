"""The thread that sends spans: what it drops, what it says, and how long it may keep the process."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from baton.api.tracing.request_trace import FinishedTrace, RequestTrace
from baton.api.tracing.span_counts import SpanTotals
from baton.api.tracing.spans import FinishedSpan, spans_of
from baton.api.tracing.trace_context import TraceContext
from baton.node import otlp
from baton.node.otlp import NoTraces, OtlpExporter, check_endpoint, traces_url
from baton.node.span_export import SpanExport
from baton.node.tracing import _shown
from tests.support.otlp_receiver import otlp_receiver
from tests.support.waiting import wait_until


def finished(name: str = "x") -> FinishedTrace:
    """One span."""
    return FinishedTrace(RequestTrace(TraceContext("a" * 32, "b" * 16, True), "", "POST", "/", 0, name), (), 0)


class GatedExporter:
    """Answers when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.takes = True
        self.batches: list[int] = []
        self.was_shut_down = False

    def export(self, spans: Sequence[FinishedSpan]) -> bool:
        self.gate.wait()
        self.batches.append(len(spans))
        return self.takes

    def shutdown(self) -> None:
        self.was_shut_down = True
        self.gate.set()


@pytest.fixture
def exporter() -> Iterator[GatedExporter]:
    made = GatedExporter()
    yield made
    made.gate.set()


def test_what_the_queue_has_no_room_for_is_dropped_and_counted_without_waiting(
    exporter: GatedExporter, caplog: pytest.LogCaptureFixture
) -> None:
    export = SpanExport(exporter, "collector", queued_max=4, gather_s=0.01)
    export.start()
    export.put(finished())
    wait_until(lambda: not export._queue)  # the thread has it, and waits for the collector
    with caplog.at_level(logging.INFO, "baton.traces"):
        for _ in range(10):
            export.put(finished())
        assert export.totals() == SpanTotals(0, 6)
        exporter.gate.set()
        wait_until(lambda: export.totals() == SpanTotals(5, 6))
    warned, again = [record.levelname for record in caplog.records]
    assert (warned, again) == ("WARNING", "INFO")
    export.close()


def test_a_batch_that_was_not_taken_is_counted_and_said_once(
    exporter: GatedExporter, caplog: pytest.LogCaptureFixture
) -> None:
    exporter.takes = False
    exporter.gate.set()
    export = SpanExport(exporter, "collector", gather_s=0.01)
    export.start()
    with caplog.at_level(logging.INFO, "baton.traces"):
        for number in range(1, 4):
            export.put(finished())
            wait_until(lambda number=number: export.totals().dropped == number)  # type: ignore[misc]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    export.close()


def test_what_waits_is_sent_at_the_end(exporter: GatedExporter) -> None:
    exporter.gate.set()
    export = SpanExport(exporter, "collector", gather_s=600)
    for _ in range(3):
        export.put(finished())
    export.start()
    export.close()
    assert (sum(exporter.batches), export.totals()) == (3, SpanTotals(3, 0))


def test_a_collector_that_does_not_answer_is_given_up_at_the_end(exporter: GatedExporter) -> None:
    export = SpanExport(exporter, "collector", gather_s=0.01)
    export.start()
    export.put(finished())
    wait_until(lambda: not export._queue)
    export.close(limit_s=0.1)
    assert exporter.was_shut_down
    assert export._thread.daemon
    export.put(finished())
    assert export.totals().dropped >= 1


@pytest.mark.parametrize(
    "address", ["", "collector", "collector:4318", "ftp://collector", "http://", "http://a:b", "http://[", "\n"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(NoTraces, match="--otlp-endpoint must be an address such as"):
        check_endpoint(address)


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint(None)
    monkeypatch.setattr(otlp, "find_spec", lambda name: None)
    with pytest.raises(NoTraces) as refusal:
        check_endpoint("http://127.0.0.1:4318")
    assert str(refusal.value) == "--otlp-endpoint needs the extra 'otel': pip install 'baton-serve[otel]'"


def test_an_address_without_a_path_gets_the_path_of_the_standard() -> None:
    assert traces_url("http://collector:4318") == traces_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert traces_url("https://collector/api/otlp") == "https://collector/api/otlp"


def test_spans_arrive_at_a_collector_as_they_were() -> None:
    pytest.importorskip(otlp._LIBRARY, reason="needs the extra otel")
    with otlp_receiver() as receiver:
        export = SpanExport(OtlpExporter(receiver.url, "baton", "solo"), receiver.url, gather_s=0.01)
        export.start()
        export.put(finished("mine"))
        (span,) = receiver.trace_of("mine")
        export.close()
    assert (span.name, span.trace_id, span.span_id, span.parent_id) == ("POST /", "a" * 32, "b" * 16, "")


def test_a_port_where_nobody_listens_costs_the_spans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(otlp._LIBRARY, reason="needs the extra otel")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{port.getsockname()[1]}"
        export = SpanExport(OtlpExporter(where, "baton", "solo"), where, gather_s=0.01)
        export.start()
        export.put(finished())
        wait_until(lambda: export.totals() == SpanTotals(0, 1))
        export.close()
    assert not export._thread.is_alive()


def test_headers_and_names_of_the_environment_go_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(otlp._LIBRARY, reason="needs the extra otel")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chatty")
    with otlp_receiver() as receiver:
        exporter = OtlpExporter(receiver.url, "baton", "solo")
        assert exporter.export(spans_of(finished("mine")))
        exporter.shutdown()
    assert [headers["x-collector-key"] for headers in receiver.headers] == ["abc"]
    assert [span.service for span in receiver.spans()] == ["chatty"]


def test_the_address_of_a_collector_is_logged_without_what_may_be_secret() -> None:
    assert _shown("https://user:secret@traces.example:4318/v1/traces?api_key=k") == "https://traces.example:4318/v1/traces"
