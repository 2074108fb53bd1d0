"""What the documents name and the tree does not have yet. An entry goes when the tree has it; empty sets are the aim."""

from __future__ import annotations

FILES: frozenset[str] = frozenset()
NAMES: frozenset[str] = frozenset()
MAKE_VARIABLES: frozenset[str] = frozenset()
