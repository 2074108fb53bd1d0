"""What two instances say to each other when one prefills for the other, and what a driver is told and asked to do for it.

Values only; `handover` decides. The *taker* (D) was given a request by its client and asks a *giver* (P) to prefill it:

    D                                   P
      Ask      ───────────────────────▶   bounded queue; takes its own blocks when the turn comes
               ◀───────────────────────   Offer: ready to compute
      Grant    ───────────────────────▶   slot and blocks at D are leased from here on   (or Refuse: P lets go at once)
               ◀══════ KV, layer by layer, chunk by chunk, over a data connection opened with the grant's token ══════
               ◀───────────────────────   Renew, while it takes long
               ◀───────────────────────   Commit: first token, counts, checksums
      Adopted  ───────────────────────▶   P lets go; the request decodes at D

    Release (D → P) and Decline (P → D) end an attempt at any time; both may come twice or too late and then mean nothing.

Every message carries (request, attempt): the taker's own number for the request, and how often it has asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, NewType

from msgspec import Meta

from baton.core.bounds import DIGEST_BYTES_MAX, Count, Long, Positive, Reason, WireMessage
from baton.core.engine.plan import Int32s, Logprobs
from baton.core.engine.request import Serial, Submission
from baton.core.handover.faults import PdCode, PdFault

TOKEN_BYTES_MAX = 64
CHECKS_BYTES_MAX = 8 << 20
"""A million blocks."""

PeerId = NewType("PeerId", str)
"""What this instance calls another one; a driver's business, unique among its peers."""


class Handover(NamedTuple):
    """One attempt to hand one request over, as either side names it."""

    peer: PeerId
    """The other side."""
    request: int
    """The taker's serial."""
    attempt: int
    """From 1."""


# ── messages between the two ─────────────────────────────────────────────────────────────────────────────────────────────


class Ask(WireMessage, tag="ask", frozen=True, eq=False):
    """D → P: prefill this for me. The submission is a leader: its choice 0, or a request without siblings."""

    request: Long
    attempt: Positive
    submission: Submission


class Offer(WireMessage, tag="offer", frozen=True):
    """P → D: I hold my blocks and would compute now; have you room?"""

    request: Long
    attempt: Positive
    prompt_tokens: Count
    """All that it computes: what was generated after the prompt counts."""
    queued_tokens: Long = 0
    """Of all prompts that P was asked for and has not prefilled: by this a D chooses whom to ask next."""


class Grant(WireMessage, tag="grant", frozen=True):
    """D → P: slot and blocks are leased to you. Asked for twice, the same grant is given twice."""

    request: Long
    attempt: Positive
    cached_tokens: Count
    """Leading positions that D has already, whole blocks; P sends only what follows."""
    lease_us: Long
    """How long D waits without hearing of it."""
    token: Annotated[bytes, Meta(min_length=1, max_length=TOKEN_BYTES_MAX)]
    """Opens one data connection, once."""


class Refuse(WireMessage, tag="refuse", frozen=True):
    request: Long
    attempt: Positive
    reason: Reason
    retry_after_us: Long


class Renew(WireMessage, tag="renew", frozen=True):
    """P → D: still at it."""

    request: Long
    attempt: Positive


class Commit(WireMessage, tag="commit", frozen=True, eq=False):
    """P → D: everything was sent. D verifies all of this before the request joins its batch."""

    request: Long
    attempt: Positive
    token: Count
    """The first output."""
    logprobs: Logprobs | None
    """Of that token, one line; `row` means nothing here."""
    cached_tokens: Count
    """Of the tokens it starts with, those that P did not compute, because its cache or another tier had them."""
    queue_us: Long
    prefill_us: Long
    prompt_digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
    """Of the prompt and its outputs so far, the salt and the model's fingerprint, as `handover.prompt_digest` makes it."""
    checks: Annotated[bytes, Meta(max_length=CHECKS_BYTES_MAX)]
    """One checksum a block that was sent, in order; opaque here, verified by the driver against what arrived."""
    queued_tokens: Long = 0
    """As in an Offer, without this one."""
    restored_tokens: Count = 0
    """Of the cached ones, those that came from host memory or the store."""


class Adopted(WireMessage, tag="adopted", frozen=True):
    """D → P: it decodes here now; let go."""

    request: Long
    attempt: Positive


class Release(WireMessage, tag="release", frozen=True):
    """D → P: I no longer want it (client gone, lease over, KV spoilt); let go."""

    request: Long
    attempt: Positive
    reason: Reason


class Decline(WireMessage, tag="decline", frozen=True):
    """P → D: I cannot, or cannot any more; I have let go."""

    request: Long
    attempt: Positive
    code: PdCode
    reason: Reason


ToPrefillSide = Ask | Grant | Refuse | Adopted | Release
ToDecodeSide = Offer | Renew | Commit | Decline
PeerMessage = ToPrefillSide | ToDecodeSide


# ── events: what a driver tells the worker ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """A session with a registered peer is up: on D, one that prefills; on P, one that decodes."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Its session is over: nothing more will be heard of what was asked in it. A new session is a new PeerOpened."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    peer: PeerId
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Arriving:
    """D: bytes of this hand-over are coming in. Said at the first, and again now and then while they do."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class Verified:
    """D: everything that was expected is in its blocks and matches the checks. Nothing writes there any more."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class TransferBroken:
    """D: it will not arrive as it should (connection lost, checks differ). Writing stops only with a Fence."""

    handover: Handover
    reason: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """P: the last piece has left."""

    handover: Handover
    checks: bytes


@dataclass(frozen=True, slots=True)
class ShipFailed:
    """P: it cannot be sent."""

    handover: Handover
    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """Answer to Fence: from here on no byte of this hand-over is written or read."""

    handover: Handover


PeerEvent = PeerOpened | PeerLost | Heard | Arriving | Verified | TransferBroken | Shipped | ShipFailed | Fenced


# ── effects: what the worker orders of its driver ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this message to a peer, in order."""

    peer: PeerId
    message: PeerMessage


@dataclass(frozen=True, slots=True, eq=False)
class Expect:
    """D: be ready for a data connection that presents `token`. Comes before the Grant that carries it.

    The KV of block `first + i` of the sequence belongs in block `blocks[i]` of our pool, every layer of it.
    """

    handover: Handover
    token: bytes
    first: int
    blocks: Int32s


@dataclass(frozen=True, slots=True)
class Verify:
    """D: when everything expected is there, compare it with the checks and answer Verified or Spoilt."""

    handover: Handover
    checks: bytes


@dataclass(frozen=True, slots=True, eq=False)
class OpenShip:
    """P: a hand-over was granted. Open its data connection; answer ShipFailed if that cannot be done."""

    handover: Handover
    token: bytes
    first: int
    """Index in the sequence of the first block that will be sent."""
    blocks: Int32s
    """Our block ids, from `first` to the prompt's last block."""


@dataclass(frozen=True, slots=True)
class Ship:
    """P: send blocks [first, upto) of the sequence, every layer.

    With a step, each layer as soon as that step has computed it (the step is launched after this order); with None they
    are complete now. After the one that is `last`, answer Shipped.
    """

    handover: Handover
    step: int | None
    first: int
    upto: int
    last: bool


@dataclass(frozen=True, slots=True)
class Fence:
    """Stop reading and writing for this hand-over, now and for ever; answer Fenced, soon and always, also if unknown."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """For the log: an attempt ended badly. A refusal is a warning there, not an error."""

    handover: Handover
    fault: PdFault


@dataclass(frozen=True, slots=True)
class HandoverMade:
    """For the log and the metrics: D adopted a request; how long it took from the ask."""

    handover: Handover
    serial: Serial
    took_us: int


PeerEffect = Tell | Expect | Verify | OpenShip | Ship | Fence | AttemptFailed | HandoverMade
