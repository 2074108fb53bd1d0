"""The idempotency benchmark on few records: that it measures and that records are kept, not how fast anything is."""

from __future__ import annotations

from benchmarks.idempotency import KeyedRequests, _measured
from benchmarks.runner import Progress


async def test_each_request_has_a_key_of_its_own_and_leaves_a_record() -> None:
    keyed = KeyedRequests(events=3)
    for _ in range(5):
        await keyed.ask()
    assert len(keyed.middleware.records) == 5


def test_both_sides_are_measured() -> None:
    quiet = Progress(lambda _: None, lambda _: None, lambda: None)
    report = _measured(records=10, requests=5, events=3, pairs=1, progress=quiet).run()
    assert (len(report.none), len(report.many)) == (1, 1)
    assert report.ratio > 0
