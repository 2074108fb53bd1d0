"""What the operator reads: the access log, the state log, and the metrics of preemption."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest

from baton.api.app import create_app
from baton.api.auth import tenant_of
from baton.api.engine import Gauges
from baton.api.errors import ApiError, invalid
from baton.api.logs import REFUSALS_A_SECOND, DenialLog, RefusalLog, StateLog
from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.cli.reference import metric_rows
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import DraftGauges, HandoverGauges, SchedulerGauges, StorageGauges, StoreTraffic
from baton.core.errors import Refusal, RefusalCode
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.support.waiting import wait_until

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
WHO = {"tenant": "-", "client": "127.0.0.1"}
STATE = {"running": "2", "waiting": "1", "free": "192", "evictable": "0", "ratio": "0.250"}
COST = Bill(recomputed_tokens=7, restored_tokens=5, preemptions=2, queue_us=1500, prefill_us=2500, decode_us=30_000)
PAID = {"preemptions": "2", "recomputed": "7", "restored": "5", "queue_ms": "1.5", "prefill_ms": "2.5", "decode_ms": "30.0"}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, engine: ScriptedEngine) -> Callable[[], list[dict[str, str]]]:
    """The lines of the access log so far, as their fields."""
    caplog.set_level(logging.INFO, "baton.access")
    engine.bill = lambda _: COST
    engine.cached_tokens = 1

    def read() -> list[dict[str, str]]:
        logged = [record.getMessage() for record in caplog.records if record.name == "baton.access"]
        return [dict(field.split("=", 1) for field in line.split(" ")) for line in logged]

    return read


Lines = Callable[[], list[dict[str, str]]]


def test_a_finished_request_has_one_line_with_its_cost_and_the_state(served: Served, lines: Lines) -> None:
    served.complete(headers={"X-Request-Id": "one"}, prompt="hi", max_tokens=3, n=2)
    served.chat(headers={"X-Request-Id": "two"}, stream=True)
    first, second = lines()
    assert first == {
        "id": "one", "path": "/v1/completions", "status": "200", "tenant": "-", "client": "127.0.0.1",
        "finish": "length,length", "prompt": "2",
        "completion": "6", "cached": "1", **PAID, "preemptions": "4", "recomputed": "14", "restored": "10", **STATE,
    }  # fmt: skip
    assert second == {
        "id": "two", "path": "/v1/chat/completions", "status": "200", "tenant": "-", "client": "127.0.0.1",
        "finish": "stop", "prompt": "5",
        "completion": "17", "cached": "1", **PAID, **STATE,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_by_a_stop_string_is_logged_with_its_cost(
    served: Served, engine: ScriptedEngine, lines: Lines, stream: bool
) -> None:
    served.complete(stop="world", stream=stream)
    wait_until(lambda: len(lines()) == 1)
    (line,) = lines()
    assert line["finish"] == "stop"
    assert line["completion"] == "2"
    assert {name: line[name] for name in PAID} == PAID


def test_a_death_is_logged_without_a_cost(served: Served, engine: ScriptedEngine, lines: Lines) -> None:
    engine.dies_after = 2
    assert served.chat().status == 503
    (line,) = lines()
    assert (line["status"], line["finish"]) == ("503", "cut")
    assert {line[name] for name in PAID} == {"-"}


def test_of_many_refused_requests_few_are_logged_and_all_are_counted(engine: ScriptedEngine, lines: Lines) -> None:
    now_s = 0.0
    log = RefusalLog(engine, lambda: now_s)

    def refuse() -> None:
        with pytest.raises(ApiError), log.logged("one", "/v1/completions", "", "127.0.0.1"):
            raise invalid("n", "n is too large")

    for _ in range(100):
        refuse()
    assert len(lines()) == 20
    now_s = 1.0
    refuse()
    assert lines()[-1]["left_out"] == "80"


def test_a_refused_request_is_logged_with_its_status_and_the_state(
    served: Served, engine: ScriptedEngine, lines: Lines
) -> None:
    served.chat(headers={"X-Request-Id": "bad"}, n=99)
    engine.refusal = Refusal(RefusalCode.QUEUE_FULL, "full", 1)
    served.complete(headers={"X-Request-Id": "late"})
    served.call("GET", "/v1/models")
    assert lines() == [
        {"id": "bad", "path": "/v1/chat/completions", "status": "400", **WHO, "error": "invalid_value", **STATE},
        {"id": "late", "path": "/v1/completions", "status": "429", **WHO, "error": "queue_full", **STATE},
    ]


def test_a_client_that_hangs_up_is_logged_as_such(served: Served, engine: ScriptedEngine, lines: Lines) -> None:
    from tests.api.test_lifecycle import opened

    engine.hangs_after = 2
    with opened(served, {"stream": True}):
        wait_until(lambda: len(engine.streams) == 1)
    wait_until(lambda: len(lines()) == 1)
    (line,) = lines()
    assert (line["status"], line["finish"], line["preemptions"]) == ("499", "cut", "2")


def test_nothing_is_logged_while_it_is_off(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "baton.access")
    served.chat()
    served.complete(stop="world")
    served.chat(n=99)
    assert not caplog.records


def test_the_state_is_logged_while_there_is_work_and_once_after_a_change(
    engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.engine")
    tokens = 0
    idle = Gauges(SchedulerGauges(free_blocks=256, reserve_ratio=0.7))
    engine.gauges = idle
    log = StateLog(engine, lambda: tokens, now_s=10.0)
    log.tick(11.0)
    assert caplog.messages == []
    engine.gauges, tokens = changed(idle, running=1, reserve_ratio=0.6), 30
    log.tick(13.0)
    log.tick(14.0)
    engine.gauges = idle
    log.tick(15.0)
    log.tick(16.0)
    assert caplog.messages == [
        "running=1 waiting=0 free=256 evictable=0 ratio=0.600 tokens_per_s=15.0",
        "running=1 waiting=0 free=256 evictable=0 ratio=0.600 tokens_per_s=0.0",
        "running=0 waiting=0 free=256 evictable=0 ratio=0.700 tokens_per_s=0.0",
    ]


def test_drafts_are_in_the_lines_once_there_are_any(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.engine")
    engine.gauges = Gauges(SchedulerGauges(running=1))
    log = StateLog(engine, lambda: 0, now_s=10.0)
    log.tick(11.0)
    for drafted, accepted in ((40, 25), (100, 30), (100, 30)):
        engine.gauges = replace(engine.gauges, drafts=DraftGauges(drafted, accepted))
        log.tick(12.0)
    assert [line.partition("tokens_per_s=0.0")[2] for line in caplog.messages] == [
        "", " drafts=40 accepted=25", " drafts=60 accepted=5", " drafts=0 accepted=0",
    ]  # fmt: skip


def changed(gauges: Gauges, **now: object) -> Gauges:
    return replace(gauges, scheduler=msgspec.structs.replace(gauges.scheduler, **now))


def arriving(gauges: Gauges, leased: int, receiving: int) -> Gauges:
    return changed(gauges, leased_blocks=leased, receiving_blocks=receiving)


def test_leased_and_receiving_blocks_are_in_the_lines_while_there_are_any(
    served: Served, engine: ScriptedEngine, lines: Lines
) -> None:
    idle = engine.gauges
    for leased, receiving in ((3, 0), (0, 4), (3, 4), (0, 0)):
        engine.gauges = arriving(idle, leased, receiving)
        served.chat(n=99)
        served.complete(max_tokens=1)
        shown = {name: str(n) for name, n in (("leased", leased), ("receiving", receiving)) if n}
        for line in lines()[-2:]:
            assert {name: line[name] for name in line if name in ("leased", "receiving")} == shown
            assert {name: line[name] for name in STATE} == STATE


def test_the_state_is_logged_while_blocks_are_leaving(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.engine")
    engine.gauges = Gauges(SchedulerGauges(free_blocks=250, leaving_blocks=6))
    log = StateLog(engine, lambda: 0, now_s=10.0)
    log.tick(11.0)
    assert caplog.messages == ["running=0 waiting=0 free=250 evictable=0 leaving=6 ratio=0.000 tokens_per_s=0.0"]


def test_the_state_is_logged_while_a_prefill_is_awaited(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.engine")
    engine.gauges = Gauges(SchedulerGauges(free_blocks=250, leased_blocks=6))
    log = StateLog(engine, lambda: 0, now_s=10.0)
    log.tick(11.0)
    engine.gauges = arriving(engine.gauges, 2, 4)
    log.tick(12.0)
    engine.gauges = Gauges(SchedulerGauges(free_blocks=256))
    log.tick(13.0)
    log.tick(14.0)
    assert caplog.messages == [
        "running=0 waiting=0 free=250 evictable=0 leased=6 ratio=0.000 tokens_per_s=0.0",
        "running=0 waiting=0 free=250 evictable=0 leased=2 receiving=4 ratio=0.000 tokens_per_s=0.0",
        "running=0 waiting=0 free=256 evictable=0 ratio=0.000 tokens_per_s=0.0",
    ]


def samples(served: Served) -> dict[str, str]:
    page = served.call("GET", "/metrics").body.decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in page if not line.startswith("#"))


def test_metrics_tell_preemptions_by_cause_and_policy(served: Served) -> None:
    page = samples(served)
    assert page['baton_num_preemptions_total{cause="growth",model_name="tiny",policy="newest"}'] == "3.0"
    assert page['baton_num_preemptions_total{cause="self",model_name="tiny",policy="newest"}'] == "0.0"
    assert page['baton_recomputed_tokens_total{model_name="tiny"}'] == "41.0"
    assert page['baton_chunk_prefill_unsatisfied_total{model_name="tiny"}'] == "5.0"
    assert page['baton_reserve_ratio{model_name="tiny"}'] == "0.25"
    assert page['baton_stale_results_total{model_name="tiny"}'] == "0.0"


def test_metrics_tell_how_many_drafts_were_made_and_accepted(served: Served, engine: ScriptedEngine) -> None:
    assert samples(served)['baton_draft_tokens_total{model_name="tiny"}'] == "0.0"
    engine.gauges = replace(engine.gauges, drafts=DraftGauges(40, 25))
    page = samples(served)
    assert page['baton_draft_tokens_total{model_name="tiny"}'] == "40.0"
    assert page['baton_accepted_draft_tokens_total{model_name="tiny"}'] == "25.0"


def test_metrics_tell_the_role_peers_and_hand_overs(served: Served, engine: ScriptedEngine) -> None:
    handovers = HandoverGauges(peers=2, open=3, made=10, refused=4, not_delivered=5, preempted=6, timed_out=7)
    engine.gauges = replace(changed(arriving(engine.gauges, 30, 34), handovers=handovers), role="decode")
    page = samples(served)
    assert page['baton_role_info{model_name="tiny",role="decode"}'] == "1.0"
    assert page['baton_peers{model_name="tiny"}'] == "2.0"
    assert page['baton_handovers_open{model_name="tiny"}'] == "3.0"
    outcomes = {"made": "10.0", "refused": "4.0", "not_delivered": "5.0", "preempted": "6.0", "timed_out": "7.0"}
    for outcome, count in outcomes.items():
        assert page[f'baton_handovers_total{{model_name="tiny",outcome="{outcome}"}}'] == count
    states = {"free": 192, "evictable": 0, "running": 64, "leased": 30, "receiving": 34}
    for state, blocks in states.items():
        assert page[f'baton_kv_blocks{{model_name="tiny",state="{state}"}}'] == f"{blocks}.0"
    assert page['baton_kv_cache_usage_perc{model_name="tiny"}'] == str(1 - 192 / 320), "leased blocks are in use"


def test_metrics_tell_what_is_beyond_the_pool(served: Served, engine: ScriptedEngine) -> None:
    storage = StorageGauges(
        host_rows=1, host_used=2, transfers=20, saved=3, unsaved=4, loaded=5, stored=6, unstored=7, fetched=8,
        recompute_cheaper=11, failed=12, late=13, breaker_open=1, breaker_opened=15,
    )  # fmt: skip
    moved = StoreTraffic(
        missing_blocks=9, bad_blocks={"torn": 10}, errors=14, saved_bytes=16, loaded_bytes=17, stored_bytes=18,
        fetched_bytes=19,
    )  # fmt: skip
    now = changed(engine.gauges, running_blocks=60, leaving_blocks=4, storage=storage)
    engine.gauges = replace(now, store=moved)
    page = samples(served)
    shown = {
        "host_kv_blocks": 1, "host_kv_blocks_used": 2, "kv_saved_blocks_total": 3, "kv_unsaved_blocks_total": 4,
        "kv_loaded_blocks_total": 5, "store_stored_blocks_total": 6, "store_unstored_blocks_total": 7,
        "store_fetched_blocks_total": 8, "store_missing_blocks_total": 9, "kv_recompute_cheaper_blocks_total": 11,
        "kv_transfers_open": 20, "kv_transfers_failed_total": 12, "kv_transfers_late_total": 13, "store_errors_total": 14,
        "store_breaker_open": 1, "store_breaker_opened_total": 15, "kv_saved_bytes_total": 16, "kv_loaded_bytes_total": 17,
        "store_stored_bytes_total": 18, "store_fetched_bytes_total": 19,
    }  # fmt: skip
    assert {name: page[f'baton_{name}{{model_name="tiny"}}'] for name in shown} == {
        name: f"{value}.0" for name, value in shown.items()
    }
    assert page['baton_store_bad_blocks_total{model_name="tiny",reason="torn"}'] == "10.0"
    assert page['baton_kv_blocks{model_name="tiny",state="leaving"}'] == "4.0"
    assert page['baton_kv_cache_usage_perc{model_name="tiny"}'] == str(1 - 192 / 256), "leaving blocks are in use"


def test_an_instance_without_peers_has_the_same_metrics_at_0(served: Served) -> None:
    page = samples(served)
    assert page['baton_role_info{model_name="tiny",role="mixed"}'] == "1.0"
    assert page['baton_kv_blocks{model_name="tiny",state="leased"}'] == "0.0"
    assert page['baton_peers{model_name="tiny"}'] == page['baton_handovers_open{model_name="tiny"}'] == "0.0"
    assert page['baton_handovers_total{model_name="tiny",outcome="made"}'] == "0.0"


def test_every_metric_of_the_dashboard_is_there_from_the_start(served: Served) -> None:
    text = json.dumps(json.loads(DASHBOARD.read_text()))
    named = set(re.findall(r"baton_\w+", text))
    for row in metric_rows()[1]:  # those of a router alone
        named -= {row.name, *(row.name + suffix for suffix in ("_bucket", "_sum", "_count"))}
    named.remove("baton_http_refusals_total")  # its reasons are told as they come
    there = {re.split(r"[{ ]", sample, maxsplit=1)[0] for sample in samples(served)}
    assert named
    assert named <= there


def test_who_is_denied_is_logged_with_its_address_and_a_path_that_breaks_no_line(
    engine: ScriptedEngine, text: ModelText, lines: Lines
) -> None:
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("key",))
    with serving(engine, text, settings) as locked:
        locked.call("GET", "/v1/models/a%0Ab%20c=d", headers={"X-Request-Id": "one", "Authorization": "Bearer wrong"})
        locked.chat(headers={"X-Request-Id": "two", "Authorization": "Bearer key"})
    first, second = lines()
    assert first == {"id": "one", "path": "/v1/models/a%0Ab%20c%3Dd", "status": "401", "client": "127.0.0.1"}
    assert (second["id"], second["tenant"]) == ("two", tenant_of("key")[:8])


def test_guesses_at_a_key_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.access")
    now_s = 0.0
    denials = DenialLog(lambda: now_s)
    for _ in range(500):
        denials.log("id", "/", 401, "10.0.0.9")
    assert len(caplog.messages) == REFUSALS_A_SECOND
    now_s = 2.0
    denials.log("id", "/", 401, "10.0.0.9")
    assert caplog.messages[-1] == f"id=id path=/ status=401 client=10.0.0.9 left_out={500 - REFUSALS_A_SECOND}"


def test_a_client_that_a_proxy_made_up_is_no_field_of_ours(engine: ScriptedEngine, text: ModelText, lines: Lines) -> None:
    app = create_app(engine, text, ApiSettings(served_model_names=("tiny",), api_keys=("key",)))

    async def ask(client: str) -> None:
        transport = httpx.ASGITransport(app=app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asking:
            await asking.get("/v1/models")

    for client in ("1.2.3.4 status=200", "::1", ""):
        asyncio.run(ask(client))
    assert [line["client"] for line in lines()] == ["unknown", "::1", "unknown"]
    assert {line["status"] for line in lines()} == {"401"}
