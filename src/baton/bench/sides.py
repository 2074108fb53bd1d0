"""The two servers of a comparison: how each is started, and how one waits for its first token.

Owns commands, environments and fairness. Both get the same model folder, dtype, context, block size and number of
sequences at once. For vLLM on CPU:

* KV space is given (`VLLM_CPU_KVCACHE_SPACE`), else it takes a share of the memory that depends on who else is there.
* `VLLM_CPU_OMP_THREADS_BIND` lists every core. Its "auto" keeps one core for the scheduler, which on two cores leaves
  one thread for all matrix products and about two thirds of the speed.
* The server module is started directly; `vllm serve` runs the same module, but refuses to start in the CPU wheel, which
  is not installed under the name that the command looks up.
* The compile cache of an earlier start is left in place: that is how its users meet it.

Whatever the caller's environment already says about these settings is kept.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import aiohttp

from baton.bench.children import Child, ChildFailed
from baton.bench.client import Ask, Client, RequestRecord, ServerUnreachable, Target, first_model, open_http

POLL_S = 0.05
START_LIMIT_S = 600.0
FIRST_PROMPT = [100]
"""Every vocabulary has it, also that of single bytes."""
OURS, PEER = "Baton", "vLLM"


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What both servers are told."""

    model: Path
    max_model_len: int = 4096
    max_num_seqs: int = 64
    block_size: int = 32


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    launch: tuple[str, ...]
    """The command without its port."""
    env: dict[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        return [*self.launch, "--port", str(port)]

    def told(self) -> str:
        """The command as a person would type it."""
        return shlex.join([*(f"{name}={value}" for name, value in self.env.items()), *self.launch])


def our_side(shape: ServerShape, extra: str) -> Side:
    launch = (sys.executable, "-m", "baton", "serve", str(shape.model), *_shared_flags(shape), *shlex.split(extra))
    return Side(OURS, launch)


def peer_side(shape: ServerShape, peer: str, extra: str) -> Side:
    server = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(shape.model), "--host", "127.0.0.1")
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": _all_cores(),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    env = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return Side(PEER, (*shlex.split(peer), *server, *_shared_flags(shape), *shlex.split(extra)), env)


def _shared_flags(shape: ServerShape) -> tuple[str, ...]:
    return (
        "--dtype", "bfloat16",
        "--max-model-len", str(shape.max_model_len),
        "--max-num-seqs", str(shape.max_num_seqs),
        "--block-size", str(shape.block_size),
    )  # fmt: skip


def _all_cores() -> str:
    """The cores that this process may use, as vLLM writes them: 0,1,2."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that has given its first token."""

    side: Side
    child: Child
    url: str
    model: str
    first_token_s: float
    """Seconds from the start of the process to the first streamed token."""


async def wait_first_token(side: Side, child: Child, port: int) -> Serving:
    """Ask again and again until a token comes; raises ChildFailed when the server dies or takes too long."""
    url = f"http://127.0.0.1:{port}"
    async with open_http(2) as http:
        while True:
            if perf_counter() - child.started_s > START_LIMIT_S:
                raise ChildFailed(f"{side.name} gave no token within {START_LIMIT_S:g} s\n{child.last_lines()}")
            child.check_alive()
            try:
                model = await first_model(http, url, timeout_s=START_LIMIT_S)
            except ServerUnreachable:
                await asyncio.sleep(POLL_S)
                continue
            first_s = await _try_first_token(http, Target(url, model, timeout_s=START_LIMIT_S), child)
            if first_s is not None:
                return Serving(side, child, url, model, first_s)
            await asyncio.sleep(POLL_S)


async def _try_first_token(http: aiohttp.ClientSession, target: Target, child: Child) -> float | None:
    client = Client(http, target, Ask(), zero_s=child.started_s)
    record = RequestRecord(0, 0, 0.0, 0.0)
    await client.request(FIRST_PROMPT, 1, record)
    if record.error is not None and not record.error.startswith(("http_5", "connect", "broken_stream")):
        raise ChildFailed(f"{target.url} refuses the first request: {record.error} {record.error_message}")
    return record.first_s if record.error is None else None
