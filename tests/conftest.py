"""Where there is no GPU, kernels run in Triton's interpreter, which must be chosen before anything imports `triton`."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
