"""`--log-format json`: every line of every process of a fleet is one object."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import httpx2 as httpx

from baton.core.errors import EXIT_SETUP
from tests.support.server import ServerProcess, baton_process
from tests.support.waiting import wait_until


def lines_of(fleet: ServerProcess) -> list[dict[str, Any]]:
    """All whole lines so far."""
    return [json.loads(line) for line in fleet.output().splitlines(keepends=True) if line.endswith("\n")]


def served_at(fleet: ServerProcess) -> str | None:
    for line in lines_of(fleet):
        if line["logger"] == "baton.up" and (found := re.search(r"http://127\.0\.0\.1:\d+", line["message"])):
            return found[0]
    return None


def test_a_fleet_logs_nothing_but_json_and_requests_with_their_fields() -> None:
    options = ("--router-port", "0", "--mixed", "1", "--executor", "scripted", "--log-format", "json", "--log-level", "info")
    with baton_process("up", *options, wait=False) as fleet:
        wait_until(lambda: served_at(fleet) is not None, "the banner")
        body = {"model": "scripted", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        url = served_at(fleet)
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": 'a"b'})
        assert answer.status_code == 400, "an id is letters, digits and a few signs"
        assert httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "asked"}).status_code == 200
        wait_until(lambda: any(line["logger"] == "baton.access" for line in lines_of(fleet)), "the line of the request")
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(60) == 0
        lines = lines_of(fleet)
    assert all(line["time"].endswith("+00:00") and line["level"] for line in lines)
    assert {"router", "mixed-1"} <= {line["process"] for line in lines if "process" in line}
    access = [line["fields"] for line in lines if line["logger"] == "baton.access" and line["process"] == "router"]
    asked = next(fields for fields in access if fields["id"] == "asked")
    assert (asked["status"], asked["completion"], asked["path"]) == (200, 3, "/v1/completions")


def test_a_server_that_cannot_start_says_so_in_json() -> None:
    with baton_process("serve", "/nowhere", "--log-format", "json", "--port", "0", wait=False) as server:
        assert server.process.wait(60) == EXIT_SETUP
        last = lines_of(server)[-1]
    assert (last["level"], last["logger"]) == ("ERROR", "baton")
    assert "/nowhere" in last["message"]
