"""Handing requests over from the instance that prefills (giver, P) to the one that decodes (taker, D): two tables and books.

`peers` draws the conversation. Each side keeps one entry for each attempt, in one state, and what can happen to it is one
table. Both sides obey three rules:

* Every entry ends. A message, a lost session, a time limit: whatever comes first ends it, and what comes later finds no
  entry and means nothing. A slow peer and a dead peer take the same path.
* Nothing is given back while bytes may still move: an entry with a transfer first orders a Fence, and lets go of its slot
  and blocks when that is answered.
* Asking twice is answered twice in the same words; ending twice is ending once.

`taking` and `giving` are the two sides; they own the entries and their time limits. Rows and blocks belong to the scheduler,
bytes and sessions to the driver. Here is what both sides use.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from baton.core.engine.ended import EndedRequest
from baton.core.engine.gauges import HandoverGauges
from baton.core.engine.records import Settled
from baton.core.engine.request import Submission
from baton.core.handover.faults import PdCode
from baton.core.handover.messages import PeerEffect

Acts = list[PeerEffect | Settled | EndedRequest]
"""Orders for the driver, and news for the front end."""

DIGEST_BYTES = 16


def prompt_digest(submission: Submission, fingerprint: bytes) -> bytes:
    """Says of which prompt and outputs, for which tenant and in which model a KV is."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"hand-over")
    for part in (fingerprint, submission.salt, submission.prompt.tobytes(), submission.generated.tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def gauges_of(peers: int, open_now: int, made: int, failed: Counter[PdCode]) -> HandoverGauges:
    return HandoverGauges(
        peers=peers,
        open=open_now,
        made=made,
        refused=failed[PdCode.REFUSED],
        not_delivered=failed[PdCode.NOT_DELIVERED],
        preempted=failed[PdCode.PREEMPTED],
        timed_out=failed[PdCode.TIMEOUT],
    )
