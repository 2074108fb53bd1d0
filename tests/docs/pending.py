"""What the documents name and the tree does not have yet. An entry goes when the tree has it; empty sets are the aim."""

from __future__ import annotations

FILES = frozenset(
    [
        "benchmarks/",
        "core/engine/admission.py",
        "core/engine/billing.py",
        "core/engine/driver.py",
        "core/engine/ending.py",
        "core/engine/passes.py",
        "core/engine/prefix_lookup.py",
        "core/engine/pressure.py",
        "core/engine/queued_requests.py",
        "core/engine/settling.py",
        "core/routing/attempts.py",
        "core/routing/dispatch.py",
        "core/setting.py",
        "docs/reference/metrics.md",
        "docs/reference/options.md",
        "router/settings.py",
    ]
)
NAMES = frozenset(
    [
        "InstanceSessions",
        "PrefixPublisher",
        "RequestTable",
        "RouterSessions",
        "RunningSet.vacate",
        "Scheduler.plan",
        "ShortPrefillPass.fill",
        "decode_scheduler",
        "mixed_scheduler",
        "prefill_scheduler",
    ]
)
MAKE_VARIABLES = frozenset(["T"])
