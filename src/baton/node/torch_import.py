"""Keeps torch out of a process that only tokenises.

`transformers` imports torch, which costs a front end or a router more than a second at the start and 200 MiB of memory;
tokenisers and templates work without it. Modules imported before stay.
"""

from __future__ import annotations

import os
import sys


def block_torch_import() -> None:
    """Make every later import of torch fail in this process; `transformers` then treats it as not installed."""
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # otherwise it advises to install torch
        sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to forbid an import
