"""All borders by name."""

from __future__ import annotations

from tests.fuzz import constraint_bytes, files, http_bodies, kv_bytes, wire_frames
from tests.fuzz.border import MakeBorder

BORDERS: dict[str, MakeBorder] = {
    **http_bodies.BORDERS,
    **constraint_bytes.BORDERS,
    **wire_frames.BORDERS,
    **kv_bytes.BORDERS,
    **files.BORDERS,
}

SWITCHED_OFF = frozenset() if files.HAS_GGUF_CHECK else frozenset({"file-gguf"})
"""Not run unless named: what reads these bytes is the library of others, which nothing of ours bounds."""
