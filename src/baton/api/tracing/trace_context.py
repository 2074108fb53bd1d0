"""The W3C trace context: reading and writing `traceparent`, the decision to sample, and the form that an origin carries.

Pure: random ids are given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = "traceparent"
HEADER_CHARS_MAX = 512
"""Longer headers, of a later version of the standard, are ignored."""
CARRIED_CHARS_MAX = 72
NO_SPAN = "0" * 16
_NO_TRACE = "0" * 32
_SAMPLED = 1
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_CARRIED = re.compile(r"(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})-([0-9a-f]{16})")
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span and its trace, as another span names it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"


@dataclass(frozen=True, slots=True)
class CarriedTrace:
    """The trace of a request, as its origin carries it to a router that adopts it."""

    server: TraceContext
    """The server span of the router that accepted the request."""
    parent_id: str
    """The span of the client; empty where it sent none."""

    def encode(self) -> str:
        return f"{self.server.header}-{self.parent_id or NO_SPAN}"


def parse_traceparent(values: Sequence[str]) -> TraceContext | None:
    """None where there is no header, or more than one, or it is invalid: then the request begins a trace of its own."""
    if len(values) != 1 or len(values[0]) > HEADER_CHARS_MAX:
        return None
    match = _HEADER.fullmatch(values[0].strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None) or trace_id == _NO_TRACE or span_id == NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def parse_carried(text: str) -> CarriedTrace | None:
    match = _CARRIED.fullmatch(text)
    server = None if match is None else parse_traceparent([match[1]])
    if match is None or server is None:
        return None
    return CarriedTrace(server, "" if match[2] == NO_SPAN else match[2])


def is_sampled(trace_id: str, ratio: float) -> bool:
    """Whether a trace that begins here is kept. The same for every process: decided by the lower half of the id, as
    OpenTelemetry's TraceIdRatioBased does."""
    return int(trace_id[16:], 16) < round(ratio * (1 << _RATIO_BITS))
