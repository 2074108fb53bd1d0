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
REQUEST_ID_CHARS_MAX = 1024
SALT_BYTES_MAX = 64
LISTED_MAX = 4096
"""Biases or stop tokens of one request."""
ALTERNATIVES_MAX = 1024
"""Log-probabilities that one token may come with."""

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Long = Annotated[int, Meta(ge=0, le=INT63_MAX)]
"""A serial, a counter, or microseconds."""
Incarnation = Annotated[int, Meta(ge=1, le=INT63_MAX)]
Finite = Annotated[float, Meta(ge=-FLOAT_MAX, le=FLOAT_MAX)]
MOVE_US_PER_TOKEN_MAX = 1e9
"""Keeps the cost of moving any sequence within 64 bits."""
NotNegative = Annotated[float, Meta(ge=0, le=FLOAT_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Fingerprint = Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Address = Annotated[str, Meta(max_length=ADDRESS_CHARS_MAX)]


class WireMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message, or a part of one. Fields that it does not declare are refused."""
