from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from baton.sim.report import (
    SCHEMA,
    BadRecord,
    BusyShares,
    LatencyTargets,
    PoolShares,
    QueueLengths,
    RunSummary,
    SimReport,
    describe,
    span_of,
    summarise,
)
from baton.sim.report_tables import show
from baton.sim.run_records import HandoverTotals, InstanceSample, RequestOutcome, RunRecord, SimulatedRequest, StepSpan
from tests.sim.made_records import busy_hour, record, request_record, sample

TARGETS = LatencyTargets(ttft_s=1.0, tpot_ms=50.0)


def shown(*runs: RunSummary, width: int = 150) -> str:
    out = io.StringIO()
    report = SimReport(SCHEMA, "0.0.0", {}, TARGETS.ttft_s, TARGETS.tpot_ms, ["A note."], list(runs))
    show(Console(file=out, width=width), report, "A title")
    return out.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip("│ ").startswith(f"{name} ")]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_percentiles_are_exact() -> None:
    seen = describe([value * 1_000_000 for value in (5, 1, 3, 2, 4)])
    assert seen is not None
    assert (seen.count, seen.mean, seen.p50, seen.max) == (5, 3.0, 3.0, 5.0)
    assert seen.p90 == pytest.approx(4.6)
    assert seen.p99 == pytest.approx(4.96)
    assert describe([None, 7_000, None], unit_us=1e3) == describe([7_000], unit_us=1e3)
    assert describe([None]) is None


def test_latencies_are_what_the_client_saw() -> None:
    summary = summarise(record(*(request_record(n, n * 1_000_000, 200_000 * (n + 1), 10_000) for n in range(5))), TARGETS)
    assert summary.ttft_s is not None
    assert summary.tpot_ms is not None
    assert summary.e2e_s is not None
    assert (summary.ttft_s.mean, summary.ttft_s.p50, summary.ttft_s.max) == (pytest.approx(0.6), 0.6, 1.0)
    assert summary.tpot_ms.p99 == pytest.approx(10.0)
    assert summary.e2e_s.p50 == pytest.approx(0.7)
    assert summary.span_s == pytest.approx(5.1)
    assert summary.rates.requests_per_s == pytest.approx(5 / 5.1)
    assert summary.rates.output_tokens_per_s == pytest.approx(55 / 5.1)
    assert summary.rates.input_tokens_per_s == pytest.approx(500 / 5.1)


def test_goodput_needs_both_targets_and_counts_those_that_were_refused() -> None:
    in_time, late, slow = (
        request_record(0, 0, 1_000_000, 50_000),
        request_record(1, 0, 1_000_001, 10),
        request_record(2, 0, 10, 50_001),
    )
    one_token = request_record(3, 0, 900_000, 0, outputs=1)
    refused = SimulatedRequest(4, 0, 10, ended_us=100, outcome=RequestOutcome.REFUSED)
    summary = summarise(record(in_time, late, slow, one_token, refused), TARGETS)
    assert summary.rates.good_share == pytest.approx(2 / 5)
    assert summary.span_s is not None
    assert summary.rates.good_per_s == pytest.approx(2 / summary.span_s)
    assert (summary.counts.requests, summary.counts.finished, summary.counts.refused) == (5, 4, 1)


def test_requests_that_did_not_finish_are_counted_and_nowhere_else() -> None:
    cut = replace(request_record(1, 0, 500_000_000, 1), outcome=RequestOutcome.ABORT, output_tokens=3)
    broken, lost = (
        SimulatedRequest(n, 0, 10, ended_us=50, outcome=how)
        for n, how in ((2, RequestOutcome.ERROR), (3, RequestOutcome.LOST))
    )
    summary = summarise(record(request_record(0, 0, 100_000, 1_000), cut, broken, lost, SimulatedRequest(4, 0, 10)), TARGETS)
    counts = summary.counts
    assert (counts.finished, counts.aborted, counts.errors, counts.lost, counts.unfinished) == (1, 1, 1, 1, 1)
    assert counts.broken == 3
    assert summary.ttft_s is not None
    assert summary.ttft_s.max == pytest.approx(0.1)
    assert summary.tokens.output_tokens == 11


def test_tokens_add_up() -> None:
    first = replace(request_record(0, 0, 100, 100, outputs=11, inputs=90), cached_tokens=30)
    second = replace(request_record(1, 0, 100, 100, outputs=1, inputs=10), recomputed_tokens=20, preemptions=2)
    summary = summarise(record(first, second), TARGETS)
    assert summary.tokens.hit_rate == pytest.approx(0.3)
    assert summary.tokens.recomputed_share == pytest.approx(20 / (60 + 10 + 10 + 20))
    assert (summary.preemptions, summary.preempted_requests) == (2, 1)


def test_the_ledger_and_the_queues_are_means_and_peaks_of_looks() -> None:
    made = record(request_record(0, 0, 100, 100), instances=2)
    made.samples = [
        sample(0, 0, held=10, cached=0, running=1, waiting=0),
        sample(0, 1, held=30, cached=20, running=3, waiting=2),
        sample(5, 0, held=80, cached=20, running=8, waiting=10),
        sample(5, 1, held=0, cached=0, running=0, waiting=0),
    ]
    summary = summarise(made, TARGETS)
    assert summary.ledger is not None
    assert msgspec.structs.asdict(summary.ledger) == pytest.approx(
        {"held_mean": 0.3, "held_peak": 0.8, "cached_mean": 0.1, "free_mean": 0.6, "leased_mean": 0.0}
    )
    assert summary.queues == QueueLengths(3.0, 8, 3.0, 10)


def test_busy_is_the_share_of_the_span_in_which_a_device_computed() -> None:
    made = record(request_record(0, 0, 500, 50), instances=3)  # spans 1,000 µs
    assert summarise(made, TARGETS).busy is None
    made.busy_us = [800, 100, 0]
    assert summarise(made, TARGETS).busy == BusyShares(0.0, 0.1, 0.8)


def test_absent_is_not_zero() -> None:
    summary = summarise(RunRecord("empty", 0, 1, 100, 16), TARGETS)
    assert (summary.ttft_s, summary.ledger, summary.busy, summary.span_s, summary.simulated_per_wall) == (None,) * 5
    assert summary.rates.good_share is None
    text = shown(summary)
    assert row(text, "TTFT s") == ["–"] * 5
    assert row(text, "goodput, requests/s") == ["–"]
    assert row(text, "simulated ÷ wall") == ["–"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda r: setattr(r, "pool_blocks", 0), "of 0 blocks"),
        (lambda r: setattr(r.requests[0], "first_us", -1), "before it arrived"),
        (lambda r: setattr(r.requests[0], "ended_us", 1), "ended before it began"),
        (lambda r: setattr(r.requests[0], "instance", 7), "instance 7"),
        (lambda r: setattr(r.requests[0], "cached_tokens", 101), "101 of 100 prompt tokens"),
        (lambda r: setattr(r.requests[0], "first_us", None), "without a first token"),
        (lambda r: r.samples.append(sample(0)._replace(free_blocks=41)), "had 101 blocks"),
        (lambda r: r.samples.append(sample(0, instance=1)), "of instance 1"),
        (lambda r: r.spans.append(StepSpan(0, 9, 5, 4, 1, 0)), "step 9 of instance 0 ends before"),
    ],
)
def test_nonsense_is_refused(spoil: object, complaint: str) -> None:
    made = record(request_record(0, 0, 100, 100))
    spoil(made)  # type: ignore[operator]
    with pytest.raises(BadRecord, match=complaint):
        summarise(made, TARGETS)


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_targets_are_positive_numbers(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        LatencyTargets(*bad)


def test_several_seeds_show_the_median_and_the_spread() -> None:
    runs = [
        summarise(record(request_record(0, 0, ttft_us, 1_000), seed=ttft_us), TARGETS)
        for ttft_us in (300_000, 100_000, 200_000)
    ]
    text = shown(*runs)
    assert row(text, "TTFT s")[1] == "0.200 (0.100–0.300)"
    assert row(text, "finished") == ["1"]
    assert "Median of 3 seeds" in text
    assert "A note." in text


def test_policies_stand_side_by_side() -> None:
    runs = [
        summarise(record(request_record(0, 0, ttft_us, 1_000), label=name), TARGETS)
        for name, ttft_us in (("a", 1), ("b", 10**6))
    ]
    text = shown(*runs)
    assert row(text, "TTFT s, p99") == ["0.000", "1.000"]
    assert row(text, "goodput, share of requests") == ["100.0%", "100.0%"]


def test_a_large_run_is_described_and_survives_its_json() -> None:
    made = busy_hour()
    summary = summarise(made, TARGETS)
    assert (summary.counts.finished, summary.counts.refused) == (12_000, 25)
    assert summary.simulated_per_wall == pytest.approx(made.end_us / 1e6 / 41.0)
    assert span_of(made) == pytest.approx(made.end_us, rel=0.01)
    report = SimReport(SCHEMA, "0.0.0", {"instances": 16}, 1.0, 50.0, [], [summary])
    assert msgspec.json.decode(msgspec.json.encode(report), type=SimReport) == report
    assert "refused" in shown(summary)
    assert "lost" not in shown(summary)


def test_roles_are_described_apart() -> None:
    made = record(request_record(0, 0, 100_000, 1_000), instances=3)
    made.roles, made.pools = ["decode", "decode", "prefill"], [100, 100, 50]
    made.busy_us = [11_000, 55_000, 110_000]
    made.handed = [
        HandoverTotals(1, 0, 0, 5_000, 11_000),
        HandoverTotals(2, 1, 0, 7_000, 0),
        HandoverTotals(3, 0, 1, 12_000, 22_000),
    ]
    made.took_us = [90_000]
    made.samples = [sample(0), sample(0, 1, held=60), InstanceSample(0, 2, 1, 2, 10, 5, 25, 0, 0.5, leased_blocks=10)]
    summary = summarise(made, TARGETS)
    decode, prefill = summary.roles
    assert (decode.instances, decode.handovers, decode.refused, decode.failed) == (2, 3, 1, 0)
    assert (prefill.instances, prefill.handovers, prefill.failed, prefill.gigabytes) == (1, 3, 1, 12e-6)
    assert decode.busy == BusyShares(pytest.approx(0.1), pytest.approx(0.3), pytest.approx(0.5))
    assert decode.link_busy == pytest.approx(0.05)
    assert prefill.ledger == PoolShares(0.5, 0.5, 0.1, 0.2, 0.2)
    assert prefill.queues == QueueLengths(1.0, 1, 2.0, 2)
    assert summary.handover_s is not None
    said = shown(summary)
    assert row(said, "hand-overs") == ["3", "3"]
    assert row(said, "link busy") == ["5.00%", "20.00%"]


def test_runs_without_roles_say_nothing_of_them() -> None:
    said = shown(summarise(record(request_record(0, 0, 100_000, 1_000)), TARGETS))
    assert "by role" not in said
    assert "hand-over" not in said
