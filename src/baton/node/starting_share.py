"""An instance that starts leaves the processor to those that serve.

Importing torch and transformers takes seconds of processor time, and where an instance is replaced, the others of its
fleet may serve on the same cores. Linux divides the processor between sessions by a nice value of each (sched(7),
autogroup), which a process may raise and set back to 0 without privileges. Without autogroups nothing changes.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

log = logging.getLogger("baton.node")

AUTOGROUP = Path("/proc/self/autogroup")
STARTING_NICE = 3
"""Half of a serving session's share where all are busy. With 10 (a tenth), no replacement became ready under full load."""
ATTEMPTS_MAX = 60
RETRY_S = 0.05
"""Linux takes ten changes a second from all unprivileged processes together."""


def lower_share() -> None:
    """Yield to the sessions of other processes. Changes nothing unless this process leads a session of its own."""
    _set_session_nice(STARTING_NICE)


def full_share() -> None:
    """Have the share of a session of its own that nobody changed. Waits, for seconds at most, where other processes change
    theirs too."""
    if not _set_session_nice(0):
        log.warning("this process keeps the lower share of the processor with which it started: %s", AUTOGROUP)


def _set_session_nice(nice: int) -> bool:
    """False: it could not be set."""
    if os.getsid(0) != os.getpid() or not AUTOGROUP.exists():
        return True
    for _ in range(ATTEMPTS_MAX):
        try:
            AUTOGROUP.write_text(str(nice))
        except BlockingIOError:
            time.sleep(RETRY_S)
        except OSError:
            return False
        else:
            return True
    return False
