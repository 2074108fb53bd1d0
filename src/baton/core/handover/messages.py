"""Messages between an instance that prefills and one that decodes, and the events and effects of their drivers.

Values only; `prefill_side` and `decode_side` decide. The decode side (D) has a request of a client and asks the prefill side
(P) to prefill it:

    D                                   P
      Ask      ───────────────────────▶   bounded queue; takes its own blocks when the turn comes
               ◀───────────────────────   Offer: ready to compute
      Grant    ───────────────────────▶   slot and blocks at D are leased from now on   (or Refuse: P drops it at once)
               ◀══════ KV, layer by layer, chunk by chunk, over a data connection opened with the grant's token ══════
               ◀───────────────────────   Renew, while it takes long
               ◀───────────────────────   Commit: first token, counts, checksums
      Adopted  ───────────────────────▶   P frees its blocks; the request decodes at D

    Release (D → P) and Decline (P → D) end an attempt at any time; both may come twice or too late and are then ignored.

Every message has (request, attempt): the decode side's serial of the request, and the number of the ask.
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
"""This instance's name for another one, chosen by the driver; unique among its peers."""


class Handover(NamedTuple):
    """One attempt to hand one request over, as either side identifies it."""

    peer: PeerId
    """The other side."""
    request: int
    """The decode side's serial."""
    attempt: int
    """Counted from 1."""


# ── messages between the two sides ───────────────────────────────────────────────────────────────────────────────────────


class Ask(WireMessage, tag="ask", frozen=True, eq=False):
    """D → P: prefill this. The submission is a leader: its choice 0, or a request without siblings."""

    request: Long
    attempt: Positive
    submission: Submission


class Offer(WireMessage, tag="offer", frozen=True):
    """P → D: my blocks are held and I can compute now; grant me room."""

    request: Long
    attempt: Positive
    prompt_tokens: Count
    """All tokens that P computes, including outputs generated after the prompt."""
    queued_tokens: Long = 0
    """Tokens of all prompts that P was asked for and has not prefilled; D uses it to choose the next peer."""


class Grant(WireMessage, tag="grant", frozen=True):
    """D → P: slot and blocks are leased to you. A repeated offer gets the same grant."""

    request: Long
    attempt: Positive
    cached_tokens: Count
    """Leading positions that D has cached, in whole blocks; P sends only what follows."""
    lease_us: Long
    """Time for which D waits without a message about it."""
    token: Annotated[bytes, Meta(min_length=1, max_length=TOKEN_BYTES_MAX)]
    """Opens one data connection, once."""


class Refuse(WireMessage, tag="refuse", frozen=True):
    request: Long
    attempt: Positive
    reason: Reason


class Renew(WireMessage, tag="renew", frozen=True):
    """P → D: the prefill is in progress."""

    request: Long
    attempt: Positive


class Commit(WireMessage, tag="commit", frozen=True, eq=False):
    """P → D: all KV was sent. D verifies all of this before the request joins its batch."""

    request: Long
    attempt: Positive
    token: Count
    """The first output token."""
    logprobs: Logprobs | None
    """Of that token, one line; `row` is not used here."""
    cached_tokens: Count
    """Tokens at the start that P did not compute, because its cache or another tier had them."""
    queue_us: Long
    prefill_us: Long
    prompt_digest: Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
    """Of the prompt and its outputs so far, the salt and the model's fingerprint; see `protocol.prompt_digest`."""
    checks: Annotated[bytes, Meta(max_length=CHECKS_BYTES_MAX)]
    """One checksum per block that was sent, in order; opaque here, verified by the driver against the received bytes."""
    queued_tokens: Long = 0
    """As in an Offer, without this one."""
    restored_tokens: Count = 0
    """Those of the cached tokens that came from host memory or the store."""


class Adopted(WireMessage, tag="adopted", frozen=True):
    """D → P: it decodes here now; free your blocks."""

    request: Long
    attempt: Positive


class Release(WireMessage, tag="release", frozen=True):
    """D → P: it is not wanted any more (client gone, lease over, KV corrupt); free your blocks."""

    request: Long
    attempt: Positive
    reason: Reason


class Decline(WireMessage, tag="decline", frozen=True):
    """P → D: I cannot prefill it, or not any more; my blocks are free."""

    request: Long
    attempt: Positive
    code: PdCode
    reason: Reason


ToPrefillSide = Ask | Grant | Refuse | Adopted | Release
ToDecodeSide = Offer | Renew | Commit | Decline
PeerMessage = ToPrefillSide | ToDecodeSide


# ── events from the driver ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """A session with a registered peer is up: on D, one that prefills; on P, one that decodes."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The session has ended: no message of it will come any more. A new session is a new PeerOpened."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    peer: PeerId
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class Arriving:
    """D: bytes of this hand-over are arriving. Reported with the first bytes, and repeatedly while they arrive."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class Verified:
    """D: all expected bytes are in their blocks and match the checks. Nothing writes to the blocks any more."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class TransferBroken:
    """D: the transfer failed (connection lost, checks differ). Only a Fence stops further writes."""

    handover: Handover
    reason: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """P: the last piece was sent."""

    handover: Handover
    checks: bytes


@dataclass(frozen=True, slots=True)
class ShipFailed:
    """P: the KV cannot be sent."""

    handover: Handover
    reason: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """Answer to Fence: no byte of this hand-over is read or written from now on."""

    handover: Handover


PeerEvent = PeerOpened | PeerLost | Heard | Arriving | Verified | TransferBroken | Shipped | ShipFailed | Fenced


# ── effects for the driver ───────────────────────────────────────────────────────────────────────────────────────────────


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
    """D: when all expected bytes have arrived, compare them with the checks and answer Verified or TransferBroken."""

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
    """Stop reading and writing for this hand-over for good; answer Fenced, soon and always, even if it is unknown."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """For the log: an attempt failed. A refusal is logged as a warning, not an error."""

    handover: Handover
    fault: PdFault


@dataclass(frozen=True, slots=True)
class HandoverMade:
    """For the log and the metrics: D adopted a request, `took_us` after the ask."""

    handover: Handover
    serial: Serial
    took_us: int


PeerEffect = Tell | Expect | Verify | OpenShip | Ship | Fence | AttemptFailed | HandoverMade
