"""`baton sim run`: a load on a cluster that is only modelled, and what it would see there.

Owns option names, help and exit codes; the work is in `baton.bench.simulated` and `baton.sim`. Exit codes: 0 all went well,
1 requests ended as they never should without faults, 2 the command was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.bench.plot import PlotUnavailable, require_matplotlib
from baton.bench.profiled import Share, profiled, show_shares
from baton.bench.report import write_json
from baton.bench.simulated import BadSimOptions, SimOptions, Simulation
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.cli.declared import parse_bytes
from baton.core.config import BadConfig, PrefillPath, ReservePolicy, VictimPolicy
from baton.core.routing.events import Policy as RoutePolicy
from baton.sim.perfetto import write_timeline
from baton.sim.plots import draw
from baton.sim.records import RunRecord
from baton.sim.report import SimReport
from baton.sim.steptime import BadStepTimes
from baton.sim.tables import show
from baton.sim.workload import BadWorkload

TRACED, MADE_UP, ARRIVING = "Load from a trace", "Load that is made up", "When requests come"
CLUSTER, PRESSURE, RESULTS = "Cluster", "Under KV pressure", "Runs and results"


def _option(name: str, panel: str, text: str, least: float | None = None, most: float | None = None) -> Any:
    return typer.Option(f"--{name}", help=text, rich_help_panel=panel, min=least, max=most)


def _file(name: str, text: str) -> Any:
    return typer.Option(f"--{name}", dir_okay=False, rich_help_panel=RESULTS, metavar="FILE", help=text)


Trace = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, rich_help_panel=TRACED, help="Mooncake, Azure or ShareGPT trace; also .gz."),
]
Limit = Annotated[int | None, _option("limit", TRACED, "First requests that fit. Default: all.", 1, 1_000_000)]
Speed = Annotated[float | None, _option("speed", TRACED, "The trace's times, × this fast. Default: 1.", 0.001, 10_000)]
Requests = Annotated[int | None, _option("requests", MADE_UP, "How many. Default: 1000.", 1, 1_000_000)]
InputTokens = Annotated[
    int | None, _option("input-tokens", MADE_UP, "Prompt; in a session, new each round. Default: 1024.", 1)
]
OutputTokens = Annotated[int | None, _option("output-tokens", MADE_UP, "Answer. Default: 256.", 1)]
Sessions = Annotated[int | None, _option("sessions", MADE_UP, "Conversations, instead of --requests.", 1, 1_000_000)]
Rounds = Annotated[int | None, _option("rounds", MADE_UP, "Of each session; history is sent along. Default: 1.", 1, 1000)]
ThinkS = Annotated[float | None, _option("think-s", MADE_UP, "Pause before each further round. Default: 0.", 0, 86_400)]
Rate = Annotated[
    float | None, _option("rate", ARRIVING, "Open loop: requests (or sessions) a second, Poisson.", 0.001, 1_000_000)
]
Concurrency = Annotated[
    int | None, _option("concurrency", ARRIVING, "Closed loop: clients. Made-up load: 64 an instance.", 1, 1_000_000)
]
MaxTokens = Annotated[
    int | None, _option("max-tokens", ARRIVING, "What clients declare. Default: just what the answer needs.", 1)
]
Instances = Annotated[int, _option("instances", CLUSTER, "Machines, each a whole copy of the model.", 1, 1024)]
SplitText = Annotated[
    str | None, _option("split", CLUSTER, "Instead: so many prefill for so many that decode, such as 3P5D.")
]
LinkGbytes = Annotated[
    float | None,
    _option("link-gbytes", CLUSTER, "With --split: KV between instances, GB/s each way. Default: 50.", 0.001, 1e6),
]
PrefillPathName = Annotated[
    PrefillPath | None, _option("prefill-path", CLUSTER, "With --split: how those that prefill plan. Default: short.")
]
Route = Annotated[
    RoutePolicy | None, _option("route", CLUSTER, "A router in front, and how it chooses. Default: none; in turn.")
]
StepTimesName = Annotated[
    str, _option("step-times", CLUSTER, "Machine and model: h200-8b, glm-4.5-air-tp8, cpu, or a file.")
]
KvBlocks = Annotated[int | None, _option("kv-blocks", CLUSTER, "KV pool of each instance, in blocks.", 1, 100_000_000)]
KvMemory = Annotated[
    str | None, _option("kv-memory", CLUSTER, "Or in bytes, such as 40G. Default: what that machine has room for.")
]
BlockSize = Annotated[int, _option("block-size", CLUSTER, "Token positions a KV block.", 1, 4096)]
MaxNumSeqs = Annotated[int, _option("max-num-seqs", CLUSTER, "Most requests that an instance runs at once.", 1, 100_000)]
MaxBatched = Annotated[
    int, _option("max-num-batched-tokens", CLUSTER, "Most tokens one step may feed; prompts are cut.", 1, 1_000_000)
]
MaxModelLen = Annotated[
    int, _option("max-model-len", CLUSTER, "Longest sequence; traced requests beyond it are left out.", 1, 10_000_000)
]
MaxWaiting = Annotated[
    int | None, _option("max-waiting", CLUSTER, "Longest queue; beyond it requests are refused. Default: none.", 1)
]
PrefixCache = Annotated[
    bool,
    typer.Option("--prefix-cache/--no-prefix-cache", rich_help_panel=CLUSTER, help="Reuse KV of prompts that begin alike."),
]
NetworkUs = Annotated[int, _option("network-us", CLUSTER, "Front end to instance, one way.", 0, 10_000_000)]
HostUs = Annotated[int, _option("host-us", CLUSTER, "Front end's work on each request.", 0, 10_000_000)]
Reserve = Annotated[ReservePolicy, _option("reserve", PRESSURE, "What running requests keep free to grow into.")]
Victims = Annotated[VictimPolicy, _option("victims", PRESSURE, "Who yields: the newest, or the cheapest to compute again.")]
MaxPreemptions = Annotated[
    int, _option("max-preemptions", PRESSURE, "A request that yielded this often is no longer a victim.", 0, 1000)
]
ComparePolicies = Annotated[
    str | None,
    typer.Option(
        "--compare",
        rich_help_panel=PRESSURE,
        metavar="RESERVE/VICTIMS,…",
        help="Policies side by side, such as new-token-ratio/newest,none/cheapest; 'all' is every pair.",
    ),
]
Seeds = Annotated[int, _option("seeds", RESULTS, "Runs of each policy; each seed has arrival times of its own.", 1, 100)]
TtftSlo = Annotated[float, _option("ttft-slo-s", RESULTS, "Goodput: first token within.", 0.001, 86_400)]
TpotSlo = Annotated[
    float, _option("tpot-slo-ms", RESULTS, "Goodput: and then a token within, on the mean.", 0.001, 86_400_000)
]
LookEveryS = Annotated[
    float | None,
    _option("look-every-s", RESULTS, "When pool and queues are looked at. Default: 0.1, in long runs 1.", 0.001, 3600),
]
JsonFile = Annotated[Path | None, _file("json", "Write the numbers here.")]
PlotFile = Annotated[Path | None, _file("plot", "Draw a PNG of the first seed (extra: plot).")]
ProfileRun = Annotated[
    bool, typer.Option("--profile", rich_help_panel=RESULTS, help="Show which layer the time went to. Twice as slow.")
]
TimelineFile = Annotated[Path | None, _file("timeline", "First policy and seed, step by step, for ui.perfetto.dev.")]


def run(
    trace: Trace = None, limit: Limit = None, speed: Speed = None,
    requests: Requests = None, input_tokens: InputTokens = None, output_tokens: OutputTokens = None,
    sessions: Sessions = None, rounds: Rounds = None, think_s: ThinkS = None,
    rate: Rate = None, concurrency: Concurrency = None, max_tokens: MaxTokens = None,
    instances: Instances = 1, split: SplitText = None, link_gbytes: LinkGbytes = None,
    prefill_path: PrefillPathName = None, route: Route = None, step_times: StepTimesName = "h200-8b",
    kv_blocks: KvBlocks = None, kv_memory: KvMemory = None, block_size: BlockSize = 16,
    max_num_seqs: MaxNumSeqs = 256, max_num_batched_tokens: MaxBatched = 2048, max_model_len: MaxModelLen = 131_072,
    max_waiting: MaxWaiting = None, prefix_cache: PrefixCache = True, network_us: NetworkUs = 100, host_us: HostUs = 0,
    reserve: Reserve = ReservePolicy.NEW_TOKEN_RATIO, victims: Victims = VictimPolicy.NEWEST,
    max_preemptions: MaxPreemptions = 8, compare: ComparePolicies = None,
    seeds: Seeds = 1, ttft_slo_s: TtftSlo = 10.0, tpot_slo_ms: TpotSlo = 100.0, look_every_s: LookEveryS = None,
    json_file: JsonFile = None, plot_file: PlotFile = None, timeline_file: TimelineFile = None,
    profile: ProfileRun = False,
) -> None:  # fmt: skip
    """Run a load on a modelled cluster in virtual time, with the scheduler that serves.

    A trace:        baton sim run --trace mooncake.jsonl.gz --speed 6 --instances 16 --plot run.png

    Made up:        baton sim run --requests 2000 --input-tokens 2048 --output-tokens 256 --rate 20 --instances 4

    Split:          baton sim run --trace mooncake.jsonl.gz --split 5P3D --ttft-slo-s 2 --tpot-slo-ms 50

    Conversations:  baton sim run --sessions 200 --rounds 5 --think-s 2 --concurrency 64

    With a router:  baton sim run --sessions 78 --rounds 6 --concurrency 24 --instances 3 --route cache-aware

    Policies:       baton sim run --kv-blocks 12000 --rate 9 --max-tokens 2048 --compare none,new-token-ratio --seeds 3
    """
    options = SimOptions(
        trace=trace, speed=speed, limit=limit, requests=requests, input_tokens=input_tokens, output_tokens=output_tokens,
        max_tokens=max_tokens, rate=rate, concurrency=concurrency, sessions=sessions, rounds=rounds, think_s=think_s,
        instances=instances, split=split, lane_gbytes_per_s=link_gbytes, prefill_path=prefill_path, route=route,
        step_times=step_times, kv_blocks=kv_blocks,
        kv_memory_bytes=parse_bytes(kv_memory) if kv_memory is not None else None, block_size=block_size,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        max_waiting=max_waiting, prefix_cache=prefix_cache, reserve=reserve, victims=victims,
        max_preemptions=max_preemptions, compare=compare, seeds=seeds, ttft_slo_s=ttft_slo_s, tpot_slo_ms=tpot_slo_ms,
        network_us=network_us, host_us=host_us, look_every_s=look_every_s,
    )  # fmt: skip
    console = wide_console()
    simulation = _prepare(console, options, plot_file)
    keep = plot_file is not None or timeline_file is not None
    (report, kept), found = _profiled(lambda: _run(console, simulation, keep), profile)
    show(console, report, simulation.title)
    if found:
        show_shares(console, found)
    if json_file is not None:
        write_json(json_file, report)
    if plot_file is not None:
        draw(kept, simulation.targets, simulation.title, plot_file)
    if timeline_file is not None:
        _write_timeline(console, timeline_file, kept[0])
    _say_written(console, json_file, plot_file, timeline_file)
    if broken := sum(summary.counts.broken for summary in report.runs):
        console.print(f"{broken:,} requests did not end as they should: a bug of Baton.", style="red", highlight=False)
        raise typer.Exit(1)


def _prepare(console: Console, options: SimOptions, plot_file: Path | None) -> Simulation:
    try:
        if plot_file is not None:
            require_matplotlib()
        return Simulation(options)
    except (BadSimOptions, BadWorkload, BadConfig, BadStepTimes, TraceMalformed, PlotUnavailable) as error:
        raise refuse(console, error) from error


def _run(console: Console, simulation: Simulation, keep: bool) -> tuple[SimReport, list[RunRecord]]:
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=simulation.requests)
        return simulation.run(
            lambda what: bar.update(task, description=what), lambda ended: bar.update(task, advance=ended), keep
        )


def _profiled(
    work: Callable[[], tuple[SimReport, list[RunRecord]]], profile: bool
) -> tuple[tuple[SimReport, list[RunRecord]], list[Share]]:
    return profiled(work) if profile else (work(), [])


def _write_timeline(console: Console, path: Path, record: RunRecord) -> None:
    if told := write_timeline(path, record).told:
        console.print(told, style="dim", highlight=False)


def _say_written(console: Console, *paths: Path | None) -> None:
    written = [str(path) for path in paths if path is not None]
    if written:
        console.print(f"Written: {', '.join(written)}.", style="dim", highlight=False, markup=False, soft_wrap=True)
