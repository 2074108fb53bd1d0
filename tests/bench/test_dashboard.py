"""The Grafana dashboard and the alerts name only metrics and labels that a server or a router has."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.reference import metric_rows

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD, ALERTS = DOCS / "grafana-dashboard.json", DOCS / "prometheus-alerts.yml"
OF_THE_SCRAPE = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of buckets."""
SHOWN = {
    "baton_moves_total", "baton_retries_total", "baton_handovers_total", "baton_engine_stalls_total",
    "baton_num_preemptions_total", "baton_request_queue_time_seconds_bucket", "baton_request_prefill_time_seconds_bucket",
    "baton_request_decode_time_seconds_bucket", "baton_inter_token_latency_seconds_bucket",
}  # fmt: skip
"""What an operator must find on the board, whatever else is there."""


@functools.cache
def labels_of() -> dict[str, frozenset[str]]:
    """The labels of every series."""
    found = {}
    for row in (row for rows in metric_rows() for row in rows):
        for suffix in ("_bucket", "_sum", "_count") if row.kind == "histogram" else ("",):
            found[row.name + suffix] = frozenset(row.labels)
    return found


def panels() -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return read


def on_the_board() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def in_the_alerts() -> list[str]:
    """The expressions of the rules, one a rule, also those folded over several lines."""
    found = re.findall(r"^ {8}expr: (?:>-\n)?(.*?)^ {8}\w", ALERTS.read_text(), re.MULTILINE | re.DOTALL)
    return [" ".join(one.split()) for one in found]


def series(expression: str) -> Iterator[tuple[str, str]]:
    """(name, what is in its braces) of each series of ours in an expression."""
    for name, _, selected in re.findall(r"\b(baton_\w+)(\{([^}]*)\})?", expression):
        yield name, selected


@pytest.mark.parametrize("expression", [*on_the_board(), *in_the_alerts()])
def test_every_metric_and_label_that_is_named_is_there(expression: str) -> None:
    named = dict(series(expression))
    assert named.keys() <= labels_of().keys()
    for name, selected in named.items():
        asked = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selected))
        assert asked <= labels_of()[name], name
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.replace(" ", "").split(",")}
    there = frozenset[str]().union(*(labels_of()[name] for name in named))
    assert grouped <= there | OF_THE_SCRAPE


def test_counters_are_shown_as_rates() -> None:
    for expression in [*on_the_board(), *in_the_alerts()]:
        for name in re.findall(r"baton_\w+(?:_total|_bucket|_sum|_count)\b", expression):
            assert re.search(rf"(?:rate|increase|resets)\({name}\b", expression), expression


def test_the_board_shows_moves_hand_overs_stalls_and_the_stages_of_requests() -> None:
    assert {name for expression in on_the_board() for name, _ in series(expression)} >= SHOWN


def rule(name: str) -> str:
    (found,) = re.findall(
        rf"^ {{6}}- alert: {name}\n(.*?)(?=^ {{6}}- alert: |\Z)", ALERTS.read_text(), re.MULTILINE | re.DOTALL
    )
    return str(found)


def test_the_share_of_work_done_twice_is_of_what_the_engine_computes() -> None:
    """Tokens of HTTP answers stay at 0 on an instance behind a router."""
    named = {name for name, _ in series(rule("BatonPreempting"))}
    assert named == {"baton_recomputed_tokens_total", "baton_iteration_tokens_total_sum"}


def test_a_lone_instance_that_ends_with_its_engine_is_seen_by_its_counters() -> None:
    assert "resets(baton_engine_steps_total[" in rule("BatonRestarted")


def test_the_runbook_has_a_row_for_each_alert() -> None:
    rows = re.findall(r"^\| (Baton\w+) \|", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert rows == re.findall(r"^ {6}- alert: (\w+)$", ALERTS.read_text(), re.MULTILINE)
    assert "runbook.md" in ALERTS.read_text().partition("groups:")[0]


def test_panels_have_their_own_ids_and_places() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_every_alert_has_an_expression_a_severity_and_words_for_who_is_woken() -> None:
    text = ALERTS.read_text()
    rules = re.split(r"^ {6}- alert: ", text, flags=re.MULTILINE)[1:]
    names = [rule.split("\n", 1)[0] for rule in rules]
    assert len(set(names)) == len(names) == len(in_the_alerts())
    for rule in rules:
        assert re.search(r"severity: (critical|warning|info)\}", rule), rule
        assert "summary: " in rule
        assert "description: " in rule
