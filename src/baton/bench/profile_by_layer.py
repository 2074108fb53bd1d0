"""CPU time of a run by layer, for `baton sim run --profile`.

Owns the grouping. Functions that are not ours (Python's, numpy's) are charged to whoever of ours called them, so a row is
what a layer costs with all that it uses. The profiler slows everything down: shares mean something, seconds do not.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

import baton

ROOT = Path(baton.__file__).parent
ELSEWHERE = "elsewhere"

LAYERS = {
    "core": "scheduler, ledger, prefix cache",
    "wire": "messages, desk",
    "executor": "counting executor",
    "sim/world.py": "event loop: heap, hosts, alarms",
    "sim/device.py": "devices",
    "sim/step_times.py": "step times",
    "sim": "instances, front end, clients, records",
    ELSEWHERE: "reading the trace, progress, the rest",
}
"""Path prefix → description; the most specific prefix first."""

Result = TypeVar("Result")
Place = tuple[str, int, str]


class Share(NamedTuple):
    layer: str
    seconds: float
    calls: int


def profiled(work: Callable[[], Result]) -> tuple[Result, list[Share]]:
    profiler = cProfile.Profile()
    result = profiler.runcall(work)
    return result, shares(pstats.Stats(profiler))


def shares(stats: pstats.Stats) -> list[Share]:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    table: dict[Place, tuple[int, int, float, float, dict[Place, tuple[int, int, float, float]]]] = stats.stats  # type: ignore[attr-defined]
    for place, (_, times, own_s, _, callers) in table.items():
        layer = _layer(place[0])
        if layer != ELSEWHERE:
            seconds[layer] += own_s
            calls[layer] += times
            continue
        charged = 0.0
        for caller, (_, _, caller_s, _) in callers.items():
            seconds[_layer(caller[0])] += caller_s
            charged += caller_s
        seconds[ELSEWHERE] += max(0.0, own_s - charged)
    return [Share(layer, seconds[layer], calls[layer]) for layer in LAYERS]


def _layer(file: str) -> str:
    try:
        parts = Path(file).relative_to(ROOT).parts
    except ValueError:
        return ELSEWHERE
    named = "/".join(parts[:2])
    return named if named in LAYERS else parts[0] if parts[0] in LAYERS else ELSEWHERE


def show_shares(console: Console, found: list[Share]) -> None:
    whole = sum(share.seconds for share in found) or 1.0
    table = Table(title="Where the time went (under the profiler, which slows everything down)", title_justify="left")
    for column, justify in (("layer", "left"), ("what", "left"), ("share", "right"), ("s", "right"), ("calls", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left")
    for share in found:
        table.add_row(
            share.layer, LAYERS[share.layer], f"{share.seconds / whole:.1%}", f"{share.seconds:.1f}", f"{share.calls:,}"
        )
    console.print(table)
