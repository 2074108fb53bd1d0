"""What a recording shows instead of what clients wrote: token ids, salts, tenants, prompts as sent.

A mask is drawn for each recording. Token ids become others by a permutation, so that equal prefixes stay equal and a stop
token still stops; byte strings (keys of the prefix cache, salts, secrets, request bodies) become hashes of the same length;
names of tenants become numbers, and the grammar that an answer must match a hash, because deciding code never reads it. This
is no encryption: who knows what some of the text was can learn what other tokens are, and lengths, times and settings are
as they were.

Byte strings are masked wherever they are. Integers are masked where the tables below say that a field holds token ids.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.core.config import HandoverConfig
from baton.core.content_hashes import KEY_BYTES
from baton.core.engine.block_contents import BlockContent
from baton.core.engine.plan import Logprobs, Start, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.records import Request, Settled
from baton.core.engine.request import Constraint, PromptLogprobs, Sampling, Submission
from baton.core.engine.slots import Slots
from baton.core.handover.messages import Commit
from baton.core.handover.prefill_handovers import PrefillHandover
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    DeliverTokens,
    HeldChoice,
    Join,
    RequestArrived,
    TokensCame,
    UnclaimedFound,
    WantMask,
)
from baton.core.routing.rate_limits import RateLimits
from baton.core.routing.routed_request import RoutedChoice, RoutedRequest
from baton.wire.engine_messages import StepOutput
from baton.wire.router_messages import HeartbeatMessage, HeldChoiceMessage

TOKEN_IDS = 1 << 30
"""Ids of the vocabulary become others below this; a vocabulary is said to be larger by it, and so are ids outside of it."""
_HALF_BITS = 15
_HALF = (1 << _HALF_BITS) - 1
_ROUNDS = 4


class Mark(Enum):
    """What a field holds."""

    TOKENS = "token ids"
    TOKEN_BYTES = "token ids as bytes"  # noqa: S105  no password
    KEYS = "keys of the prefix cache, one after the other"
    NUMBERS = "numbers as bytes, or a fingerprint: shown as they are"
    TEXT = "text that a client wrote"
    TENANT = "the name of a tenant"
    VOCABULARY = "the number of token ids"


MARKS: dict[type, dict[str, Mark]] = {
    Submission: {"prompt": Mark.TOKENS, "generated": Mark.TOKENS},
    Sampling: {
        "stop_token_ids": Mark.TOKENS,
        "logit_bias": Mark.TOKENS,
        "allowed_token_ids": Mark.TOKENS,
        "bad_words": Mark.TOKENS,
    },
    Constraint: {"source": Mark.TEXT},
    Start: {"tokens": Mark.TOKENS},
    BlockContent: {"tokens": Mark.TOKEN_BYTES},
    StepResult: {"tokens": Mark.TOKENS},
    Logprobs: {"top_ids": Mark.TOKENS},
    PromptLogprobs: {"top_ids": Mark.TOKENS},
    Settled: {"tokens": Mark.TOKENS},
    Request: {"outputs": Mark.TOKENS},
    Slots: {"stop_ids": Mark.TOKENS, "_outputs": Mark.TOKENS},
    Commit: {"token": Mark.TOKENS},
    PrefillHandover: {"token": Mark.TOKENS},
    TokensCame: {"tokens": Mark.TOKENS, "extras": Mark.TOKENS},
    DeliverTokens: {"tokens": Mark.TOKENS, "extras": Mark.TOKENS},
    HeldChoice: {"tokens": Mark.TOKENS, "extras": Mark.TOKENS},
    UnclaimedFound: {"delivered": Mark.TOKENS, "extras": Mark.TOKENS},
    RoutedChoice: {"delivered": Mark.TOKENS},
    WantMask: {"outputs": Mark.TOKENS},
    StepOutput: {"serials": Mark.NUMBERS, "counts": Mark.NUMBERS, "tokens": Mark.TOKEN_BYTES},
    HeldChoiceMessage: {"counts": Mark.NUMBERS, "tokens": Mark.TOKEN_BYTES},
    HeartbeatMessage: {"named": Mark.KEYS, "forgotten": Mark.KEYS},
    RequestArrived: {"tenant": Mark.TENANT},
    RoutedRequest: {"tenant": Mark.TENANT},
    RateLimits: {"_tenants": Mark.TENANT},
    PrefixIndex: {"fingerprint": Mark.NUMBERS},
    RouterConfig: {"model_mark": Mark.NUMBERS},
    Join: {"fingerprint": Mark.NUMBERS, "vocabulary": Mark.VOCABULARY},
    HandoverConfig: {"vocabulary": Mark.VOCABULARY},
}
ARGUMENT_MARKS: dict[str, tuple[Mark | None, ...]] = {"submit": (Mark.TENANT,)}
"""By method: what its arguments are."""


class RecordingMask:
    def __init__(self, key: bytes) -> None:
        """`key`: drawn for one recording, and forgotten."""
        self._key = hashlib.blake2b(key, digest_size=32).digest()
        self._short: dict[bytes, bytes] = {}
        """What stands for each string shorter than a key."""
        self._vocabulary = 0
        """The largest that a recorded value has told; 0: none has, and every number may be an id."""
        self._rounds = [self._round(number) for number in range(_ROUNDS)]

    def _round(self, number: int) -> npt.NDArray[np.int64]:
        drawn = hashlib.shake_128(self._key + bytes([number])).digest(2 << _HALF_BITS)
        return np.frombuffer(drawn, dtype="<u2").astype(np.int64) & _HALF

    def tokens(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A permutation of [0, TOKEN_IDS): a Feistel network of random tables. What is no id stays none."""
        wide = ids.astype(np.int64)
        left, right = (wide >> _HALF_BITS) & _HALF, wide & _HALF
        for table in self._rounds:
            left, right = right, left ^ table[right]
        mixed = (left << _HALF_BITS) | right
        ids_end = self._vocabulary or TOKEN_IDS
        masked = np.where((wide >= 0) & (wide < ids_end), mixed, wide)
        masked[(wide >= ids_end) & (wide < TOKEN_IDS)] += TOKEN_IDS
        return masked.astype(ids.dtype)

    def opaque(self, data: bytes) -> bytes:
        """Another string, as long, the same for the same, and different for different ones."""
        if len(data) >= KEY_BYTES or not data:
            return hashlib.shake_128(self._key + data).digest(len(data))
        found = self._short.get(data)
        if found is None:
            found = self._short[data] = self._draw_short(data)
        return found

    def _draw_short(self, data: bytes) -> bytes:
        """Short hashes may be equal: then another is drawn, as long as there may be any."""
        used = set(self._short.values())
        drawn = (hashlib.shake_128(self._key + data + bytes([KEY_BYTES, nth])).digest(len(data)) for nth in range(256))
        return next((one for one in drawn if one not in used), data)

    # ── snapshot.Masking ────────────────────────────────────────────────────────────────────────────────────────────

    def mark_of(self, owner: type, field: str, _mark: object) -> object:
        marks = MARKS.get(owner)
        return None if marks is None else marks.get(field)

    def scalar(self, value: Any, mark: object) -> Any:
        if type(value) is bytes:
            return self._bytes(value, mark)
        if mark is Mark.TOKENS and type(value) is int:
            return int(self.tokens(np.array([value], dtype=np.int64))[0])
        if mark is Mark.TEXT and type(value) is str:
            return hashlib.blake2b(self._key + value.encode(), digest_size=KEY_BYTES).hexdigest()
        if mark is Mark.TENANT and type(value) is str and value:
            return f"tenant-{self.opaque(value.encode())[:6].hex()}"
        if mark is Mark.VOCABULARY and 0 < value < TOKEN_IDS:
            self._vocabulary = max(self._vocabulary, value)
            return TOKEN_IDS + value  # so that all masked ids are in it
        return value

    def _bytes(self, value: bytes, mark: object) -> bytes:
        if mark is Mark.NUMBERS:
            return value
        if mark is Mark.TOKEN_BYTES and len(value) % 4 == 0:
            return self.tokens(np.frombuffer(value, dtype="<i4")).tobytes()
        if mark is Mark.KEYS:
            keys = (value[at : at + KEY_BYTES] for at in range(0, len(value), KEY_BYTES))
            return b"".join(map(self.opaque, keys))
        return self.opaque(value)

    def array(self, value: npt.NDArray[Any], mark: object) -> npt.NDArray[Any]:
        return self.tokens(value) if mark is Mark.TOKENS else value
