"""A real fleet under KV pressure: more requests at once than its pools hold, and every answer compared.

    1. a roomy fleet answers each case once: the undisturbed answers
    2. `baton up` with small pools and default options otherwise; clients ask cases at random for so many minutes
    3. judged: an accepted request (429 at the door is none) ends by its own doing, with the undisturbed tokens

Where tokens may depend on the batch, answers are only held to their own length, one end and a usage that counts the
delivered tokens: what was delivered cannot be taken back, and nothing is missing or said twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from baton.bench.chaos_cases import COMPLETIONS, ChaosCase
from baton.bench.chaos_fleet import ChaosFleet, FleetLost, running_fleet
from baton.bench.chaos_request import SeenAnswer, ask, differences
from baton.bench.client import first_model, open_http
from baton.bench.stats import Distribution, describe
from baton.bench.tiny_model import make_tiny
from benchmarks.options import JsonIfGiven
from benchmarks.runner import ABSENT, Experiment, MeasurementFailed, Progress, Report, run_benchmark

SCRIPTED, TINY = "scripted", "tiny"
BLOCK_SIZE = 16
ROOMY_BLOCKS = 8192
RECORDING_AT_ONCE = 16
ANSWER_S_MAX = 900.0
AFTER_REFUSAL_S = 1.0
TOKEN_IDS = (3, 200)
"""Ids of which prompts are made; every model has them."""
TOO_MANY = 429
SHOWN_MAX = 20
SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    model: str = SCRIPTED
    minutes: float = 5.0
    clients: int = 48
    cases: int = 150
    input_tokens: tuple[int, int] = (50, 400)
    output_tokens: tuple[int, int] = (300, 1500)
    kv_blocks: int = 300
    mixed: int = 2
    seed: int = 1
    up_options: tuple[str, ...] = ()
    batch_invariant: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether tokens do not depend on what else is in a batch."""
        return self.batch_invariant or self.model in (SCRIPTED, TINY)

    @property
    def overload(self) -> float:
        """Mean need of all clients' requests ÷ the fleet's pools."""
        mean_tokens = (sum(self.input_tokens) + sum(self.output_tokens)) / 2
        return self.clients * mean_tokens / (self.mixed * self.kv_blocks * BLOCK_SIZE)

    def __post_init__(self) -> None:
        largest = -(-(self.input_tokens[1] + self.output_tokens[1]) // BLOCK_SIZE)
        if largest > self.kv_blocks:
            raise MeasurementFailed(f"the largest request needs {largest} blocks, and a pool has {self.kv_blocks}")


class OverloadReport(Report, kw_only=True):
    model: str
    overload: float
    accepted: int
    refused: int
    """429 at the door."""
    streamed: int
    moved: int
    moves: int
    preemptions: int
    tokens: int
    took_s: float
    duration_s: Distribution | None
    gap_s: Distribution | None
    """Longest gap between tokens of each stream."""


@dataclass(slots=True)
class _Tally:
    accepted: int = 0
    refused: int = 0
    streamed: int = 0
    moved: int = 0
    moves: int = 0
    preemptions: int = 0
    tokens: int = 0
    duration_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, case: ChaosCase, answer: SeenAnswer, found: Sequence[str]) -> None:
        self.accepted += 1
        self.streamed += case.is_streamed
        self.moved += bool(answer.moved)
        self.moves += answer.moved
        bill = answer.usage.baton if answer.usage is not None else None
        self.preemptions += bill.preemptions if bill is not None else 0
        self.tokens += answer.tokens
        self.duration_s.append(answer.took_s)
        if case.is_streamed:
            self.gap_s.append(answer.longest_gap_s)
        self.failures += [f"case {case.number}, after {answer.tokens} tokens: {what[:SHOWN_CHARS]}" for what in found]


def cases_of(options: OverloadOptions, model: str) -> list[ChaosCase]:
    """Completions of token ids, most of them streamed, greedy and seeded. They generate all tokens that they declare."""
    draws = random.Random(options.seed)
    return [_draw_case(number, draws, options, model) for number in range(options.cases)]


def _draw_case(number: int, draws: random.Random, options: OverloadOptions, model: str) -> ChaosCase:
    body: dict[str, object] = {
        "model": model,
        "prompt": [draws.randint(*TOKEN_IDS) for _ in range(draws.randint(*options.input_tokens))],
        "max_tokens": draws.randint(*options.output_tokens),
        "ignore_eos": True,
        "return_token_ids": True,
        "baton_usage": True,
        **({"temperature": 0} if draws.random() < 0.5 else {"temperature": 0.9, "seed": draws.randrange(1 << 31)}),
    }
    if draws.random() < 0.8:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return ChaosCase(number, COMPLETIONS, body)


def judged(case: ChaosCase, answer: SeenAnswer, undisturbed: SeenAnswer | None) -> list[str]:
    """What is wrong with an accepted request's answer."""
    if undisturbed is not None:
        return differences(undisturbed, answer)
    if answer.fault is not None:
        return [answer.fault]
    wanted = case.body["max_tokens"]
    return [] if answer.tokens == wanted else [f"{answer.tokens} tokens of {wanted}"]


async def run_overload(options: OverloadOptions, progress: Progress) -> OverloadReport:
    with _model_arguments(options, progress) as model:
        async with open_http(options.clients + 8) as http:
            undisturbed = await _record(options, model, http, progress) if options.is_exact else {}
            progress.doing(f"{options.clients} clients for {options.minutes:g} minutes")
            small = (*model, "--mixed", str(options.mixed), "--kv-blocks", str(options.kv_blocks), *options.up_options)
            async with running_fleet(small, options.mixed, http) as fleet:
                return await _Overload(options, fleet, http, undisturbed).run()


@contextlib.contextmanager
def _model_arguments(options: OverloadOptions, progress: Progress) -> Iterator[tuple[str, ...]]:
    if options.model == SCRIPTED:
        yield ("--executor", "scripted")
    elif options.model != TINY:
        yield (options.model, *(("--batch-invariant",) if options.batch_invariant else ()))
    else:
        with tempfile.TemporaryDirectory(prefix="baton-tiny-") as folder:
            progress.doing("making a tiny model")
            make_tiny(Path(folder) / TINY, options.input_tokens[1] + options.output_tokens[1])
            yield (str(Path(folder) / TINY), "--device", "cpu", "--dtype", "float64")


async def _record(
    options: OverloadOptions, model: Sequence[str], http: aiohttp.ClientSession, progress: Progress
) -> dict[int, SeenAnswer]:
    """Answers by case of one instance with room for all."""
    progress.doing("recording undisturbed answers")
    at_once, answers = asyncio.Semaphore(RECORDING_AT_ONCE), dict[int, SeenAnswer]()
    async with running_fleet((*model, "--mixed", "1", "--kv-blocks", str(ROOMY_BLOCKS)), 1, http) as fleet:

        async def record(case: ChaosCase) -> None:
            async with at_once:
                answers[case.number] = answer = await ask(http, fleet.url, case, ANSWER_S_MAX)
            if answer.fault is not None:
                raise MeasurementFailed(f"case {case.number} fails on a fleet with room for it: {answer.fault}")

        await asyncio.gather(*map(record, cases_of(options, await first_model(http, fleet.url))))
    return answers


class _Overload:
    def __init__(
        self, options: OverloadOptions, fleet: ChaosFleet, http: aiohttp.ClientSession, undisturbed: dict[int, SeenAnswer]
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._http = http
        self._undisturbed = undisturbed
        self._tally = _Tally()

    async def run(self) -> OverloadReport:
        options, tally = self._options, self._tally
        cases = cases_of(options, await first_model(self._http, self._fleet.url))
        began_s = time.monotonic()
        until_s = began_s + options.minutes * 60
        await asyncio.gather(*(self._client(number, cases, until_s) for number in range(options.clients)))
        took_s = time.monotonic() - began_s
        await self._judge_fleet()
        return OverloadReport(
            model=options.model,
            overload=options.overload,
            accepted=tally.accepted,
            refused=tally.refused,
            streamed=tally.streamed,
            moved=tally.moved,
            moves=tally.moves,
            preemptions=tally.preemptions,
            tokens=tally.tokens,
            took_s=took_s,
            duration_s=describe(tally.duration_s),
            gap_s=describe(tally.gap_s),
            failures=tally.failures,
        )

    async def _client(self, number: int, cases: Sequence[ChaosCase], until_s: float) -> None:
        draws = random.Random(self._options.seed * 1000 + number)
        while time.monotonic() < until_s:
            case = draws.choice(cases)
            answer = await ask(self._http, self._fleet.url, case, ANSWER_S_MAX)
            if answer.status == TOO_MANY:
                self._tally.refused += 1
                await asyncio.sleep(AFTER_REFUSAL_S)
            else:
                self._tally.add(case, answer, judged(case, answer, self._undisturbed.get(case.number)))

    async def _judge_fleet(self) -> None:
        """No process of the fleet may have ended."""
        try:
            self._fleet.child.check_alive()
            await self._fleet.look()
        except FleetLost as lost:
            self._tally.failures.append(str(lost))
        if self._fleet.ready < self._options.mixed:
            self._tally.failures.append(f"{self._fleet.ready} of {self._options.mixed} instances are ready at the end")


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Model = Annotated[str, typer.Argument(help="scripted, tiny (float64), a model folder or a built-in model.")]
Minutes = Annotated[float, typer.Option(min=0.01, max=1440, help="How long clients send requests.")]
Clients = Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")]
Cases = Annotated[int, typer.Option(min=1, max=10_000, help="Different requests; each is answered undisturbed first.")]
Blocks = Annotated[int, typer.Option(min=1, help="KV pool of each of the two instances, in blocks.")]
OverloadSeed = Annotated[int, typer.Option(min=0, help="Draws the requests.")]
Invariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Start the model so, and hold its answers to the undisturbed tokens too.")
]
UpArgs = Annotated[str, typer.Option(help="More options for baton up, such as '--reserve none'.")]


def fleet_overload(
    model: Model = SCRIPTED,
    minutes: Minutes = 5.0,
    clients: Clients = 48,
    cases: Cases = 150,
    kv_blocks: Blocks = 300,
    seed: OverloadSeed = 1,
    up_args: UpArgs = "",
    batch_invariant: Invariant = False,
    json_file: JsonIfGiven = None,
) -> None:
    """Overload `baton up` with small KV pools, and compare every answer with the undisturbed one.

    Two mixed instances with default options, 150 different requests of 50 to 400 tokens in and 300 to 1,500 out. Exit code
    1 when an accepted request ended otherwise than by its own doing, or with other tokens.
    """

    def prepare(progress: Progress) -> Experiment[OverloadReport]:
        options = OverloadOptions(
            model, minutes, clients, cases, kv_blocks=kv_blocks, seed=seed, up_options=tuple(up_args.split()),
            batch_invariant=batch_invariant,
        )  # fmt: skip
        return Experiment(None, lambda: asyncio.run(run_overload(options, progress)))

    run_benchmark(prepare, show, json_file)


def show(console: Console, report: OverloadReport) -> None:
    console.print(verdict(report), highlight=False)
    console.print(
        f"{report.overload:.1f} × what the pools hold; {report.tokens:,} tokens in {report.took_s:.0f} s; "
        f"{report.preemptions:,} preemptions, {report.moves:,} moves of {report.moved:,} requests; "
        f"seconds a request {_shown(report.duration_s)}; longest gap of a stream {_shown(report.gap_s)} s.",
        highlight=False,
        soft_wrap=True,
    )
    for failure in report.failures[:SHOWN_MAX]:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)


def verdict(report: OverloadReport) -> str:
    head = f"{report.model}: {report.accepted:,} requests accepted, {report.refused:,} refused at the door; "
    return head + (f"{len(report.failures):,} failures." if report.failures else "every one ended as it should.")


def _shown(values: Distribution | None) -> str:
    return ABSENT if values is None else f"{values.p50:.2f} (p50), {values.p99:.2f} (p99)"
