"""Handing requests over from the instance that prefills them (P) to the one that decodes them (D): the rules of both sides.

`messages` draws the conversation. Each side keeps one entry for each attempt, in one state, with one transition table. Both
sides obey three rules:

* Every entry ends: with a message, a lost session or a time limit, whichever comes first. What comes later finds no entry
  and has no effect. A slow peer and a dead peer take the same path.
* No block is freed while bytes may still move: an entry with a transfer first orders a Fence, and releases its slot and
  blocks when that is answered.
* A repeated request gets the same answer; a repeated end has no effect.

`decode_side` and `prefill_side` own the entries and their time limits. Rows and blocks belong to the scheduler, bytes and
sessions to the driver. This module holds what both sides share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import HandoverGauges
from baton.core.engine.plan import StepPlan
from baton.core.engine.records import Settled
from baton.core.engine.request import Submission
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import PeerEffect, PeerEvent

Acts = list[PeerEffect | Settled | EndedRequest]
"""Orders for the driver, and results for the front end."""

DIGEST_BYTES = 16


def prompt_digest(submission: Submission, fingerprint: bytes) -> bytes:
    """Identify the prompt, outputs, tenant and model that a KV belongs to."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"hand-over")
    for part in (fingerprint, submission.salt, submission.prompt.tobytes(), submission.generated.tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def gauges_of(peers: int, open_now: int, made: int, failed: Mapping[PdCode, int]) -> HandoverGauges:
    return HandoverGauges(
        peers=peers,
        open=open_now,
        made=made,
        refused=failed.get(PdCode.REFUSED, 0),
        not_delivered=failed.get(PdCode.NOT_DELIVERED, 0),
        preempted=failed.get(PdCode.PREEMPTED, 0),
        timed_out=failed.get(PdCode.TIMEOUT, 0),
    )


class HandoverSide:
    """The part that an instance has in hand-overs. This base is that of an instance without peers."""

    draining = False

    @property
    def queued(self) -> int:
        """Prefills that wait outside the scheduler."""
        return 0

    def open(self) -> Sequence[object]:
        return ()

    def gauges(self) -> HandoverGauges:
        return HandoverGauges()

    def next_deadline(self) -> int | None:
        return None

    def handle(self, event: PeerEvent, now_us: int) -> Acts:
        del event, now_us
        return []

    def expire(self, now_us: int) -> Acts:
        del now_us
        return []

    def planned(self, plan: StepPlan | None, now_us: int) -> Acts:
        """After a pass, before its plan is launched."""
        del plan, now_us
        return []

    def settled(self, settled: Settled, now_us: int) -> Acts:
        """After a step: what the front end is given of it."""
        del now_us
        return [settled]

    def left(self, ended: EndedRequest) -> Acts:
        """The scheduler has ended a row outside a step."""
        return [ended]

    def advance(self, now_us: int) -> Acts:
        """KV has moved between host memory, the pool and the store."""
        del now_us
        return []
