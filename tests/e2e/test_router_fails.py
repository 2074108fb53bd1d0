"""A router with a planted fault, as a real process: one that raises ends and its instances keep the requests; one that hangs
still writes its last decisions."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from baton.wire.recording_file import Recording
from tests.support.server import ServerProcess, baton_process, baton_serve
from tests.support.waiting import wait_until

KEY = ("--cluster-key", "a cluster key of the tests")
SCRIPTED = ("--executor", "scripted", *KEY)
PROMPT = list(range(40, 50))
TOKENS = 400
FAULT_TOKENS = 7
"""A request for so many tokens meets the fault."""
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1, "seed": 3, "ignore_eos": True}

PLANTED = f"""
import time
from baton.cli.main import run
from baton.core.errors import InvariantViolated
from baton.core.routing.events import RequestArrived
from baton.core.routing.router import Router

whole = Router.handle
def handle(self, event, now_us):
    if isinstance(event, RequestArrived) and event.group[0].max_tokens == {FAULT_TOKENS}:
        FAULT
    return whole(self, event, now_us)
Router.handle = handle
run()
"""
RAISES = PLANTED.replace("FAULT", 'raise InvariantViolated("the books do not add up")')
HANGS = PLANTED.replace("FAULT", "time.sleep(1000)")


def planted(script: str, folder: Path) -> Any:
    options = ("--port", "0", "--join-port", "0", *SCRIPTED, "--record-folder", str(folder))
    return baton_process("router", *options, program=("-c", script))


def ask(router: ServerProcess) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/completions", json=BODY | {"max_tokens": FAULT_TOKENS}, timeout=60)


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """(id, data) as they come."""
    at = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            at = value
        elif name == "data":
            yield at, value if value == "[DONE]" else json.loads(value)


def tokens_of(heard: list[tuple[str, Any]]) -> list[int]:
    return [token for _, event in heard if "choices" in event for one in event["choices"] for token in one["token_ids"]]


def test_a_router_that_raises_ends_with_the_reason_and_its_requests_go_on_at_the_next_one(tmp_path: Path) -> None:
    with planted(RAISES, tmp_path) as router:
        joining = ("--router", router.join, "--name", "i1", "--step-ms", "4")
        with baton_serve(*SCRIPTED, *joining):
            wait_until(lambda: httpx.get(f"{router.url}/ready").status_code == 200)
            heard = _heard_until_it_fails(router)
            assert httpx.get(f"{router.url}/health").status_code == 503
            assert httpx.post(f"{router.url}/v1/completions", json=BODY).status_code == 503
            assert router.process.wait(30) == 1, router.output()
            assert router.output().count("baton router: the router failed: the books do not add up") == 1
            (recording,) = tmp_path.iterdir()
            assert "the books do not add up" in Recording(recording.read_bytes()).header.reason
            ports = ("--port", router.url.rpartition(":")[2], "--join-port", router.join.rpartition(":")[2])
            with baton_process("router", *ports, *SCRIPTED) as again:
                wait_until(lambda: httpx.get(f"{again.url}/ready").status_code == 200)
                headers = {"Last-Event-ID": heard[-1][0]}
                with httpx.stream("GET", f"{again.url}/v1/requests/mine/stream", headers=headers, timeout=60) as rest:
                    heard += list(events(rest))
    assert tokens_of(heard) == undisturbed(PROMPT, Sampling(seed=3), TOKENS, BYTE_VOCABULARY)


def _heard_until_it_fails(router: ServerProcess) -> list[tuple[str, Any]]:
    body = BODY | {"stream": True, "return_token_ids": True}
    heard: list[tuple[str, Any]] = []
    url = f"{router.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers={"X-Request-Id": "mine"}, timeout=60) as response:
        for event in events(response):
            if "error" in event[1]:
                break
            heard.append(event)
            if len(heard) == 20:
                assert ask(router).status_code == 500
    assert 20 <= len(heard) < TOKENS
    return heard


def test_a_router_whose_loop_hangs_writes_its_last_decisions_on_the_signal(tmp_path: Path) -> None:
    with planted(HANGS, tmp_path) as router, ThreadPoolExecutor(1) as client:
        router.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 1, "one while it serves")
        asked = client.submit(ask, router)
        wait_until(lambda: not _answers(router), "it hangs")
        router.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: router.output().count("SIGUSR1: the last decisions") == 2, "another while it hangs")
        router.process.kill()
        assert isinstance(asked.exception(60), httpx.HTTPError | http.client.HTTPException | OSError)
    for path in tmp_path.iterdir():
        assert Recording(path.read_bytes()).header.reason == "SIGUSR1"


def _answers(router: ServerProcess) -> bool:
    try:
        return httpx.get(f"{router.url}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_router_that_waits_for_the_signal_still_ends_on_the_others(tmp_path: Path) -> None:
    with planted(HANGS, tmp_path) as router:
        assert router.stop() == 0
