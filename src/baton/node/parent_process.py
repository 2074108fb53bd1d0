"""Ends a process together with the one that started it.

The kernel ends this process (SIGKILL, so also while it is stopped) when its parent ends, however that ends. Only Linux
offers this; elsewhere the pipe that each of our processes watches is the only means.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Call as early as possible; where the parent is gone already, the process ends here."""
    bound_to(os.getppid())()


def bound_to(parent: int) -> Callable[[], None]:
    """The function for a child of `parent` to call between fork and exec. All that it needs is looked up before the fork."""
    if sys.platform != "linux":
        return _nothing
    set_option = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [ctypes.c_ulong(value) for value in (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)]

    def bind() -> None:
        set_option(*arguments)
        if os.getppid() != parent:  # the parent ended before the kernel was told
            os._exit(1)

    return bind


def _nothing() -> None:
    pass
