"""Real instances that prefill and decode for each other, on free ports of loopback, and what a client asks them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from tests.support.server import ServerProcess, baton_serve
from tests.support.waiting import wait_until

Body = dict[str, Any]


def peer_address(prefill: ServerProcess) -> str:
    found = re.search(r"for peers at (\S+:\d+)", prefill.output())
    if found is None:
        raise AssertionError(f"the banner names no address for peers:\n{prefill.output()}")
    return found[1]


def in_session(server: ServerProcess, peers: int = 1) -> None:
    wait_until(lambda: server.metric("baton_peers") == peers, f"a session with {peers} peers:\n{server.output()}")


@contextlib.contextmanager
def cluster(*options: str, decodes: tuple[tuple[str, ...], ...] = ((),), prefill: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """One instance that prefills, and one that decodes for each entry of `decodes`, all of them in session."""
    with contextlib.ExitStack() as running:
        giver = running.enter_context(baton_serve(*options, "--role", "prefill", "--peer-port", "0", *prefill))
        call = ("--role", "decode", "--peer", peer_address(giver))
        takers = [running.enter_context(baton_serve(*options, *call, *own, wait=False)) for own in decodes]
        for taker in takers:
            taker.wait_until_served()
            in_session(taker)
        yield Cluster(giver, takers)


@dataclass
class Cluster:
    prefill: ServerProcess
    decodes: list[ServerProcess]

    def settle(self) -> None:
        for server in (self.prefill, *self.decodes):
            wait_until(lambda server=server: is_at_rest(server), f"nothing held any more:\n{server.output()}")


def is_at_rest(server: ServerProcess) -> bool:
    """Nothing runs, waits, or is held for anybody."""
    blocks = [server.metric("baton_kv_blocks", state=state) for state in ("running", "leased", "receiving")]
    counts = [server.metric(name) for name in ("baton_num_requests_running", "baton_num_requests_waiting")]
    return not any((*blocks, *counts, server.metric("baton_handovers_open")))


def handed_over(server: ServerProcess) -> float:
    return server.metric("baton_handovers_total", outcome="made")


def complete(url: str, **fields: object) -> httpx.Response:
    body = {"model": "m", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def tokens_of(answer: Body) -> list[list[int]]:
    """Of each choice."""
    return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def tokens(url: str, **fields: object) -> list[list[int]]:
    response = complete(url, **fields)
    assert response.status_code == 200, response.text
    return tokens_of(response.json())


def all_at_once(url: str, bodies: list[Body]) -> list[list[list[int]]]:
    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(lambda body: tokens(url, **body), bodies))
