"""Describes the machine of a benchmark and the load by other processes.

Owns the reading of /proc. On systems without it the load numbers are zero and the names come from `platform`.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad(msgspec.Struct, frozen=True):
    """Load by other processes, sampled before a run while ours are idle."""

    loadavg_1m: float
    busy_cores: float
    """Busy cores during the sample."""
    steal_percent: float
    """Share of the CPU time that the hypervisor gave to other machines."""


@dataclass(frozen=True, slots=True)
class _CpuTimes:
    total: int
    idle: int
    steal: int


def describe_machine() -> dict[str, str | int | float]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def other_load(look_s: float = 1.0) -> OtherLoad:
    """Sample for `look_s` seconds; blocks that long."""
    before = _cpu_times()
    time.sleep(look_s)
    after = _cpu_times()
    total = max(1, after.total - before.total)
    busy = 1.0 - (after.idle - before.idle) / total if after.total else 0.0
    steal = (after.steal - before.steal) / total
    return OtherLoad(
        loadavg_1m=os.getloadavg()[0],
        busy_cores=round(max(0.0, busy - steal) * (os.cpu_count() or 1), 2),
        steal_percent=round(100.0 * steal, 1),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cpu_times() -> _CpuTimes:
    try:
        line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return _CpuTimes(0, 0, 0)
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in line.split()[1:9])
    return _CpuTimes(user + nice + system + idle + iowait + irq + softirq + steal, idle + iowait, steal)


def session_cpu_s(session_id: int) -> float:
    """CPU seconds that the live processes of a session (see setsid) have used so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it ended while we looked
        fields = text.rpartition(")")[2].split()
        if int(fields[3]) == session_id:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _CLOCK_TICKS
