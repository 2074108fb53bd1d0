"""What would hold up a process that others expect a sign of life from several times a second."""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """To be called once everything is loaded: what is there now stays for ever, so the collector need not look at it again.

    A full collection over all that the libraries of a server bring along takes a tenth of a second, in which nothing else
    runs; afterwards it is over what requests have left behind.
    """
    gc.collect()
    gc.freeze()
