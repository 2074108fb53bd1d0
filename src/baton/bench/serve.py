"""`baton bench serve`: from options to a load, from a load to a report.

Owns which options go together and what they mean. Options that would be ignored are refused: a benchmark that quietly
measured something else is worse than none.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from baton.bench.client import BenchRequest, TargetServer
from baton.bench.load import RECORDS_MAX, ClosedLoopRate, LoadPlan, Loop, OpenLoopRate
from baton.bench.machine import describe_machine
from baton.bench.report import SCHEMA, ServeReport, ServeSummary
from baton.bench.traces import TracedRequest, read_trace, smear
from baton.bench.workload import (
    BenchSession,
    Endpoint,
    Recipe,
    Round,
    TokenRange,
    WorkloadShape,
    fixed_sessions,
    poisson_arrivals,
    traced_sessions,
)

REQUESTS_DEFAULT = 100
CONCURRENCY_DEFAULT = 16
INPUT_TOKENS_DEFAULT = 128
OUTPUT_TOKENS_DEFAULT = 64


class BadOptions(Exception):
    """Options that contradict each other or make no sense; the message says which."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the command; None: not given."""

    url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = Endpoint.COMPLETIONS
    concurrency: int | None = None
    requests: int | None = None
    rate: float | None = None
    speed: float | None = None
    max_outstanding: int = 1024
    input_tokens: int | None = None
    output_tokens: int | None = None
    trace: Path | None = None
    limit: int | None = None
    skip_longer_than: int | None = None
    smear: bool = True
    sessions: int | None = None
    rounds: int = 1
    think_ms: float = 0.0
    shared_prefix_tokens: int = 0
    prefix_groups: int = 1
    id_range: TokenRange = field(default_factory=TokenRange)
    temperature: float = 0.0
    ignore_eos: bool = True
    verify_tokens: bool = False
    retry: int = 0
    timeout_s: float = 600.0
    max_seconds: float = 3600.0
    warmup: int = 0
    seed: int = 0

    @property
    def open_loop(self) -> bool:
        return self.rate is not None or self.speed is not None


@dataclass(frozen=True, slots=True)
class Workload:
    options: ServeOptions
    requests: int
    """Number of requests that will be sent."""
    skipped: int
    """Traced requests left out because they are too long."""
    smeared: bool

    def sessions(self) -> Iterator[BenchSession]:
        options = self.options
        shape = WorkloadShape(options.rounds, options.think_ms / 1000.0, options.shared_prefix_tokens, options.prefix_groups)
        arrivals = poisson_arrivals(options.rate, options.seed) if options.rate is not None else None
        if options.trace is not None:
            return traced_sessions(_traced(options, options.trace), shape, arrivals, options.speed)
        each = Round(options.input_tokens or INPUT_TOKENS_DEFAULT, options.output_tokens or OUTPUT_TOKENS_DEFAULT)
        return fixed_sessions(options.sessions or options.requests or REQUESTS_DEFAULT, each, shape, arrivals)


def prepare(options: ServeOptions) -> Workload:
    """Validate the options and the whole trace before anything is sent."""
    _check(options)
    if options.trace is None:
        count = (options.sessions or options.requests or REQUESTS_DEFAULT) * options.rounds
        if count > RECORDS_MAX:
            raise BadOptions(f"{count:,} requests are more than the {RECORDS_MAX:,} that one run keeps")
        return Workload(options, count, skipped=0, smeared=False)
    return _survey(options, options.trace)


def _survey(options: ServeOptions, trace: Path) -> Workload:
    count = skipped = 0
    timed = False
    for request in islice(read_trace(trace, options.limit), RECORDS_MAX + 1):
        timed = timed or request.at_s is not None
        if _fits(options, request):
            count += 1
        else:
            skipped += 1
    if options.speed is not None and not timed:
        raise BadOptions(f"{trace.name} has no timestamps: use --rate or --concurrency instead of --speed")
    if count > RECORDS_MAX:
        raise BadOptions(f"{trace.name} has more than {RECORDS_MAX:,} requests: use --limit")
    if count == 0:
        raise BadOptions(f"{trace.name} has no request that fits ({skipped:,} were longer than --skip-longer-than)")
    return Workload(options, count, skipped, smeared=timed and options.smear and options.speed is not None)


def _traced(options: ServeOptions, trace: Path) -> Iterator[TracedRequest]:
    requests = read_trace(trace, options.limit)
    if options.smear:
        requests = smear(requests)
    return (request for request in requests if _fits(options, request))


def _fits(options: ServeOptions, request: TracedRequest) -> bool:
    longest = options.skip_longer_than
    return longest is None or request.input_tokens + request.output_tokens <= longest


def _check(options: ServeOptions) -> None:
    clashes = (
        (options.rate is not None and options.speed is not None, "--rate and --speed both set the arrivals: give one"),
        (options.speed is not None and options.trace is None, "--speed replays the times of a --trace: give one"),
        (
            options.open_loop and options.concurrency is not None,
            "--concurrency is for a closed loop; with --rate or --speed the bound is --max-outstanding",
        ),
        (
            options.trace is not None and (options.requests is not None or options.sessions is not None),
            "a --trace brings its own requests: bound it with --limit, not --requests or --sessions",
        ),
        (
            options.trace is not None and (options.input_tokens is not None or options.output_tokens is not None),
            "a --trace brings its own lengths: leave out --input-tokens and --output-tokens",
        ),
        (options.trace is None and options.limit is not None, "--limit is for a --trace; use --requests"),
        (options.trace is None and options.skip_longer_than is not None, "--skip-longer-than is for a --trace"),
        (options.sessions is not None and options.requests is not None, "--sessions × --rounds says how many requests"),
        (options.sessions is None and options.rounds > 1, "--rounds needs --sessions"),
        (options.sessions is None and options.think_ms > 0, "--think-ms needs --sessions"),
        (options.prefix_groups > 1 and not options.shared_prefix_tokens, "--prefix-groups needs --shared-prefix-tokens"),
        (options.id_range.low >= options.id_range.high, "--id-range is LOW:HIGH with LOW below HIGH"),
    )
    for wrong, message in clashes:
        if wrong:
            raise BadOptions(message)


def loop_of(options: ServeOptions) -> Loop:
    if options.open_loop:
        return OpenLoopRate(options.max_outstanding)
    return ClosedLoopRate(options.concurrency or CONCURRENCY_DEFAULT)


def plan_of(options: ServeOptions, model: str, api_key: str | None, tls: ssl.SSLContext | None = None) -> LoadPlan:
    return LoadPlan(
        target=TargetServer(options.url, model, options.endpoint, api_key, options.timeout_s),
        loop=loop_of(options),
        recipe=Recipe(options.seed, options.id_range),
        ask=BenchRequest(options.temperature, options.ignore_eos, options.verify_tokens, options.retry),
        seconds_max=options.max_seconds,
        warmup=options.warmup,
        tls=tls,
    )


def report_of(options: ServeOptions, model: str, summary: ServeSummary) -> ServeReport:
    config: dict[str, str | int | float | bool | None] = {"model": model}
    for name, value in asdict(options).items():
        config[name] = value if isinstance(value, str | int | float | bool | None) else str(value)
    config["id_range"] = f"{options.id_range.low}:{options.id_range.high}"
    return ServeReport(SCHEMA, datetime.now(UTC).isoformat(timespec="seconds"), config, describe_machine(), summary)


def title_of(options: ServeOptions, model: str) -> str:
    match loop_of(options):
        case ClosedLoopRate(concurrency):
            how = f"closed loop, {concurrency} at once"
        case OpenLoopRate(outstanding_max):
            pace = f"{options.rate:g} /s Poisson" if options.rate is not None else f"trace times × {options.speed:g}"
            how = f"open loop, {pace}, at most {outstanding_max} outstanding"
    if options.trace is not None:
        what = options.trace.name
    else:
        what = f"{options.input_tokens or INPUT_TOKENS_DEFAULT} in, {options.output_tokens or OUTPUT_TOKENS_DEFAULT} out"
    return f"{model}: {what}; {how}"
