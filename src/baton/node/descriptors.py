"""File descriptors: as many as the system allows, and a share of them for connections of clients.

The rest is kept for the engine, stores, peers, instances, probes and files, so that clients alone cannot use them up.
"""

from __future__ import annotations

import errno
import os
import resource

LIMIT_MAX = 1 << 20
"""Taken where the system sets no limit."""
KEPT_MIN, KEPT_MAX = 64, 1024
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def raise_descriptor_limit() -> None:
    """Raise this process's own limit to the highest it may set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_possible() -> int:
    """How many connections of clients there are descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = LIMIT_MAX if soft == resource.RLIM_INFINITY else soft
    return max(1, limit - max(KEPT_MIN, min(limit // 4, KEPT_MAX)))


def has_descriptors() -> bool:
    """Whether another file could be opened now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno in _NONE_LEFT:
            return False
        raise
    return True
