"""`baton up`: a fleet that serves, replaces what dies, drains on Ctrl-C and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.fleet import FleetProcess, baton_up
from tests.support.waiting import wait_until

SCRIPTED = ("--executor", "scripted", "--step-ms", "2")


def instance_of(fleet: FleetProcess, name: str) -> int:
    return next(pid for pid, words in fleet.commands().items() if "serve" in words and name in words)


def expected(tokens: int) -> list[int]:
    return undisturbed([104, 101, 108, 108, 111], Sampling(seed=0, temperature=0.0), tokens, BYTE_VOCABULARY)


def test_a_fleet_serves_replaces_what_dies_and_drains_on_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with baton_up(*SCRIPTED, "--prefill", "1", "--decode", "2") as fleet:
        lines = [" ".join(words) for words in fleet.commands().values()]
        for name, role in (("prefill-1", "prefill"), ("decode-1", "decode"), ("decode-2", "decode")):
            assert any("serve" in line and f"--role {role} --name {name}" in line for line in lines), lines
        key = next(line for line in _environment(instance_of(fleet, "decode-1")) if line.startswith("BATON_CLUSTER_KEY="))
        assert not any(key.partition("=")[2] in line for line in lines)
        assert httpx.get(f"{fleet.url}/dashboard").status_code == 200
        assert fleet.complete(ignore_eos=True).json()["choices"][0]["token_ids"] == expected(24)

        victim = instance_of(fleet, "decode-1")
        before = fleet.instances()["decode-1"]["incarnation"]
        os.kill(victim, signal.SIGKILL)
        fleet.until(lambda: _is_back(fleet, "decode-1", before), "another life of decode-1")
        assert "decode-1  │ ── was ended by SIGKILL; started again now" in fleet.output()

        with ThreadPoolExecutor(1) as client:
            answer = client.submit(fleet.complete, max_tokens=400, ignore_eos=True)
            fleet.until(lambda: sum(one["open"] for one in fleet.instances().values()) == 1, "the request at an instance")
            fleet.process.send_signal(signal.SIGINT)
            assert answer.result(60).json()["choices"][0]["token_ids"] == expected(400)
        assert fleet.process.wait(60) == 0, fleet.output()
        assert not list(tmp_path.glob("baton-*")), "nor of the killed one"
        assert fleet.commands() == {}


def _is_back(fleet: FleetProcess, name: str, before: int) -> bool:
    found = fleet.instances().get(name)
    return found is not None and found["state"] == "ready" and found["incarnation"] > before


def _environment(pid: int) -> list[str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().decode().split("\0")


def test_a_killed_supervisor_takes_everybody_along_even_who_is_stopped() -> None:
    with baton_up(*SCRIPTED, "--mixed", "1") as fleet:
        engine = next(pid for pid, words in fleet.commands().items() if "baton.node.engine" in words)
        os.kill(engine, signal.SIGSTOP)
        fleet.process.kill()
        fleet.process.wait()
        wait_until(lambda: not fleet.commands(), "nobody left")


def test_a_second_ctrl_c_stops_at_once() -> None:
    with baton_up(*SCRIPTED, "--mixed", "1") as fleet, ThreadPoolExecutor(1) as client:
        answer = client.submit(fleet.complete, max_tokens=8000, ignore_eos=True)
        fleet.until(lambda: sum(one["open"] for one in fleet.instances().values()) == 1, "the request at an instance")
        fleet.process.send_signal(signal.SIGINT)
        fleet.until(lambda: "draining" in fleet.output(), "the first to be heard")
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(30) == 130
        assert fleet.commands() == {}
        assert answer.exception(30) is not None or answer.result().status_code != 200


def test_a_port_in_use_is_told_once_and_ends_it() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        baton_up(*SCRIPTED, "--router-port", str(taken.getsockname()[1]), wait=False) as fleet,
    ):
        assert fleet.process.wait(60) == 1
        assert fleet.output().count("cannot listen on") == 1


def test_a_request_sent_while_the_instances_start_is_answered_by_the_first(free_port: int) -> None:
    """With no patience for an absence: without the expectation it would be declined at once."""
    with baton_up(*SCRIPTED, "--mixed", "2", "--absent-timeout", "0", "--router-port", str(free_port), wait=False) as fleet:
        fleet.url = f"http://127.0.0.1:{free_port}"
        fleet.until(lambda: _listens(free_port), "the router's port")
        ready = httpx.get(f"{fleet.url}/ready", timeout=60)
        assert ready.status_code == 503
        assert "0 of 2 expected ones have come so far" in ready.text
        answer = fleet.complete(ignore_eos=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected(24)


@pytest.mark.slow
def test_a_request_that_waits_gets_an_error_when_no_instance_can_be_started(free_port: int) -> None:
    broken = ("--peer-host", "192.0.2.1")  # an address of another machine
    options = ("--executor", "scripted", "--prefill", "1", "--decode", "1", *broken, "--restart-delay-max", "0")
    with baton_up(*options, "--router-port", str(free_port), wait=False) as fleet, ThreadPoolExecutor(1) as client:
        fleet.url = f"http://127.0.0.1:{free_port}"
        fleet.until(lambda: _listens(free_port), "the router's port")
        answer = client.submit(fleet.complete).result(120)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance"), answer.text
        assert "1 of 1 expected instances never came" in answer.text
        assert fleet.process.wait(60) == 1
        assert fleet.commands() == {}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
