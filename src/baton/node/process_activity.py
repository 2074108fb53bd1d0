"""Whether another process runs, by what the kernel says of it (Linux): a second sign beside its silence.

A process that is stopped, or whose threads all sleep, uses no CPU. One that is late because the machine is busy uses some,
or waits for a core.
"""

from __future__ import annotations

from pathlib import Path

STOPPED = ("T", "t", "Z", "X")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Fields of `stat` after the name of the command."""


class ProcessActivity:
    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._ticks: int | None = None
        """CPU time at the first look of this silence."""

    def spoke(self) -> None:
        """It was heard: the next look begins anew."""
        self._ticks = None

    def is_stopped(self) -> bool:
        """Whether it runs nothing until it gets SIGCONT; False where nobody can tell."""
        try:
            return _read_stat(self._folder / "stat")[0] in STOPPED
        except (OSError, ValueError, IndexError):
            return False

    def runs(self) -> bool:
        """Whether it has used a CPU since the first look after `spoke`, or wants one now; True where nobody can tell.

        The first look can only tell a process that is stopped.
        """
        try:
            state, ticks = _read_stat(self._folder / "stat")
            threads = [_read_stat(task / "stat")[0] for task in (self._folder / "task").iterdir()]
        except (OSError, ValueError, IndexError):  # it has just ended, or this is not Linux
            return True
        first, self._ticks = self._ticks, ticks if self._ticks is None else self._ticks
        if state in STOPPED:
            return False
        return first is None or ticks != first or "R" in threads


def _read_stat(path: Path) -> tuple[str, int]:
    """State, and CPU time in ticks."""
    words = path.read_text(errors="replace").rpartition(")")[2].split()  # the name may contain anything
    return words[_STATE], int(words[_USER_TICKS]) + int(words[_SYSTEM_TICKS])
