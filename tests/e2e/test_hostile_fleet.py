"""A fleet of real processes in bad surroundings: a network that swallows one direction, a clock that was set back, and an
instance whose own port is reached past the router."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2 as httpx
import pytest

from baton.wire.keyfile import key_of_text
from baton.wire.request_proof import HEADER, NONCE_BYTES, proof_of
from tests.support.server import ServerProcess, baton_router, baton_serve
from tests.support.silent_proxy import SilentProxy, silent_proxy
from tests.support.waiting import wait_until

KEY_TEXT = "a cluster key of the tests"
SCRIPTED = ("--executor", "scripted", "--cluster-key", KEY_TEXT)
NOTICED_S = 3.0
"""Promised: a direction that went silent is noticed within this time."""
ROOM = 3
"""Times of room for a busy machine."""
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.slow


def views(router: ServerProcess) -> dict[str, Any]:
    answer = httpx.get(f"{router.url}/v1/instances", headers={"Authorization": "Bearer sk-operator"})
    return {one["name"]: one for one in answer.json()["data"]}


def joined(router: ServerProcess, *names: str) -> None:
    wait_until(lambda: {name for name, one in views(router).items() if one["state"] == "ready"} >= set(names), f"{names}")


def instance(router_at: str, name: str, *options: str) -> contextlib.AbstractContextManager[ServerProcess]:
    return baton_serve(*SCRIPTED, "--step-ms", "20", "--router", router_at, "--name", name, *options)


# ── a direction that goes silent ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def half_deaf() -> Iterator[tuple[ServerProcess, SilentProxy]]:
    """A router, `near` beside it, and `far` behind a proxy."""
    with (
        baton_router(*SCRIPTED, "--policy", "round-robin") as router,
        silent_proxy(router.join) as proxy,
        instance(proxy.address, "far"),
    ):
        joined(router, "far")
        with instance(router.join, "near"):
            joined(router, "far", "near")
            yield router, proxy


@pytest.mark.timed
def test_requests_go_on_elsewhere_when_an_instance_does_not_hear_its_router(
    half_deaf: tuple[ServerProcess, SilentProxy],
) -> None:
    router, proxy = half_deaf
    proxy.swallows_answers.set()
    began_s = time.monotonic()
    for _ in range(2):  # one of them is placed at the instance that hears nothing
        answer = httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
    took_s = time.monotonic() - began_s
    print(f"two requests of 2 s took {took_s:.1f} s")
    assert proxy.swallowed_bytes
    assert took_s < ROOM * (NOTICED_S + 2 * 2)
    assert set(views(router)) == {"near"}


@pytest.mark.timed
def test_an_instance_that_hears_nothing_comes_back_when_the_network_does(
    half_deaf: tuple[ServerProcess, SilentProxy],
) -> None:
    router, proxy = half_deaf
    proxy.swallows_answers.set()
    wait_until(lambda: set(views(router)) == {"near"}, "far is taken out", ROOM * NOTICED_S)
    proxy.swallows_answers.clear()
    wait_until(lambda: set(views(router)) == {"near", "far"}, "far is back", ROOM * NOTICED_S)


# ── a clock that was set back ────────────────────────────────────────────────────────────────────────────────────────────

AN_HOUR_AGO = "import time\nnow = time.time_ns\ntime.time_ns = lambda: now() - 3_600_000_000_000\n"


@contextlib.contextmanager
def clock_an_hour_behind(folder: Path) -> Iterator[None]:
    """Python processes that start meanwhile read a wall clock that is one hour behind."""
    (folder / "sitecustomize.py").write_text(AN_HOUR_AGO)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(folder), *sys.path])):
        yield


@pytest.mark.timed
def test_an_instance_restarted_with_its_clock_set_back_serves_at_once(tmp_path: Path) -> None:
    with baton_router(*SCRIPTED) as router:
        with instance(router.join, "i1") as first:
            joined(router, "i1")
            before = views(router)["i1"]["incarnation"]
            first.process.kill()
            first.process.wait()
        with clock_an_hour_behind(tmp_path), instance(router.join, "i1") as second:
            began_s = time.monotonic()
            wait_until(lambda: views(router).get("i1", {}).get("incarnation", before) > before, "it serves", ROOM * 1.0)
            print(f"served {time.monotonic() - began_s:.2f} s after its banner")
            assert views(router)["i1"]["incarnation"] == before + 1
            assert httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=60).status_code == 200
            assert second.process.poll() is None
        assert router.output().count(") fenced:") == 1


# ── past the router ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_instance_without_keys_generates_nothing_past_a_keyed_router() -> None:
    with baton_router(*SCRIPTED, "--api-key", "sk-operator") as router, instance(router.join, "i1") as server:
        joined(router, "i1")
        bodies = {
            "/v1/completions": BODY,
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
            "/tokenize": {"prompt": "hi"},
            "/detokenize": {"tokens": [1]},
        }
        for path, body in bodies.items():
            for headers in ({}, {"Authorization": "Bearer sk-operator"}, {"Authorization": "Bearer other"}):
                answer = httpx.post(server.url + path, json=body, headers=headers)
                assert answer.status_code == 403, (path, headers)
                error = answer.json()["error"]
                assert error["code"] == "router_only"
                assert router.join in error["message"]
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert httpx.get(server.url + path).status_code == 200, path
        through = httpx.post(
            f"{router.url}/v1/completions", json=BODY, headers={"Authorization": "Bearer sk-operator"}, timeout=60
        )
        assert through.status_code == 200
        assert proven(server, json.dumps(BODY).encode(), KEY_TEXT) == 200, "who holds the cluster key may"
        assert proven(server, json.dumps(BODY).encode(), "another key") == 400
        router.process.send_signal(signal.SIGKILL)
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 403, "nor when the router is gone"


def proven(server: ServerProcess, body: bytes, key: str) -> int:
    path = "/v1/completions"
    proof = proof_of(key_of_text(key), "POST", path, body, time.time() + 1, secrets.token_bytes(NONCE_BYTES))
    headers = {HEADER: proof, "Content-Type": "application/json"}
    return httpx.post(server.url + path, content=body, headers=headers, timeout=60).status_code


def test_behind_a_router_without_keys_an_instance_generates() -> None:
    with baton_router(*SCRIPTED) as router, instance(router.join, "i1") as server:
        joined(router, "i1")
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 200


def test_an_instance_with_keys_of_its_own_asks_for_those() -> None:
    with (
        baton_router(*SCRIPTED, "--api-key", "sk-operator") as router,
        instance(router.join, "i1", "--api-key", "sk-own") as server,
    ):
        joined(router, "i1")
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=BODY, headers={"Authorization": "Bearer sk-own"}, timeout=60).status_code == 200
        assert httpx.post(url, json=BODY).status_code == 401
