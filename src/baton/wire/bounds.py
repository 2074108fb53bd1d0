"""Sizes and shapes that everything said between instances, and between them and a router, keeps to."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

INT32_MAX = 2**31 - 1
INT63_MAX = 2**63 - 1
REASON_CHARS_MAX = 512
NAME_CHARS_MAX = 128
ADDRESS_CHARS_MAX = 512
DIGEST_BYTES_MAX = 64
REQUEST_ID_CHARS_MAX = 1024
SALT_BYTES_MAX = 64

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Long = Annotated[int, Meta(ge=0, le=INT63_MAX)]
"""A serial, or microseconds."""
Incarnation = Annotated[int, Meta(ge=1, le=INT63_MAX)]
Fingerprint = Annotated[bytes, Meta(max_length=DIGEST_BYTES_MAX)]
Reason = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Address = Annotated[str, Meta(max_length=ADDRESS_CHARS_MAX)]


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, or a part of one; what it does not know it does not take."""
