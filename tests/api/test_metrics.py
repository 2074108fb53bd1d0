"""What `/metrics` shows of requests, under which names, and who may read it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.api.engine import EngineInfo
from baton.api.histograms import TOKENS, UnlockedHistogram
from baton.api.metric_names import COUNTERPARTS, MetricNames
from baton.api.metrics import AnswerTimes, Metrics
from baton.api.model_text import ModelText
from baton.api.named_metrics import NamedMetrics
from baton.api.settings import ApiSettings, BadApiSettings
from baton.api.text_reader import TextDelta
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import STEP_TOKENS, SchedulerGauges, StepSizes
from baton.core.engine.request import FinishReason
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.support.waiting import wait_until

MODEL = 'model_name="tiny"'


def samples(page: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def scraped(served: Served) -> dict[str, float]:
    return samples(served.call("GET", "/metrics").body.decode())


def page_of(engine: ScriptedEngine, names: MetricNames) -> dict[str, float]:
    return samples(Metrics(engine, "tiny", names=names).page().decode())


def delta(tokens: int, finish: FinishReason | None = None, index: int = 0) -> TextDelta:
    return TextDelta(index, "x", tuple(range(tokens)), (), (), finish, False)


# ── what is shown of requests ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_stages_of_each_choice_are_observed_as_its_bill_tells_them(served: Served, engine: ScriptedEngine) -> None:
    engine.bill = lambda _: Bill(queue_us=250_000, prefill_us=1_000_000, transfer_us=500_000, decode_us=2_000_000)
    served.chat(n=2)
    served.complete(max_tokens=3)
    page = scraped(served)
    for stage, seconds in {"queue": 0.25, "prefill": 1.0, "decode": 2.0, "inference": 3.5}.items():
        assert page[f"baton_request_{stage}_time_seconds_count{{{MODEL}}}"] == 3
        assert page[f"baton_request_{stage}_time_seconds_sum{{{MODEL}}}"] == pytest.approx(3 * seconds)


def test_a_bill_that_comes_after_a_stop_string_is_observed_too(served: Served, engine: ScriptedEngine) -> None:
    engine.bill = lambda _: Bill(queue_us=1, prefill_us=1, decode_us=1)
    served.complete(stop="world", stream=True)
    wait_until(lambda: scraped(served)[f"baton_request_queue_time_seconds_count{{{MODEL}}}"] == 1)


def test_what_requests_asked_for_is_observed_once_for_each(served: Served) -> None:
    served.chat(n=3, max_tokens=5)
    served.complete(prompt=["a", "b"], n=2, max_tokens=7)
    page = scraped(served)
    assert page[f"baton_request_params_n_sum{{{MODEL}}}"] == 3 + 2
    assert page[f"baton_request_params_n_count{{{MODEL}}}"] == 2
    assert page[f"baton_request_params_max_tokens_sum{{{MODEL}}}"] == 3 * 5 + 4 * 7
    assert page[f"baton_request_max_num_generation_tokens_sum{{{MODEL}}}"] == 5 + 7, "the longest choice of each"


def test_a_delivery_counts_once_between_tokens_however_many_tokens_it_has(engine: ScriptedEngine) -> None:
    metrics = Metrics(engine, "tiny")
    times = AnswerTimes(metrics, 0.0, (4,), 1)
    for tokens in (1, 4, 4):
        times.seen(delta(tokens))
    times.seen(delta(0, FinishReason.STOP))
    page = samples(metrics.page().decode())
    assert page[f"baton_inter_token_latency_seconds_count{{{MODEL}}}"] == 2
    between = page[f"baton_inter_token_latency_seconds_sum{{{MODEL}}}"]
    assert page[f"baton_time_per_output_token_seconds_sum{{{MODEL}}}"] == pytest.approx(between / 4)
    assert page[f"baton_request_time_per_output_token_seconds_sum{{{MODEL}}}"] == pytest.approx(between / 8)
    assert page[f"baton_request_time_per_output_token_seconds_count{{{MODEL}}}"] == 1
    assert page[f"baton_generation_tokens_total{{{MODEL}}}"] == 9


def test_the_pool_and_the_steps_are_shown(served: Served, engine: ScriptedEngine) -> None:
    engine.info = EngineInfo(512, 320, slots=4, blocks=100, block_size=16, prefix_cache=False)
    counts = (3, 1) + (0,) * (len(STEP_TOKENS) - 1)
    engine.gauges = replace(engine.gauges, step_sizes=StepSizes(counts, 11), stalls=1)
    page = scraped(served)
    labels = 'block_size="16",enable_prefix_caching="False",kv_cache_size_tokens="1600",model_name="tiny"'
    assert page[f'baton_cache_config_info{{{labels},num_cpu_blocks="0",num_gpu_blocks="100"}}'] == 1
    assert page[f'baton_iteration_tokens_total_bucket{{le="1.0",{MODEL}}}'] == 3
    assert page[f'baton_iteration_tokens_total_bucket{{le="+Inf",{MODEL}}}'] == 4
    assert page[f"baton_iteration_tokens_total_sum{{{MODEL}}}"] == 11
    assert page[f"baton_engine_stalls_total{{{MODEL}}}"] == 1


def test_a_histogram_without_locks_shows_what_that_of_the_library_shows() -> None:
    registry = CollectorRegistry()
    theirs = Histogram("x", "text", ["model_name"], buckets=TOKENS, registry=registry).labels("tiny")
    ours = UnlockedHistogram("x", "text", TOKENS, {"model_name": "tiny"})
    drawn = random.Random(1)
    for _ in range(500):
        value = drawn.choice((float(drawn.choice(TOKENS)), drawn.uniform(0, 300_000), 0.0))
        theirs.observe(value)
        ours.observe(value)
    assert generate_latest(ours) == generate_latest(NamedMetrics(registry, MetricNames.BATON))


def test_no_series_tells_when_another_was_created(served: Served) -> None:
    served.complete(max_tokens=2)
    assert not [name for name in scraped(served) if "_created" in name]
    other = CollectorRegistry()
    prometheus_client.Counter("of_somebody_else", "text", registry=other).inc()
    assert b"of_somebody_else_created" in generate_latest(other), "who embeds us keeps theirs"


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_by_default_every_name_is_ours(engine: ScriptedEngine) -> None:
    assert all(name.startswith("baton_") for name in page_of(engine, MetricNames.BATON))


def test_vllm_names_take_the_place_of_ours_where_there_is_one(engine: ScriptedEngine) -> None:
    page = page_of(engine, MetricNames.VLLM)
    assert page[f'vllm:num_requests_running{{engine="0",{MODEL}}}'] == 2
    assert page[f'vllm:kv_cache_usage_perc{{engine="0",{MODEL}}}'] == 0.25
    assert page[f'vllm:gpu_cache_usage_perc{{engine="0",{MODEL}}}'] == 0.25, "as earlier boards and gateways ask for it"
    assert f"baton_num_requests_running{{{MODEL}}}" not in page
    assert page[f"baton_reserve_ratio{{{MODEL}}}"] == 0.25, "vLLM has no such thing"


def test_with_both_every_name_is_there(engine: ScriptedEngine) -> None:
    both = page_of(engine, MetricNames.BOTH)
    assert both == page_of(engine, MetricNames.BATON) | page_of(engine, MetricNames.VLLM)


def test_what_we_split_further_is_summed_under_vllms_name_and_shown_under_ours_too(engine: ScriptedEngine) -> None:
    now = SchedulerGauges(preemptions_for_others=3, preemptions_of_self=4)
    engine.gauges = replace(engine.gauges, scheduler=now)
    page = page_of(engine, MetricNames.VLLM)
    assert page[f'vllm:num_preemptions_total{{engine="0",{MODEL}}}'] == 7
    assert page[f'baton_num_preemptions_total{{cause="growth",{MODEL},policy="newest"}}'] == 3


def test_the_reasons_of_ends_are_those_of_vllm(engine: ScriptedEngine) -> None:
    metrics = Metrics(engine, "tiny", names=MetricNames.VLLM)
    for reason in FinishReason:
        metrics.count_end(reason)
    page = samples(metrics.page().decode())
    ends = {name.split('finished_reason="')[1].split('"')[0]: n for name, n in page.items() if "request_success" in name}
    assert ends == {"stop": 1, "length": 1, "abort": 2, "error": 2}


def test_every_name_of_the_table_is_shown_and_the_page_is_read_by_the_librarys_parser(engine: ScriptedEngine) -> None:
    page = Metrics(engine, "tiny", names=MetricNames.BOTH).page().decode()
    shown = {family.name.removesuffix("_info") for family in text_string_to_metric_families(page)}
    for ours, theirs in COUNTERPARTS.items():
        assert {ours, *theirs} <= shown


# ── who may read it ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def keyed(engine: ScriptedEngine, text: ModelText, api_keys: tuple[str, ...], *keys: str) -> Iterator[Served]:
    with serving(engine, text, ApiSettings(("tiny",), api_keys, metrics_keys=keys)) as served:
        yield served


def read(served: Served, key: str | None) -> tuple[int, str | None]:
    reply = served.call("GET", "/metrics", headers={} if key is None else {"Authorization": f"Bearer {key}"})
    return reply.status, reply.error["code"] if reply.status >= 400 else None


def test_a_metrics_key_opens_the_metrics_and_nothing_else(engine: ScriptedEngine, text: ModelText) -> None:
    with keyed(engine, text, ("client",), "scra:per") as served:
        assert read(served, "scra:per") == (200, None)
        assert served.call("HEAD", "/metrics", headers={"x-api-key": "scra:per"}).status == 200
        assert read(served, "client") == (403, "metrics_key_needed")
        assert read(served, "unknown") == (401, "invalid_api_key")
        assert read(served, None) == (401, "invalid_api_key")
        assert served.complete({"Authorization": "Bearer scra:per"}).status == 401
        assert served.complete({"Authorization": "Bearer client"}).status == 200


def test_a_metrics_key_guards_the_metrics_of_a_server_that_has_no_other_key(engine: ScriptedEngine, text: ModelText) -> None:
    with keyed(engine, text, (), "scraper") as served:
        assert read(served, "scraper") == (200, None)
        assert read(served, "another") == (403, "metrics_key_needed")
        assert read(served, None) == (401, "invalid_api_key")
        assert served.complete().status == 200


def test_without_a_metrics_key_every_api_key_opens_them(engine: ScriptedEngine, text: ModelText) -> None:
    with keyed(engine, text, ("client",)) as served:
        assert read(served, "client") == (200, None)
        assert read(served, None) == (401, "invalid_api_key")


@pytest.mark.parametrize("key", ["", "two words", " "])
def test_a_metrics_key_that_nobody_could_send_is_refused(key: str) -> None:
    with pytest.raises(BadApiSettings, match="metrics key"):
        ApiSettings(("tiny",), metrics_keys=(key,))
    assert "secret" not in repr(ApiSettings(("tiny",), metrics_keys=("secret",)))
