"""Keys: the file format of a kept secret (magic, secret, checksum), and the cluster key that a text stands for.

A damaged file is not a secret: its owner makes a new one and loses only what was cached under the old one.
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 32
_MAGIC = b"baton-key-1\n"
_CHECK_BYTES = 8


def write_key(secret: bytes) -> bytes:
    return _MAGIC + secret + _check(secret)


def key_of_text(text: str) -> bytes:
    """The cluster key that is given as a text, in an option or a file of the operator's."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=b"baton-cluster").digest()


def read_key(data: bytes) -> bytes | None:
    """The secret, or None where the file is damaged."""
    secret = data[len(_MAGIC) : len(_MAGIC) + KEY_BYTES]
    return secret if len(secret) == KEY_BYTES and data == write_key(secret) else None


def _check(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_CHECK_BYTES, person=b"baton-keyfile").digest()
