"""What choosing an instance by what it has cached is worth: conversations of several rounds, one fleet a policy.

Owns the real measurement. Each policy gets a fresh fleet of mixed instances, so that nothing is cached from before; all
get the same conversations (lengths from a trace, words made up), so many at a time. A prompt carries all that was said
before, so an instance that served the round before has nearly all of it. The figures are the share of prompt tokens that
an instance had, as usage tells it, and the time to the first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from baton.bench.client import Ask, Target, first_model, open_http
from baton.bench.fleet import RequestsFailed, fleet
from baton.bench.load import Closed, Plan, run_load
from baton.bench.simulated import blocks_of
from baton.bench.stats import describe
from baton.bench.talks import Sessions, Talk
from baton.bench.turns import Voice
from baton.bench.workload import Recipe, Round, Session
from baton.core.config import WorkerConfig
from baton.core.routing.events import Policy
from baton.sim.cluster import RunSpec, simulate
from baton.sim.records import RunRecord
from baton.sim.report import FINISHED
from baton.sim.steptime import load_step_times
from baton.sim.workload import BadWorkload

MODELLED = "h200-8b"
MODELLED_CLIENTS = 39
MODELLED_SCALE = 8.0
"""What clients say there is so many times as long as in the trace: documents beside their questions."""

_SESSIONS = 5
"""What the random stream is for, so that no two uses of one seed ever draw the same stream."""


@dataclass(frozen=True, slots=True)
class Talks:
    """Which conversations, and how they are cut to what a CPU can do."""

    count: int = 78
    concurrency: int = 12
    input_scale: float = 0.5
    output_tokens_max: int = 16
    context_tokens: int = 1536
    seed: int = 0

    def drawn(self, talks: Sequence[Talk]) -> list[Session]:
        several = [rounds for talk in talks if len(rounds := self._rounds(talk)) > 1]
        if len(several) < self.count:
            raise BadWorkload(f"{self.count} sessions were asked for, and the trace has {len(several)} of several rounds")
        chosen = np.random.default_rng([self.seed, _SESSIONS]).choice(len(several), size=self.count, replace=False)
        return [Session(number, several[place]) for number, place in enumerate(chosen.tolist())]

    def _rounds(self, talk: Talk) -> tuple[Round, ...]:
        rounds: list[Round] = []
        said = 0
        for turn in talk:
            asked = max(1, round(turn.asked * self.input_scale))
            answered = max(1, min(turn.answered, self.output_tokens_max))
            said += asked + answered
            if said > self.context_tokens:
                break
            rounds.append(Round(asked, answered))
        return tuple(rounds)


class PolicyRun(msgspec.Struct):
    policy: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft_mean_s: float
    ttft_p90_s: float
    took_s: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


class RoutingReport(msgspec.Struct):
    talks: Talks
    instances: int
    runs: list[PolicyRun]
    """Here, on this machine."""
    modelled: list[PolicyRun]
    """In virtual time, on as many modelled GPUs, with the conversations as long as they were."""


async def measure(
    model: str, policies: Sequence[str], instances: int, talks: Talks, sessions: Sequence[Session], voice: Voice
) -> list[PolicyRun]:
    runs = []
    for policy in policies:
        voice.doing(f"starting the fleet for {policy}")
        each = ("--max-model-len", "2048", "--threads", "1")
        async with fleet([model], ["mixed"] * instances, ("--policy", policy), each) as made:
            voice.doing(policy)
            runs.append(await _run(policy, made.url, talks, iter(sessions), voice))
    return runs


async def _run(policy: str, url: str, talks: Talks, sessions: Iterator[Session], voice: Voice) -> PolicyRun:
    async with open_http(1) as http:
        model = await first_model(http, url)
    plan = Plan(Target(url, model), Closed(talks.concurrency), Recipe(talks.seed), Ask(), warmup=6)
    result = await run_load(plan, sessions, lambda _done, _tokens: voice.done())
    failed = [record for record in result.records if record.error is not None]
    if failed:
        raise RequestsFailed(f"{policy}: {len(failed)} requests failed, the first with {failed[0].error_message}")
    times = describe([record.ttft_s for record in result.records if record.ttft_s is not None])
    if times is None:
        raise RequestsFailed(f"{policy}: no request gave a token")
    return PolicyRun(
        policy=policy,
        requests=len(result.records),
        prompt_tokens=sum(record.prompt_tokens for record in result.records),
        cached_tokens=sum(record.cached_tokens or 0 for record in result.records),
        ttft_mean_s=times.mean,
        ttft_p90_s=times.p90,
        took_s=max(record.end_s for record in result.records),
    )


def modelled(policies: Sequence[str], instances: int, talks: Talks, said: Sequence[Talk], voice: Voice) -> list[PolicyRun]:
    """The same router in front of the same schedulers, with machines that are only modelled."""
    times = load_step_times(MODELLED)
    config = WorkerConfig(
        slots=256, blocks=blocks_of(times, None, 16), context_tokens=32_768, step_tokens=8192, waiting_max=talks.count
    )
    sessions = Sessions(talks.count, MODELLED_SCALE, config.context_tokens, max_tokens=1)
    runs = []
    for policy in policies:
        voice.doing(f"modelled: {policy}")
        spec = RunSpec(
            label=policy,
            instances=instances,
            config=config,
            step_times=times,
            calls=sessions.drawn(said, talks.seed),
            concurrency=MODELLED_CLIENTS,
            seed=talks.seed,
            spans_max=0,
            route=Policy(policy),
        )
        runs.append(_modelled_run(policy, simulate(spec)))
        voice.done()
    return runs


def _modelled_run(policy: str, record: RunRecord) -> PolicyRun:
    journeys = [journey for journey in record.journeys if journey.outcome in FINISHED]
    times = describe([journey.ttft_us / 1e6 for journey in journeys if journey.ttft_us is not None])
    if len(journeys) < len(record.journeys) or times is None:
        raise RequestsFailed(f"{policy}, modelled: {len(record.journeys) - len(journeys)} requests were not answered")
    return PolicyRun(
        policy=policy,
        requests=len(journeys),
        prompt_tokens=sum(journey.input_tokens for journey in journeys),
        cached_tokens=sum(journey.cached_tokens for journey in journeys),
        ttft_mean_s=times.mean,
        ttft_p90_s=times.p90,
        took_s=record.end_us / 1e6,
    )


def show(console: Console, report: RoutingReport) -> None:
    talks, instances = report.talks, report.instances
    if report.runs:
        _show(console, f"{talks.count} conversations, {talks.concurrency} at once, {instances} mixed instances", report.runs)
    title = f"{talks.count} conversations × {MODELLED_SCALE:g}, {MODELLED_CLIENTS} at once, {instances} × {MODELLED}"
    _show(console, title, report.modelled)


def _show(console: Console, title: str, runs: Sequence[PolicyRun]) -> None:
    table = Table(title=title)
    for name in ("policy", "requests", "prompt tokens", "found cached", "TTFT mean", "TTFT p90", "whole run"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for run in runs:
        table.add_row(
            run.policy,
            f"{run.requests:,}",
            f"{run.prompt_tokens:,}",
            f"{run.hit_rate:.1%}",
            f"{run.ttft_mean_s:.3f} s",
            f"{run.ttft_p90_s:.3f} s",
            f"{run.took_s:.1f} s",
        )
    console.print(table)
