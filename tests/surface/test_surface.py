"""What users hold stays: a golden file lists it, and a store written by an earlier version is read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import httpx2 as httpx
import pytest

from baton.kv.store import open_store
from baton.wire.envelope import OpenedEnvelope, object_name, open_any
from tests.support.server import baton_serve
from tests.surface.derive import surface
from tests.surface.golden import difference

PROMPT = "a store that was written before is read after"
PROMPT_TOKENS = 45
STORED = Path(__file__).parent / "store"
"""What `baton serve` left at the commit before the modules moved, after PROMPT and 8 tokens:

    BATON_CLUSTER_KEY=… baton serve --executor scripted --kv-store file:STORE --host-memory 1M --kv-blocks 32 \
        --block-size 4 --bring-back always
"""
OPTIONS = (
    "--executor",
    "scripted",
    "--host-memory",
    "1M",
    "--kv-blocks",
    "32",
    "--block-size",
    "4",
    "--bring-back",
    "always",
)
KEY = "the key of the golden store"


def test_what_users_hold_is_as_in_the_golden_file() -> None:
    assert difference(surface()) == [], "what is meant to change is written with: python -m tests.surface --write"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "store"))


def test_every_block_of_a_store_written_before_is_sound(store: Path) -> None:
    opened = open_store(f"file:{store}")
    listed = list(opened.names())
    assert len(listed) == 13
    for name, size in listed:
        buffer = memoryview(bytearray(size))
        assert opened.get([name], [buffer]) == [size]
        block = open_any(buffer)
        assert isinstance(block, OpenedEnvelope), block
        assert object_name(block.layout, block.key) == name


def test_a_server_goes_on_with_a_store_written_before(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATON_CLUSTER_KEY", KEY)
    body = {"model": "scripted", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "baton_usage": True}
    with baton_serve(*OPTIONS, "--kv-store", f"file:{store}") as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
    assert answer["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert answer["usage"]["baton"]["restored_tokens"] == PROMPT_TOKENS // 4 * 4
