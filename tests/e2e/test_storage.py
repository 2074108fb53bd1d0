"""KV beyond the pool, by real processes: what was computed in one life is there in the next, and trouble is told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

from baton.core.engine.request import Sampling
from baton.core.errors import EXIT_SETUP
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.server import ServerProcess, baton_serve, refused_by_serve

SHORT = (
    "--executor", "scripted", "--step-ms", "1", "--kv-blocks", "24", "--reserve", "none", "--max-num-seqs", "8",
    "--bring-back", "always",
)  # fmt: skip
"""Two requests at full length do not fit."""
PROMPTS = [[number] * 100 for number in range(6)]
TOKENS = 110


def ask(server: ServerProcess, prompt: list[int]) -> dict[str, int]:
    """The bill of an answer that is right."""
    body = {
        "model": "scripted", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "seed": 0,
        "return_token_ids": True, "baton_usage": True,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    wanted = undisturbed(prompt, Sampling(seed=0, temperature=0.0), TOKENS, BYTE_VOCABULARY)
    assert answer["choices"][0]["token_ids"] == wanted
    bill: dict[str, int] = answer["usage"]["baton"]
    return bill


def ask_all(server: ServerProcess, what: str) -> int:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        return sum(bill[what] for bill in clients.map(lambda prompt: ask(server, prompt), PROMPTS))


def test_what_was_computed_is_there_in_the_next_life(tmp_path: Path) -> None:
    """After a drain; `test_tiers_elsewhere` kills instead."""
    options = (*SHORT, "--kv-store", f"file:{tmp_path}/kv")
    with baton_serve(*options) as server:
        ask_all(server, "computed_tokens")
        assert server.stop() == 0
    with baton_serve(*options) as server:
        assert ask_all(server, "restored_tokens") > 0
        whole_blocks = sum((len(prompt) + TOKENS - 1) // 16 for prompt in PROMPTS)
        assert server.metric("baton_store_fetched_blocks_total") >= len(PROMPTS) * (100 // 16)
        assert len([*(tmp_path / "kv").rglob("?" * 32)]) >= whole_blocks - len(PROMPTS), "a drain waits for what is kept"


def test_another_salt_finds_nothing_of_it(tmp_path: Path) -> None:
    with baton_serve(*SHORT, "--kv-store", f"file:{tmp_path}/kv", "--api-key", "one", "--api-key", "two") as server:
        fetched = []
        for key in ("one", "two"):
            body = {"model": "scripted", "prompt": PROMPTS[0], "max_tokens": 1, "baton_usage": True}
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60
            ).json()
            fetched.append(answer["usage"]["baton"]["cached_tokens"])
        assert fetched == [0, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-store", "somewhere"), "is not the address of a store"),
        (("--kv-store", "file:/dev/null"), "/dev/null is a file, not a folder for a store"),
        (("--kv-store-limit", "1G"), "--kv-store-limit is only for --kv-store"),
        (("--host-memory", "100"), "--host-memory of 100 bytes has no room for one block of 128"),
    ],
)
def test_what_cannot_work_ends_with_a_line_that_says_so(options: tuple[str, ...], said: str) -> None:
    status, output = refused_by_serve("--executor", "scripted", *options)
    assert status == EXIT_SETUP
    last = output.splitlines()[-1]
    assert last.startswith("baton serve: ")
    assert said in last
