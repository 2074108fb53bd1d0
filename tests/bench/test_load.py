from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from baton.bench.client import BenchRequest, TargetServer, retry_after_s
from baton.bench.load import ClosedLoopRate, LoadPlan, Loop, OpenLoopRate, RunResult, run_load
from baton.bench.report import summarise
from baton.bench.workload import BenchSession, Endpoint, Recipe, Round, WorkloadShape, fixed_sessions, poisson_arrivals
from tests.bench.server import Faults, OpenAiServer

Serve = Callable[..., OpenAiServer]


def run(
    server: OpenAiServer,
    sessions: Iterator[BenchSession],
    loop: Loop | None = None,
    ask: BenchRequest | None = None,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
    timeout_s: float = 10.0,
    seconds_max: float = 10.0,
    warmup: int = 0,
) -> RunResult:
    target = TargetServer(server.url, "words", endpoint, timeout_s=timeout_s)
    plan = LoadPlan(target, loop or ClosedLoopRate(4), Recipe(), ask or BenchRequest(), seconds_max, warmup)
    return asyncio.run(run_load(plan, sessions))


def singles(count: int, tokens: int = 3) -> Iterator[BenchSession]:
    return fixed_sessions(count, Round(8, tokens), WorkloadShape())


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_a_closed_loop_counts_exactly_and_keeps_its_concurrency(serve: Serve, endpoint: Endpoint) -> None:
    server = serve(Faults(token_s=0.002))
    result = run(server, singles(21), ClosedLoopRate(5), endpoint=endpoint)
    summary = summarise(result)
    assert (summary.counts.sent, summary.counts.succeeded, summary.counts.failed) == (21, 21, 0)
    assert (summary.counts.prompt_tokens, summary.counts.output_tokens) == (21 * 8, 21 * 3)
    assert summary.counts.cached_tokens == 21 * 4
    assert len(server.bodies) == 21
    assert server.in_flight_max == 5
    assert summary.latency.itl_ms is not None
    assert summary.latency.itl_ms.count == 21 * 2
    assert summary.latency.ttft_ms is not None
    assert summary.latency.ttft_ms.min >= 2.0
    assert sum(result.tokens.counts) == 21 * 3


def test_token_ids_and_sampling_are_sent_as_asked(serve: Serve) -> None:
    server = serve()
    run(server, singles(1))
    body = server.bodies[0]
    assert len(body["prompt"]) == 8
    assert all(1000 <= token < 20_000 for token in body["prompt"])
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0.0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert "return_token_ids" not in body


def lateness_s(server: OpenAiServer) -> list[float]:
    """Of each session of an open loop at 200 a second."""
    sessions = list(fixed_sessions(20, Round(8, 2), WorkloadShape(), poisson_arrivals(200.0, seed=3)))
    result = run(server, iter(sessions), OpenLoopRate(100))
    assert summarise(result).counts.succeeded == 20
    assert [record.due_s for record in result.records] == [session.due_s for session in sessions]
    return [record.sent_s - record.due_s for record in result.records]


def test_an_open_loop_sends_nothing_before_it_is_due(serve: Serve) -> None:
    assert min(lateness_s(serve())) >= 0.0


@pytest.mark.slow
@pytest.mark.timed
def test_an_open_loop_is_punctual(serve: Serve) -> None:
    assert max(lateness_s(serve())) < 1.5


def test_an_open_loop_never_has_more_outstanding_than_its_bound(serve: Serve) -> None:
    server = serve(Faults(token_s=0.01))
    result = run(
        server, fixed_sessions(12, Round(8, 3), WorkloadShape(), poisson_arrivals(10_000.0, seed=0)), OpenLoopRate(3)
    )
    assert server.in_flight_max == 3
    delay = summarise(result).latency.start_delay_ms
    assert delay is not None
    assert delay.max > 30.0  # what waited says so


def test_errors_are_counted_by_kind(serve: Serve) -> None:
    server = serve(Faults(status={0: 429, 1: 503, 2: 503, 3: 400}, error_event={4}, cut={5}, short={6}))
    summary = summarise(run(server, singles(10), ClosedLoopRate(1)))
    assert {kind: error.count for kind, error in summary.errors.items()} == {
        "http_429": 1, "http_503": 2, "http_400": 1, "error_event": 1, "broken_stream": 1, "token_count": 1,
    }  # fmt: skip
    assert (summary.counts.succeeded, summary.counts.failed) == (3, 7)
    assert "engine died" in summary.errors["error_event"].example
    assert summary.counts.output_tokens == 9


def test_a_short_answer_is_fine_when_the_end_token_counts(serve: Serve) -> None:
    server = serve(Faults(short={0}))
    summary = summarise(run(server, singles(2), ClosedLoopRate(1), BenchRequest(ignore_eos=False)))
    assert (summary.counts.failed, summary.counts.output_tokens) == (0, 5)
    assert "ignore_eos" not in server.bodies[0]


def test_retries_honour_retry_after(serve: Serve) -> None:
    server = serve(Faults(status={0: 429, 1: 503}, retry_after="0.1"))
    result = run(server, singles(1), ClosedLoopRate(1), BenchRequest(retries_max=5))
    assert summarise(result).counts.failed == 0
    assert result.records[0].retries == 2
    assert result.records[0].e2e_s >= 0.2


def test_retries_are_bounded(serve: Serve) -> None:
    server = serve(Faults(status=dict.fromkeys(range(10), 429), retry_after="0"))
    summary = summarise(run(server, singles(1), ClosedLoopRate(1), BenchRequest(retries_max=2)))
    assert (summary.counts.failed, summary.counts.retries, len(server.bodies)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 1.0),
        ("2", 2.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("99999", 60.0),
        ("nan", 1.0),
        ("soon", 1.0),
        ("Wed, 21 Oct 2015 07:28:05 GMT", 5.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_always_bounded(header: str | None, seconds: float) -> None:
    assert retry_after_s(header, datetime(2015, 10, 21, 7, 28, 0, tzinfo=UTC)) == seconds


def test_answers_without_usage_are_counted_by_events_and_said(serve: Serve) -> None:
    summary = summarise(run(serve(Faults(no_usage=True)), singles(2)))
    assert (summary.counts.output_tokens, summary.counts.usage_missing) == (6, 2)


def test_sessions_carry_history_on_completions(serve: Serve) -> None:
    server = serve()
    result = run(server, fixed_sessions(2, Round(8, 3), WorkloadShape(rounds=3, think_s=0.001)), ClosedLoopRate(1))
    assert [len(body["prompt"]) for body in server.bodies] == [8, 19, 30] * 2
    assert server.bodies[1]["prompt"][:11] == [*server.bodies[0]["prompt"], 500, 501, 502]
    assert [(record.session, record.round) for record in result.records] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_sessions_carry_history_on_chat(serve: Serve) -> None:
    server = serve()
    run(server, fixed_sessions(1, Round(8, 2), WorkloadShape(rounds=2)), ClosedLoopRate(1), endpoint=Endpoint.CHAT)
    messages = server.bodies[1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0] == server.bodies[0]["messages"][0]
    assert messages[1]["content"] == "w0 w1 "


def test_a_session_whose_round_failed_goes_no_further(serve: Serve) -> None:
    server = serve(Faults(status={0: 500}))
    result = run(server, fixed_sessions(2, Round(8, 2), WorkloadShape(rounds=2)), ClosedLoopRate(1))
    assert [(record.session, record.round, record.error) for record in result.records] == [
        (0, 0, "http_500"),
        (1, 0, None),
        (1, 1, None),
    ]


def test_a_slow_answer_times_out(serve: Serve) -> None:
    summary = summarise(run(serve(Faults(token_s=5.0)), singles(1), timeout_s=0.2))
    assert list(summary.errors) == ["timeout"]


def test_the_whole_run_ends_at_its_limit(serve: Serve) -> None:
    result = run(serve(Faults(token_s=5.0)), singles(100), ClosedLoopRate(2), seconds_max=0.3)
    assert result.cut_short
    assert [record.error for record in result.records] == ["run_ended", "run_ended"]


def test_nobody_at_the_address_is_an_error_not_a_crash(serve: Serve) -> None:
    server = serve()
    server.url = "http://127.0.0.1:1"
    assert list(summarise(run(server, singles(2))).errors) == ["connect"]


def test_warm_up_is_sent_and_not_measured(serve: Serve) -> None:
    server = serve()
    result = run(server, singles(3), warmup=2)
    assert (len(server.bodies), len(result.records)) == (5, 3)


def test_streamed_token_ids_are_counted_against_usage(serve: Serve) -> None:
    server = serve()
    assert summarise(run(server, singles(2), ask=BenchRequest(return_token_ids=True))).counts.failed == 0
    assert server.bodies[0]["return_token_ids"] is True
