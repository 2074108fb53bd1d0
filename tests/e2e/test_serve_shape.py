"""`baton serve shape:NAME --load-format dummy` as a real process: a model without weights of its own answers."""

from __future__ import annotations

import subprocess
import sys

import httpx2 as httpx

from baton.core.errors import EXIT_SETUP
from baton.node.start_stages import stage_of
from tests.support.server import baton_serve


def test_a_shape_is_served_with_weights_drawn_at_random() -> None:
    options = ("shape:tiny-qwen3@2", "--load-format", "dummy", "--dtype", "float64", "--kv-blocks", "64")
    with baton_serve(*options) as server:
        body = {
            "model": "shape:tiny-qwen3@2",
            "prompt": "hello",
            "max_tokens": 16,
            "temperature": 0,
            "return_token_ids": True,
        }
        told = [stage for line in server.output().splitlines() if (stage := stage_of(line)) is not None]
        assert told[:3] == ["starting the engine", "importing torch", "loading the weights"]
        assert told[-1] == "trying a step"
        assert "started in " in server.output()
        answers = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    tokens = [answer["choices"][0]["token_ids"] for answer in answers]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 16 or tokens[0][-1] == 256


def test_without_saying_so_nobody_gets_random_answers() -> None:
    command = [sys.executable, "-m", "baton", "serve", "shape:tiny-qwen3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_SETUP
    assert "--load-format dummy" in ended.stderr
