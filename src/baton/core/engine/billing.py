"""The bill of each request: tokens found, computed and recomputed, and the time spent in each stage.

A stage ends when it is billed; `Request.since_us` is the time the current one began.
"""

from __future__ import annotations

from baton.core.engine.records import Request
from baton.core.handover.messages import Commit


class Billing:
    def __init__(self) -> None:
        self.prefix_queries = 0
        """Tokens looked up."""
        self.prefix_hits = 0
        """Tokens found."""
        self.recomputed_tokens = 0

    def start(self, request: Request, found: int, now_us: int) -> None:
        """It leaves the queue; the first `found` of its tokens are cached."""
        request.found_tokens = found
        if request.is_fresh:
            request.bill.cached_tokens = found
            request.computed_ever = found
            self.count_look_up(request, found)
        self.queued(request, now_us)

    def count_look_up(self, request: Request, found: int) -> None:
        self.prefix_queries += request.tokens_at_start
        self.prefix_hits += found

    def queued(self, request: Request, now_us: int) -> None:
        """Bill the time since the last stage as queue time."""
        request.bill.queue_us += now_us - request.since_us
        request.since_us = now_us

    def transferred(self, request: Request, now_us: int) -> None:
        """Bill the time since the last stage as transfer time, whether the KV arrived or not."""
        request.bill.transfer_us += now_us - request.since_us
        request.since_us = now_us

    def prefilled(self, request: Request, now_us: int) -> None:
        request.bill.prefill_us += now_us - request.since_us
        request.since_us = now_us

    def prefilled_by_peer(self, request: Request, commit: Commit, now_us: int) -> None:
        """Bill the peer's queue and prefill time, within the time that passed here, and the rest as transfer time."""
        bill, tokens = request.bill, request.tokens_at_start
        passed = now_us - request.since_us
        queued = min(commit.queue_us, passed)
        computed = min(commit.prefill_us, passed - queued)
        bill.queue_us += queued
        bill.prefill_us += computed
        bill.transfer_us += passed - queued - computed
        bill.cached_tokens = min(commit.cached_tokens, tokens)
        bill.restored_tokens += min(commit.restored_tokens, bill.cached_tokens)
        bill.computed_tokens += tokens - bill.cached_tokens
        request.found_tokens = request.computed_ever = tokens
        request.since_us = now_us

    def run(self, request: Request, known: int, computed: int, now_us: int) -> None:
        """Close the stage of a running request, given the tokens that its row has known and computed."""
        bill, spent = request.bill, now_us - request.since_us
        first_since_start = known > request.tokens_at_start
        bill.decode_us += spent if first_since_start else 0
        bill.prefill_us += 0 if first_since_start else spent
        self._tokens(request, computed)
        request.since_us = now_us

    def _tokens(self, request: Request, computed: int) -> None:
        """Count positions computed since the last start; those computed before that count as recomputed."""
        again = max(0, min(computed, request.computed_ever) - request.found_tokens)
        request.bill.recomputed_tokens += again
        request.bill.computed_tokens += max(0, computed - request.computed_ever)
        request.computed_ever = max(computed, request.computed_ever)
        self.recomputed_tokens += again
