"""The command line of every Python process that Baton starts.

`-P` keeps the current folder off the child's module path: `python -m` would put it first, and a downloaded model's folder
with a `torch.py` in it would then run that file. PYTHONPATH and what is installed are found as usual.
"""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """Run a module, which must be installed or on PYTHONPATH, under this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]
