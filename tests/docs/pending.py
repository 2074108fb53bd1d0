"""What the documents name and the tree does not have yet. An entry goes when the tree has it; empty sets are the aim."""

from __future__ import annotations

FILES = frozenset({"docs/reference/options.md", "docs/reference/metrics.md", "benchmarks/"})
MAKE_VARIABLES = frozenset({"T"})
CLASSES = frozenset({"InstanceSessions", "PrefixPublisher", "RequestTable", "RouterSessions"})
