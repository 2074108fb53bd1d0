"""What a process that only turns text into tokens does without.

`transformers` brings torch along, which costs a front end or a router more than a second at the start and 200 MiB for as
long as it lives, for nothing: tokenisers and templates work without it. Whatever has been imported already stays.
"""

from __future__ import annotations

import os
import sys


def block_torch_import() -> None:
    """From here on an import of torch fails in this process; `transformers` then takes it for not installed."""
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it advises to install torch
        sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to forbid an import
