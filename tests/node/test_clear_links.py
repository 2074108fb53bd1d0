"""What leaves this machine without encryption is said at the start, and what stays on it is not."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest

from baton.node.clear_links import clear_links_of_http, clear_links_of_instance, clear_links_of_router, tell_clear_links
from baton.node.service import ServeSettings, serve
from baton.node.settings import EngineSettings, HttpSettings
from baton.node.start_stages import StageLines, StartStages


def links_of(**fields: Any) -> list[str]:
    return clear_links_of_instance(EngineSettings("", None, b"", **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"router": "127.0.0.1:8200", "kv_store": "valkey://localhost:6379/0"},
        {"role": "decode", "peers": ("127.0.0.1:1",), "kv_store": "file:kv"},
        {"kv_store": "valkeys://:secret@10.0.0.9/0?verify=none"},
        {"role": "prefill", "peer_host": "::1"},
    ],
)
def test_what_stays_on_this_machine_or_is_encrypted_is_not_named(fields: dict[str, Any]) -> None:
    assert links_of(**fields) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"router": "10.0.0.1:8200"}, "messages with the router at 10.0.0.1:8200 (prompts, answers and hashes"),
        ({"role": "prefill", "peer_host": "10.0.0.2"}, "peers through 10.0.0.2 (prompts and KV; the cluster key auth"),
        ({"role": "decode", "peers": ("10.0.0.3:1",)}, "not KV over TCP"),
        ({"role": "prefill", "peer_host": "10.0.0.2", "transfer": "mooncake"}, "the KV is not authenticated either"),
        ({"kv_store": "redis://me:secret@10.0.0.9:6379/0"}, "valkey://10.0.0.9:6379/0 (KV and the password; valkeys://"),
        ({"kv_store": "mooncake://10.0.0.9:50051"}, "mooncake://10.0.0.9:50051 (KV)"),
    ],
)
def test_each_link_to_another_machine_is_named_with_what_it_carries(fields: dict[str, Any], said: str) -> None:
    (link,) = links_of(**fields)
    assert said in link
    assert "secret" not in link


def test_http_is_named_where_it_is_plain_and_can_be_reached() -> None:
    assert clear_links_of_http(HttpSettings()) == clear_links_of_http(HttpSettings(host="10.0.0.5", ssl_certfile="c")) == []
    (link,) = clear_links_of_http(HttpSettings(host="10.0.0.5"))
    assert link == "HTTP at 10.0.0.5 (API keys, prompts and answers; --ssl-certfile encrypts them)"
    assert clear_links_of_router("127.0.0.1") == []
    assert "messages with instances at 10.0.0.5" in clear_links_of_router("10.0.0.5")[0]


def test_all_of_them_are_one_warning_and_none_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    tell_clear_links([])
    assert not caplog.records
    tell_clear_links(["one", "two"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("not encrypted: one; two. ")


def test_an_instance_says_it_before_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineSettings("", None, b"", router="10.0.0.1:8200")
    settings = ServeSettings(host="10.255.255.1", api_keys=("k",), engine=engine, executor="scripted")  # type: ignore[arg-type]
    with patch("baton.node.service.bind", side_effect=InterruptedError), pytest.raises(InterruptedError):
        serve(settings, lambda _line: None, StartStages(StageLines(lambda _line: None)))
    (record,) = [record for record in caplog.records if "not encrypted" in record.message]
    assert "HTTP at 10.255.255.1" in record.message
    assert "the router at 10.0.0.1:8200" in record.message


def test_a_collector_of_traces_on_another_machine_is_named_unless_it_speaks_tls() -> None:
    (told,) = clear_links_of_http(HttpSettings(otlp_endpoint="http://10.0.0.2:4318"))
    assert "traces to 10.0.0.2" in told
    for address in ("https://10.0.0.2:4318", "http://127.0.0.1:4318"):
        assert clear_links_of_http(HttpSettings(otlp_endpoint=address)) == []
