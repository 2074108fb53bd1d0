"""Split instances in trouble, as real processes: no peer, a wrong key, another layout, clients leaving, peers dying."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from baton.core.engine.request import Sampling
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.cluster import (
    Cluster,
    cluster,
    complete,
    handed_over,
    in_session,
    is_at_rest,
    peer_address,
    tokens,
    wait_until,
)
from tests.support.server import ServerProcess, baton_serve

SCRIPTED = ("--executor", "scripted", "--served-model-name", "m")
SLOW = ("--step-ms", "100", "--max-num-batched-tokens", "64", "--max-num-seqs", "16")
PROMPT = list(range(200))
GREEDY = Sampling(seed=0, temperature=0.0)
LONG = PROMPT * 8
"""Prefilled for over two seconds where steps are slow: long enough to be seen on a busy machine."""
NOWHERE = "127.0.0.1:9"
"""Where nobody listens."""


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """The tokens of an undisturbed run."""
    return [undisturbed(PROMPT, GREEDY, 24, BYTE_VOCABULARY)]


def test_without_a_peer_in_reach_the_instance_is_ready_and_prefills_itself(wanted: list[list[int]]) -> None:
    with baton_serve(*SCRIPTED, "--role", "decode", "--peer", NOWHERE) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert tokens(server.url, prompt=PROMPT) == wanted
        assert handed_over(server) == 0
        assert server.output().count("no session with") == 1  # it calls on, and says so once


KEY = ("--cluster-key", "the key of this cluster")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Cluster]:
    with cluster(*SCRIPTED, *KEY) as running:
        yield running


def still_hands_over(running: Cluster, prompt: list[int]) -> None:
    (friend,) = running.decodes
    made = handed_over(friend)
    assert tokens(friend.url, prompt=prompt)
    assert handed_over(friend) == made + 1


def test_an_instance_that_prefills_is_healthy_and_sends_clients_elsewhere(keyed: Cluster) -> None:
    server = keyed.prefill
    for path in ("health", "ready", "metrics"):
        assert httpx.get(f"{server.url}/{path}").status_code == 200
    refused = complete(server.url, prompt=PROMPT)
    assert 400 <= refused.status_code < 500
    assert "decode" in refused.json()["error"]["message"]
    assert server.metric("baton_role_info", role="prefill") == 1


def test_another_cluster_key_is_refused_and_counted_and_both_go_on(keyed: Cluster, wanted: list[list[int]]) -> None:
    giver = keyed.prefill
    call = ("--role", "decode", "--peer", peer_address(giver), "--cluster-key", "the key of another one")
    with baton_serve(*SCRIPTED, *call) as stranger:
        wait_until(lambda: "wrong_key" in httpx.get(f"{giver.url}/metrics").text, "a refusal in the metrics")
        assert giver.metric("baton_peer_refusals_total", reason="wrong_key") >= 1
        assert tokens(stranger.url, prompt=PROMPT) == wanted
        assert stranger.metric("baton_peers") == 0
    still_hands_over(keyed, [1, *PROMPT])


def test_other_block_sizes_are_refused_by_name_while_both_serve(keyed: Cluster, wanted: list[list[int]]) -> None:
    giver = keyed.prefill
    call = ("--role", "decode", "--peer", peer_address(giver), *KEY, "--block-size", "8")
    with baton_serve(*SCRIPTED, *call) as taker:
        told = "block_size: 8 here, 16 there"
        wait_until(lambda: told in taker.output(), f"the taker to name both values:\n{taker.output()}")
        wait_until(lambda: "block_size: 16 here, 8 there" in giver.output(), "the giver to name both values")
        wait_until(lambda: "unfit" in httpx.get(f"{taker.url}/metrics").text, "a refusal in the metrics")
        assert tokens(taker.url, prompt=PROMPT) == wanted
        assert taker.output().count(told) == 1  # it calls on, and says so once
    still_hands_over(keyed, [2, *PROMPT])


@pytest.fixture(scope="module")
def slow() -> Iterator[Cluster]:
    with cluster(*SCRIPTED, *SLOW) as running:
        yield running


def leave(server: ServerProcess, when: str, *others: ServerProcess) -> None:
    """Ask, and go away when the metric `when` of some instance says that this far has been come."""
    body = {"model": "m", "prompt": [len(when), *LONG], "max_tokens": 100, "stream": True, "ignore_eos": True}
    with httpx.Client(timeout=60).stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        if when == "decoding":
            next(answer.iter_lines())
        else:
            name, labels = when.partition(" ")[::2]
            wait_until(lambda: any(_metric(one, name, labels) for one in (server, *others)), when)


def _metric(server: ServerProcess, name: str, state: str) -> float:
    return server.metric(name, state=state) if state else server.metric(name)


@pytest.mark.parametrize("when", ["baton_handovers_open", "baton_kv_blocks receiving", "decoding"])
def test_a_client_that_leaves_leaves_nothing_behind_on_either_side(slow: Cluster, when: str) -> None:
    leave(slow.decodes[0], when, slow.prefill)
    slow.settle()
    assert tokens(slow.decodes[0].url, prompt=[1, 2, 3] * 20, max_tokens=2)


def is_receiving(server: ServerProcess) -> bool:
    return server.metric("baton_kv_blocks", state="receiving") > 0


@pytest.mark.slow
def test_a_giver_that_stands_still_and_wakes_up_later_changes_nothing(wanted: list[list[int]]) -> None:
    with (
        cluster(*SCRIPTED, *SLOW, decodes=(("--transfer", "shm"), ("--transfer", "tcp"))) as running,
        ThreadPoolExecutor(2) as both,
    ):
        asked = [both.submit(tokens, server.url, prompt=PROMPT) for server in running.decodes]
        wait_until(lambda: any(is_receiving(server) for server in running.decodes), "KV on its way")
        # The whole instance: a front end that is awake would end an engine that stands still.
        processes = (running.prefill.process.pid, running.prefill.engine_pid())
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert [answer.result(60) for answer in asked] == [wanted, wanted]  # each did it itself in the end
            for server in running.decodes:
                wait_until(lambda server=server: is_at_rest(server), f"nothing held:\n{server.output()}")
                assert tokens(server.url, prompt=[9, *PROMPT], max_tokens=4)  # perhaps in the blocks that were leased before
        finally:
            for pid in reversed(processes):
                os.kill(pid, signal.SIGCONT)
        for server in running.decodes:
            in_session(server)
        running.settle()
        for server in running.decodes:
            assert tokens(server.url, prompt=PROMPT) == wanted


def test_a_giver_that_drains_finishes_what_it_has_begun(slow: Cluster) -> None:
    """The last to use `slow`, whose giver it ends."""
    (taker,) = slow.decodes
    made = handed_over(taker)
    with ThreadPoolExecutor(1) as one:
        asked = one.submit(tokens, taker.url, prompt=LONG)
        wait_until(lambda: is_receiving(taker), "KV on its way")
        assert slow.prefill.stop() == 0
        assert asked.result(60) == [undisturbed(LONG, GREEDY, 24, BYTE_VOCABULARY)]
    assert handed_over(taker) == made + 1


def test_a_taker_whose_giver_is_killed_serves_on_and_asks_the_next_one(keyed: Cluster, wanted: list[list[int]]) -> None:
    """The last to use `keyed`, whose giver it ends."""
    (taker,) = keyed.decodes
    assert tokens(taker.url, prompt=PROMPT) == wanted
    port = peer_address(keyed.prefill).rpartition(":")[2]
    keyed.prefill.process.send_signal(signal.SIGTERM)
    keyed.prefill.process.wait(30)
    wait_until(lambda: taker.metric("baton_peers") == 0, "the loss to be noticed")
    assert tokens(taker.url, prompt=[7, *PROMPT])
    with baton_serve(*SCRIPTED, *KEY, "--role", "prefill", "--peer-port", port):
        in_session(taker)
        made = handed_over(taker)
        assert tokens(taker.url, prompt=[8, *PROMPT])
        assert handed_over(taker) == made + 1
        wait_until(lambda: is_at_rest(taker), "nothing held")


def test_an_engine_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its front end is killed, the kernel ends it too, and it tidies up only if it is quicker."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with baton_serve(*SCRIPTED, "--role", "decode", "--transfer", "shm") as server:
        assert list(tmp_path.glob("**/line")), "the socket for KV"
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        wait_until(lambda: not list(tmp_path.glob("**/line")), "the socket for KV is gone")
        wait_until(lambda: not [left for left in tmp_path.glob("baton-*") if "text" not in left.name], "all of it")
