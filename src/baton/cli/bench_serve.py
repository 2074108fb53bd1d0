"""`baton bench serve`: load a server and report; the work is in `baton.bench.serve` and `baton.bench.load`."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn

from baton.bench.client import ServerUnreachable, first_model, open_http
from baton.bench.load import RunResult, run_load
from baton.bench.plot import PlotUnavailable, draw, require_matplotlib
from baton.bench.report import show, summarise, write_json
from baton.bench.serve import BadOptions, ServeOptions, Workload, plan_of, prepare, report_of, title_of
from baton.bench.traces import TraceMalformed
from baton.bench.workload import Endpoint, TokenRange
from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.cli.server_trust import CaCert, trusting

LOAD, LENGTHS, SESSIONS, LIMITS = "Load", "Lengths and prompts", "Sessions and shared prefixes", "Limits and output"

Url = Annotated[str, typer.Option(help="Base address of any OpenAI-compatible server.")]
Model = Annotated[str | None, typer.Option(help="Model to ask for [default: the first that the server lists].")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")]
EndpointName = Annotated[Endpoint, typer.Option(help="completions sends token ids, chat sends words.")]
Concurrency = Annotated[int | None, typer.Option(min=1, max=10_000, rich_help_panel=LOAD, help="Closed loop: at once [16].")]
Requests = Annotated[int | None, typer.Option(min=1, rich_help_panel=LOAD, help="How many requests [100].")]
Rate = Annotated[float | None, typer.Option(min=0.001, rich_help_panel=LOAD, help="Open loop: Poisson arrivals a second.")]
Speed = Annotated[float | None, typer.Option(min=0.001, rich_help_panel=LOAD, help="Open loop: trace times, × this fast.")]
MaxOutstanding = Annotated[int, typer.Option(min=1, max=10_000, rich_help_panel=LOAD, help="Bound of an open loop.")]
Warmup = Annotated[int, typer.Option(min=0, max=1000, rich_help_panel=LOAD, help="Short requests sent first, unmeasured.")]
InputTokens = Annotated[int | None, typer.Option(min=1, rich_help_panel=LENGTHS, help="Prompt tokens [128].")]
OutputTokens = Annotated[int | None, typer.Option(min=1, rich_help_panel=LENGTHS, help="Output tokens [64].")]
Trace = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, rich_help_panel=LENGTHS, help="Mooncake, Azure or ShareGPT trace; also .gz."),
]
Limit = Annotated[int | None, typer.Option(min=1, rich_help_panel=LENGTHS, help="First requests of the trace only.")]
SkipLonger = Annotated[int | None, typer.Option(min=1, rich_help_panel=LENGTHS, help="Skip traced requests longer in all.")]
Smear = Annotated[bool, typer.Option(rich_help_panel=LENGTHS, help="Spread traced requests that share one timestamp.")]
IdRange = Annotated[str, typer.Option(metavar="LOW:HIGH", rich_help_panel=LENGTHS, help="Ids that prompts are drawn from.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0, rich_help_panel=LENGTHS)]
IgnoreEos = Annotated[bool, typer.Option(rich_help_panel=LENGTHS, help="Every answer has its full length, and is checked.")]
VerifyTokens = Annotated[bool, typer.Option(rich_help_panel=LENGTHS, help="Ask for token ids and count them against usage.")]
Seed = Annotated[int, typer.Option(min=0, rich_help_panel=LENGTHS, help="Equal seeds send equal prompts.")]
Sessions = Annotated[int | None, typer.Option(min=1, rich_help_panel=SESSIONS, help="Conversations, instead of --requests.")]
Rounds = Annotated[
    int, typer.Option(min=1, max=1000, rich_help_panel=SESSIONS, help="Rounds of each; history is sent along.")
]
ThinkMs = Annotated[float, typer.Option(min=0.0, rich_help_panel=SESSIONS, help="Pause between the rounds of a session.")]
PrefixTokens = Annotated[
    int, typer.Option(min=0, rich_help_panel=SESSIONS, help="Shared tokens before each prompt, on top.")
]
PrefixGroups = Annotated[int, typer.Option(min=1, rich_help_panel=SESSIONS, help="Different shared prefixes.")]
Retry = Annotated[
    int, typer.Option(min=0, max=100, rich_help_panel=LIMITS, help="Retries of a 429 or 503, as Retry-After says.")
]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.1, rich_help_panel=LIMITS, help="Seconds a request may take.")]
MaxSeconds = Annotated[float, typer.Option(min=1.0, rich_help_panel=LIMITS, help="Seconds the whole run may take.")]
AllowErrors = Annotated[bool, typer.Option(rich_help_panel=LIMITS, help="Exit 0 even when requests failed.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, rich_help_panel=LIMITS, help="Write the numbers here.")
]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, rich_help_panel=LIMITS, help="Draw a PNG (extra: plot).")
]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, and how its server is trusted."""

    model: str | None
    """None: the first that the server lists."""
    api_key: str | None
    tls: ssl.SSLContext | None


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    api_key: ApiKey = None,
    endpoint: EndpointName = Endpoint.COMPLETIONS,
    concurrency: Concurrency = None,
    requests: Requests = None,
    rate: Rate = None,
    speed: Speed = None,
    max_outstanding: MaxOutstanding = 1024,
    warmup: Warmup = 0,
    input_tokens: InputTokens = None,
    output_tokens: OutputTokens = None,
    trace: Trace = None,
    limit: Limit = None,
    skip_longer_than: SkipLonger = None,
    smear: Smear = True,
    id_range: IdRange = "1000:20000",
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = True,
    verify_tokens: VerifyTokens = False,
    seed: Seed = 0,
    sessions: Sessions = None,
    rounds: Rounds = 1,
    think_ms: ThinkMs = 0.0,
    shared_prefix_tokens: PrefixTokens = 0,
    prefix_groups: PrefixGroups = 1,
    retry: Retry = 0,
    timeout_s: TimeoutS = 600.0,
    max_seconds: MaxSeconds = 3600.0,
    allow_errors: AllowErrors = False,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    cacert: CaCert = None,
) -> None:
    """Load an OpenAI-compatible server and report latency and throughput.

    Closed loop:  baton bench serve --concurrency 64 --requests 256 --input-tokens 128 --output-tokens 64

    Open loop:    baton bench serve --trace azure.csv.gz --limit 200 --speed 2

    Conversations: baton bench serve --sessions 8 --rounds 4 --think-ms 500
    """
    options = ServeOptions(
        url, endpoint, concurrency, requests, rate, speed, max_outstanding, input_tokens, output_tokens, trace, limit,
        skip_longer_than, smear, sessions, rounds, think_ms, shared_prefix_tokens, prefix_groups, _id_range(id_range),
        temperature, ignore_eos, verify_tokens, retry, timeout_s, max_seconds, warmup, seed,
    )  # fmt: skip
    if _measure(options, Asked(model, api_key, trusting(cacert)), json_file, plot_file) and not allow_errors:
        raise typer.Exit(1)


def _id_range(text: str) -> TokenRange:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise typer.BadParameter(f"{text!r} is not LOW:HIGH", param_hint="--id-range")
    return TokenRange(int(low), int(high))


def _measure(options: ServeOptions, asked: Asked, json_file: Path | None, plot_file: Path | None) -> bool:
    """Run the load and print the report. True when requests failed."""
    console = wide_console()
    try:
        if plot_file is not None:
            require_matplotlib()
        workload = prepare(options)
        name = asked.model or asyncio.run(_ask_model(options.url, asked))
        result = _run(console, workload, name, asked)
    except (BadOptions, TraceMalformed, PlotUnavailable) as error:
        raise refuse(console, error) from error
    except ServerUnreachable as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    summary = summarise(result)
    title = title_of(options, name)
    show(console, summary, title, options.open_loop)
    if json_file is not None:
        write_json(json_file, report_of(options, name, summary))
    if plot_file is not None:
        draw(result, title, plot_file)
    return summary.counts.failed > 0


async def _ask_model(url: str, asked: Asked) -> str:
    async with open_http(1, asked.tls) as http:
        return await first_model(http, url, asked.api_key)


def _run(console: Console, workload: Workload, model: str, asked: Asked) -> RunResult:
    if workload.skipped:
        console.print(f"{workload.skipped:,} traced requests are longer than --skip-longer-than and are left out.")
    if workload.smeared:
        console.print("Requests of the trace that share one timestamp are spread until the next (--no-smear leaves them).")
    with progress_bar(console, TextColumn("{task.fields[rate]}")) as bar:
        task = bar.add_task("requests", total=workload.requests, rate="")

        def advance(done: int, tokens: int) -> None:
            elapsed_s = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=done, rate=f"{tokens / elapsed_s:,.0f} tokens/s" if elapsed_s else "")

        plan = plan_of(workload.options, model, asked.api_key, asked.tls)
        return asyncio.run(run_load(plan, workload.sessions(), advance))
