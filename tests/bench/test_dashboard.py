"""The Grafana dashboard names only metrics that a server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"

HISTOGRAMS = (
    "baton_time_to_first_token_seconds",
    "baton_time_per_output_token_seconds",
    "baton_e2e_request_latency_seconds",
    "baton_constraint_compile_seconds",
)
METRICS = frozenset(
    {
        "baton_num_requests_running",
        "baton_num_requests_waiting",
        "baton_kv_blocks",
        "baton_kv_cache_usage_perc",
        "baton_prefix_cache_hits_total",
        "baton_prefix_cache_queries_total",
        "baton_prompt_tokens_total",
        "baton_generation_tokens_total",
        "baton_request_success_total",
        "baton_stale_results_total",
        "baton_num_preemptions_total",
        "baton_recomputed_tokens_total",
        "baton_chunk_prefill_unsatisfied_total",
        "baton_reserve_ratio",
        "baton_engine_steps_total",
        "baton_role_info",
        "baton_peers",
        "baton_handovers_open",
        "baton_handovers_total",
        "baton_constraints_total",
        "baton_constraint_cache_bytes",
        *(name + suffix for name in HISTOGRAMS for suffix in ("_bucket", "_sum", "_count")),
    }
)


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_it_names_every_metric_of_the_list_and_no_other() -> None:
    named = {name for expression in expressions() for name in re.findall(r"baton_\w+", expression)}
    assert named == METRICS


def test_counters_are_shown_as_rates() -> None:
    for expression in expressions():
        for name in re.findall(r"baton_\w+(?:_total|_bucket|_sum|_count)\b", expression):
            assert f"rate({name}" in expression


def test_panels_have_their_own_ids_and_places() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells
