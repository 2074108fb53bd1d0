"""Bounds of the values that cross a process, as types: checked where bytes are decoded, and nowhere else."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

INT32_MAX = 2**31 - 1
INT63_MAX = 2**63 - 1
FLOAT_MAX = 1.7976931348623157e308
"""The largest finite float: a bound that infinity and NaN do not meet."""
REASON_CHARS_MAX = 512
NAME_CHARS_MAX = 128
ADDRESS_CHARS_MAX = 512
DIGEST_BYTES_MAX = 64
MASK_DIGEST_BYTES = 16
REQUEST_ID_CHARS_MAX = 1024
SALT_BYTES_MAX = 64
LISTED_MAX = 4096
"""Biases or stop tokens of one request."""
CONSTRAINT_CHARS_MAX = 512 << 10
"""Characters of the grammar that one answer must match."""
BAD_WORD_TOKENS_MAX = 64
"""Tokens of one sequence that must not be completed."""
ALLOWED_TOKENS_MAX = 1 << 18
"""Ids that one request may list as the only ones to draw from: a whole vocabulary."""
ALTERNATIVES_MAX = 1024
"""Log-probabilities that one token may come with."""
PROMPT_ALTERNATIVES_MAX = 20
"""The same for a token of a prompt: a step reports those of all prompt tokens that it feeds, in one message."""

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Long = Annotated[int, Meta(ge=0, le=INT63_MAX)]
"""A serial, a counter, or microseconds."""
INCARNATION_MAX = 2**62
"""A clock in nanoseconds reaches it in the year 2116. No process may claim a number above it, so that there is one that
cannot be outdone, and that one is forgotten by a router some time after it was last heard."""
Incarnation = Annotated[int, Meta(ge=1, le=INCARNATION_MAX)]
Finite = Annotated[float, Meta(ge=-FLOAT_MAX, le=FLOAT_MAX)]
MOVE_US_PER_TOKEN_MAX = 1e9
"""Keeps the cost of moving any sequence within 64 bits."""
NotNegative = Annotated[float, Meta(ge=0, le=FLOAT_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Fingerprint = Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Address = Annotated[str, Meta(max_length=ADDRESS_CHARS_MAX)]


class WireMessage(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A message, or a part of one. Fields that it does not declare are refused."""
