"""Requests without a constraint, where a service must be told how one is added."""

from __future__ import annotations

from baton.api.prepare import PreparedRequest


async def unconstrained(prepared: PreparedRequest) -> PreparedRequest:
    return prepared
