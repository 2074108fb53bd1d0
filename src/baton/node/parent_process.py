"""A process that must not outlive the one that started it.

Promises that the kernel ends this process (SIGKILL, so also while it is stopped) when its parent ends, however that ends.
Elsewhere than on Linux there is nothing to ask, and the pipe that each of our processes watches has to do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For a process to call as early as it can; where its parent is gone already, it ends here."""
    bound_to(os.getppid())()


def bound_to(parent: int) -> Callable[[], None]:
    """What a child of `parent` calls between fork and exec. All that it needs is looked up here, before the fork."""
    if sys.platform != "linux":
        return _nothing
    set_option = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [ctypes.c_ulong(value) for value in (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)]

    def bind() -> None:
        set_option(*arguments)
        if os.getppid() != parent:  # it ended before the kernel knew
            os._exit(1)

    return bind


def _nothing() -> None:
    pass
