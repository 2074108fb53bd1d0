"""What a choice of a request is doing, as timelines, logs and traces name it."""

from __future__ import annotations

from enum import Enum


class TimelineStage(Enum):
    """Stages of a choice in the timeline."""

    QUEUED = "queued"
    PLACED = "placed"
    PREFILL = "prefill"
    HANDOVER = "handover"
    RESTORE = "restore"
    """Its KV is copied back from host memory."""
    DECODE = "decode"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    MOVED = "moved"
    ENDED = "ended"
