"""A scrape of a real server that has served requests, under vLLM's names: what vLLM's published board and the endpoint
picker of the Gateway API's inference extension ask for is there, with their labels."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from tests.support.server import ServerProcess, baton_router, baton_serve
from tests.support.waiting import wait_until

KEY = "read-by-prometheus-only"
SCRIPTED = ("--executor", "scripted")
SHORT_OF_BLOCKS = ("--kv-blocks", "8", "--max-num-seqs", "4", "--reserve", "none", "--no-prefix-cache")

GATEWAY = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info")
"""Metrics that the endpoint picker reads of a vLLM server, but for those of LoRA."""
OLD_GATEWAY = ("vllm:gpu_cache_usage_perc",)
BOARD = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum",
    "vllm:time_per_output_token_seconds_count",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
)
"""Metrics that the Grafana board in vLLM's examples queries, of this year and of the year before."""
FURTHER = (
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:iteration_tokens_total_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)
"""What vLLM's documentation lists besides, and Baton has."""


def scraped(server: ServerProcess, key: str = KEY) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"})
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = (line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def named(page: dict[str, float], name: str) -> dict[str, float]:
    """Samples of that name, by their labels."""
    return {sample: value for sample, value in page.items() if sample.partition("{")[0] == name}


def ask(url: str, **fields: object) -> None:
    body = {"model": "scripted", "prompt": list(range(20)), "max_tokens": 60, "ignore_eos": True, **fields}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with baton_serve(*SCRIPTED, *SHORT_OF_BLOCKS, "--metrics-names", "vllm", "--metrics-key", KEY) as running:
        ask(running.url, n=3)
        ask(running.url, stream=True, max_tokens=5)
        yield running


def test_vllms_board_and_the_inference_gateway_find_all_that_they_ask_for(server: ServerProcess) -> None:
    wait_until(lambda: sum(named(scraped(server), "vllm:iteration_tokens_total_count").values()) > 0, "the sizes of steps")
    page = scraped(server)
    for name in (*GATEWAY, *OLD_GATEWAY, *BOARD, *FURTHER):
        found = named(page, name)
        assert found, name
        for sample in found:
            assert 'model_name="scripted"' in sample
            assert 'engine="0"' in sample
    assert not [sample for sample in page if "_created" in sample]


def test_the_values_are_those_of_what_was_served(server: ServerProcess) -> None:
    computed = "vllm:iteration_tokens_total_sum"
    wait_until(lambda: sum(named(scraped(server), "vllm:request_queue_time_seconds_count").values()) == 4, "all bills")
    wait_until(lambda: sum(named(scraped(server), computed).values()) >= 3 * 60 + 5, "the sizes of all steps")
    page = scraped(server)

    def value(name: str) -> float:
        return sum(named(page, f"vllm:{name}").values())

    (config,) = named(page, "vllm:cache_config_info")
    assert 'block_size="16"' in config
    assert 'num_gpu_blocks="8"' in config
    assert value("generation_tokens_total") == 3 * 60 + 5
    assert value("prompt_tokens_total") == 2 * 20
    assert value("request_success_total") == 4
    assert value("request_params_n_sum") == 3 + 1
    assert value("request_decode_time_seconds_count") == 4
    assert value("request_decode_time_seconds_sum") > 0
    assert value("num_preemptions_total") > 0, "three answers of 80 tokens do not fit 128"


def test_a_preemption_is_in_the_log_with_cause_and_cost_and_the_key_is_not(server: ServerProcess) -> None:
    line = re.search(r"preempted id=\S+ choice=\d cause=(growth|self) .*", server.output())
    assert line, server.output()
    assert re.search(r"way=compute compute_tokens=[1-9]\d* restore_bytes=0 cost_ms=\d+\.\d", line[0])
    assert KEY not in server.output()


def test_only_the_metrics_key_reads_the_metrics(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer another"}).status_code == 403
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    assert KEY not in server.output()


@pytest.mark.slow
def test_a_router_has_the_same_names_and_its_admin_key_reads_them() -> None:
    with (
        baton_router(*SCRIPTED, "--metrics-names", "both", "--admin-key", "operator") as router,
        baton_serve(*SCRIPTED, "--router", router.join, "--metrics-key", KEY) as instance,
    ):
        wait_until(lambda: httpx.get(f"{router.url}/ready").status_code == 200, "an instance")
        ask(router.url)
        page = scraped(router, "operator")
        for name in (*GATEWAY, *BOARD):
            assert named(page, name), name
        assert named(page, "baton_generation_tokens_total") == {'baton_generation_tokens_total{model_name="scripted"}': 60}
        assert sum(named(page, "vllm:generation_tokens_total").values()) == 60
        assert httpx.get(f"{router.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).status_code == 403
        assert named(scraped(instance), "baton_engine_steps_total"), "an instance behind a router has its own key"
        assert httpx.get(f"{instance.url}/metrics").status_code == 401


def test_the_admin_key_of_an_instance_behind_a_router_closes_its_metrics_to_clients() -> None:
    nobody = "127.0.0.1:9"  # it serves its own port while it looks for its router
    with baton_serve(*SCRIPTED, "--router", nobody, "--api-key", "client", "--admin-key", "operator") as instance:
        status = {
            key: httpx.get(f"{instance.url}/metrics", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("client", "operator", "stranger")
        }
    assert status == {"client": 403, "operator": 200, "stranger": 401}
