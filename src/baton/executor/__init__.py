"""Runs StepPlans. Importing it settles how OpenMP threads wait, which must happen before torch brings OpenMP in."""

from __future__ import annotations

import os

# Between two parallel operations OpenMP's threads spin for some milliseconds by default. On an idle machine that is
# harmless; where another process wants the core, a spinning thread keeps it from the one that all wait for, and steps take
# several times as long. This is enough to bridge the gaps between our operations (measured: no slower when alone).
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
