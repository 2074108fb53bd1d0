"""The digest by which two versions of a backend compare masks. Imports no arrays, so that processes start quickly."""

from __future__ import annotations

from hashlib import blake2b

from baton.core.bounds import MASK_DIGEST_BYTES


def mask_digest(mask: bytes) -> bytes:
    """Of the tokens that a mask allows (bit `token % 8` of byte `token // 8`), however many bytes it has."""
    return blake2b(mask.rstrip(b"\0"), digest_size=MASK_DIGEST_BYTES).digest()
