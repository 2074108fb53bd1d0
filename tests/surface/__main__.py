"""`python -m tests.surface`: what differs from the golden file; with --write that file is made anew."""

from __future__ import annotations

import sys

from tests.surface.derive import surface
from tests.surface.golden import GOLDEN, difference

if "--write" in sys.argv[1:]:
    GOLDEN.write_text("".join(line + "\n" for line in surface()))
print("\n".join(difference(surface())) or "as in the golden file")
