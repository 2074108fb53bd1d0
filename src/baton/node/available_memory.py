"""How much memory this machine or container has, in all and left, as the kernel says it."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
KIB = 1024


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """The less of what the machine has left and what the control group allows; None where neither can be read."""
    known = [size for size in (_of_machine(meminfo), _of_group(cgroup)) if size is not None]
    return min(known, default=None)


def whole_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """All memory and swap of the machine, or the limit of the control group if that is less; None where neither can be
    read."""
    known = [size for size in (_whole_of_machine(meminfo), _limit_of_group(cgroup)) if size is not None]
    return min(known, default=None)


def _whole_of_machine(meminfo: Path) -> int | None:
    try:
        text = meminfo.read_text()
        return sum(int(text.split(name)[1].split()[0]) for name in ("MemTotal:", "SwapTotal:")) * KIB
    except (OSError, IndexError, ValueError):
        return None


def _limit_of_group(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def _of_machine(meminfo: Path) -> int | None:
    try:
        return int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * KIB
    except (OSError, IndexError, ValueError):
        return None


def _of_group(cgroup: Path) -> int | None:
    """None also where the group has no limit. Files that can be dropped from memory do not count as used."""
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        held = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(held.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
