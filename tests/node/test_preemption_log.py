"""The log lines of preemptions: cause and cost of each, and few of a storm."""

from __future__ import annotations

import logging

import pytest

from baton.core.engine.preemption_record import RECENT_MAX, Preemption, RecentPreemptions
from baton.core.engine.request import RequestId
from baton.node.log_lines import fields_of
from baton.node.preemption_log import LINES, PreemptionLog, shown_id


def preemption(cause: str = "growth", request_id: str = "9f2c41d0:ask-1:2") -> Preemption:
    return Preemption(RequestId(request_id), cause, 1, "host", 12, 3, 4_560)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.engine")


def test_a_preemption_is_a_line_with_its_cause_and_cost(caplog: pytest.LogCaptureFixture) -> None:
    recent = RecentPreemptions()
    log = PreemptionLog(recent, block_bytes=1000, clock_s=lambda: 0.0)
    log.look()
    assert not logged(caplog)
    recent.add(preemption())
    log.look()
    log.look()
    (line,) = logged(caplog)
    assert line == (
        "preempted id=ask-1 choice=2 cause=growth preemptions=1 way=host compute_tokens=12 restore_bytes=3000 cost_ms=4.6"
    )
    assert fields_of(line)["restore_bytes"] == 3000


def test_of_a_storm_few_lines_are_written_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    recent, now_s = RecentPreemptions(), [0.0]
    log = PreemptionLog(recent, block_bytes=1, clock_s=lambda: now_s[0])
    for _ in range(50):
        recent.add(preemption("growth"))
    recent.add(preemption("self"))
    log.look()
    assert len(logged(caplog)) == LINES + 1, "another cause has its own lines"
    now_s[0] = 11.0
    recent.add(preemption("growth"))
    log.look()
    assert logged(caplog)[-1].endswith(f" left_out={50 - LINES}")


def test_more_than_the_record_keeps_are_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    recent = RecentPreemptions()
    log = PreemptionLog(recent, block_bytes=1, clock_s=lambda: 0.0)
    for _ in range(2 * RECENT_MAX):
        recent.add(preemption())
    log.look()
    assert len(logged(caplog)) == LINES


def test_the_tenant_of_a_request_is_not_shown() -> None:
    assert shown_id("tenant-hash:mine:0") == "id=mine choice=0"
    assert shown_id("mine:3") == "id=mine choice=3"
    assert shown_id("bare") == "id=bare"
