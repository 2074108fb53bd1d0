"""`baton bench policies`: what the rules of reservation and preemption cost, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.plot import PlotUnavailable, require_matplotlib
from baton.bench.plot_pool import draw_pool
from baton.bench.policies import NoTrace, Policies, PolicyOptions, find_conversations, show
from baton.bench.report import write_json
from baton.bench.traces import TraceMalformed
from baton.cli.bench_screen import progress_bar, refuse, wide_console
from baton.sim.workload import BadWorkload

TraceFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Take lengths and times from this trace; also .gz.")
]
TracesFolder = Annotated[
    Path | None, typer.Option(envvar="BATON_TRACES", file_okay=False, help="Or from the Azure conversations in this folder.")
]
Requests = Annotated[int, typer.Option(min=1, max=100_000, help="First requests of the trace that fit.")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="Runs of each policy, with other arrival times.")]
Slots = Annotated[int, typer.Option("--max-num-seqs", min=1, max=100_000, help="Most requests that run at once.")]
PoolShare = Annotated[float, typer.Option(min=0.01, max=10.0, help="KV pool ÷ what that many mean requests fill.")]
MaxTokens = Annotated[int, typer.Option(min=1, max=4096, help="max_tokens that clients declare; answers are as traced.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Arrivals of the trace, × this fast.")]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the numbers here.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", dir_okay=False, help="Draw pool use over time as PNG (extra: plot).")
]


def policies(
    trace: TraceFile = None,
    traces: TracesFolder = None,
    requests: Requests = 2000,
    seeds: Seeds = 3,
    max_num_seqs: Slots = 256,
    pool_share: PoolShare = 0.4,
    max_tokens: MaxTokens = 1024,
    speed: Speed = 5.0,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Compare reservation and victim policies on a real trace, with the real scheduler in virtual time.

    The GPU is a model of step times (an 8B model on one H200); everything that decides is what serves. Takes about two
    minutes; fewer --requests or --seeds make it shorter.
    """
    console = wide_console()
    try:
        if plot_file is not None:
            require_matplotlib()
        source = find_conversations(trace, traces)
        options = PolicyOptions(source, requests, tuple(range(seeds)), max_num_seqs, pool_share, max_tokens, speed)
        work = Policies(options)
        with progress_bar(console) as bar:
            task = bar.add_task("starting", total=work.requests)
            report = work.run(lambda what: bar.update(task, description=what), lambda ended: bar.update(task, advance=ended))
    except (NoTrace, BadWorkload, TraceMalformed, PlotUnavailable) as error:
        raise refuse(console, error) from error
    show(console, report)
    if json_file is not None:
        write_json(json_file, report)
    if plot_file is not None:
        draw_pool(report, plot_file)
