"""KV that one instance computed and another uses: after a kill in the middle of writing, under a router, between P and D."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.bench.child_processes import free_port
from tests.support.cluster import handed_over, in_session, tokens_of
from tests.support.fleet import FleetProcess, baton_up
from tests.support.server import ServerProcess, baton_serve
from tests.support.storing import (
    SMALL_HOST,
    TIGHT,
    Body,
    Texts,
    ask_until,
    asking,
    baton_store,
    bills,
    counts,
    mixture,
    post,
    question,
    restored,
    right,
    until_stored,
)
from tests.support.waiting import wait_until

# ── killed while it writes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_what_one_has_stored_another_restores_though_the_first_was_killed_while_it_wrote(tmp_path: Path) -> None:
    options = (*TIGHT, *SMALL_HOST, "--kv-store", f"file:{tmp_path}/kv")
    with baton_serve(*options, wait=False) as first, baton_serve(*options) as second:
        first.wait_until_served()
        bills(first.url, mixture())
        until_stored(first.url)
        kill_while_it_writes(first, 100)
        assert_it_is_sound(tmp_path)
        assert restored(bills(second.url, mixture())) > 0
        assert counts(second.url)["store_fetched_blocks"] > 0
        kill_while_it_writes(second, 200)
    assert_it_is_sound(tmp_path)
    with baton_serve(*options) as third:
        for known in (0, 100, 200):
            bills(third.url, mixture(known))
        found = counts(third.url)
        assert found["store_fetched_blocks"] > 0
        assert found["store_bad_blocks"] == found["store_errors"] == 0


def kill_while_it_writes(server: ServerProcess, first: int) -> None:
    stored = counts(server.url)["store_stored_blocks"]
    with asking(server.url, first):
        wait_until(lambda: counts(server.url)["store_stored_blocks"] > stored, f"it writes:\n{server.output()}")
        os.kill(server.engine_pid(), signal.SIGKILL)
        server.process.kill()
        server.process.wait()


def assert_it_is_sound(folder: Path) -> None:
    verified = baton_store("verify", f"file:{folder}/kv")
    assert verified.exit_code == 0, verified.output
    assert "objects are sound" in verified.output


# ── under a router ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_moves_for_lack_of_room_and_what_was_said_by_one_that_died_goes_on_from_the_store(tmp_path: Path) -> None:
    options = (*TIGHT, "--host-memory", "1M", "--kv-store", f"file:{tmp_path}/kv", "--preempt-retry-count", "50")
    with baton_up(*options, "--prefill", "1", "--decode", "2") as fleet:
        urls = [one["url"] for one in fleet.instances().values()]
        moved: list[Body] = []
        for first in range(0, 100, 10):
            moved += [bill for bill in bills(fleet.url, mixture(first)) if bill["attempts"] > 1]
            if restored(moved) and any(counts(url)["store_fetched_blocks"] > 0 for url in urls):
                break
        else:
            raise AssertionError(f"nothing that moved was restored: {moved}")

        first_round = question(200)  # none of the mixtures has asked it
        keeper = who_answers(fleet, first_round)
        until_stored(fleet.instances()[keeper]["url"])
        kill(fleet, keeper)
        said = right(first_round)[0]
        (bill,) = bills(fleet.url, [question(200, prompt=[*first_round["prompt"], *said, 7], max_tokens=20)])
        known, of_prompt = (len(first_round["prompt"]) + len(said) - 1) // 16 * 16, len(first_round["prompt"]) // 16 * 16
        assert bill["cached_tokens"] == known
        assert bill["restored_tokens"] >= known - of_prompt  # what the dead one said; the prompt may be in P's cache


def who_answers(fleet: FleetProcess, body: Body) -> str:
    """The name of the instance that has given the right answer."""
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(post, fleet.url, body)
        names: set[str] = set()
        while not answer.done():
            names.update(name for name, one in fleet.instances().items() if one["open"])
        assert tokens_of(answer.result()) == right(body)
    (name,) = names
    return name


def kill(fleet: FleetProcess, name: str) -> None:
    os.kill(fleet.instances()[name]["pid"], signal.SIGKILL)


# ── between P and D, with a real model ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def split(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One that prefills and one that decodes, each with too little of everything but the store."""
    store = tmp_path_factory.mktemp("split")
    options = (
        str(tiny), "--dtype", "float64", "--threads", "1", "--served-model-name", "m", "--max-num-seqs", "8",
        "--max-model-len", "384", "--kv-blocks", "24", "--reserve", "none", "--bring-back", "always",
        "--host-memory", "600K", "--kv-store", f"file:{store}/kv", "--log-level", "warning", "--no-access-log",
    )  # fmt: skip
    with contextlib.ExitStack() as running:
        port = str(free_port())
        decode = ("--role", "decode", "--peer", f"127.0.0.1:{port}")
        prefills = running.enter_context(baton_serve(*options, "--role", "prefill", "--peer-port", port, wait=False))
        decodes = running.enter_context(baton_serve(*options, *decode, wait=False))
        prefills.wait_until_served()
        decodes.wait_until_served()
        in_session(decodes)
        yield prefills, decodes


@pytest.mark.slow
def test_p_restores_prompts_and_d_goes_on_from_the_store_with_the_tokens_of_undisturbed_runs(
    split: tuple[ServerProcess, ServerProcess],
) -> None:
    _, decodes = split
    wanted = [alone(decodes.url, body) for body in mixture()]
    before = [counts(server.url) for server in split]
    names = ("store_fetched_blocks", "kv_loaded_blocks")

    def both_have_restored() -> bool:
        after = [counts(server.url) for server in split]
        return all(now[name] > then[name] for now, then in zip(after, before, strict=True) for name in names)

    ask_until(decodes.url, both_have_restored, [mixture()], wanted)
    assert counts(decodes.url)["num_preemptions"] > 0 < handed_over(decodes)


def alone(url: str, body: Body) -> Texts:
    """The answer when nobody else asks and nothing is known of it."""
    answer = post(url, body | {"cache_salt": "alone"})
    bill = answer["usage"]["baton"]
    assert bill["preemptions"] == bill["restored_tokens"] == bill["recomputed_tokens"] == 0
    return tokens_of(answer)
