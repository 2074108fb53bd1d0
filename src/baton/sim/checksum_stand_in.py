"""Stands in for the package `xxhash` where it is not installed: same width, another function.

For worlds alone, which read only the envelopes that they have written themselves; no world sees the difference. Real stores
are out of its reach: `kv` imports a function of xxhash that is not here.
"""

from __future__ import annotations

import hashlib
import sys
from types import ModuleType

CHECK_BYTES = 16


class _Hasher:
    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._state = hashlib.blake2b(data, digest_size=CHECK_BYTES)

    def update(self, data: bytes | memoryview) -> None:
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest()


def _digest(data: bytes | memoryview) -> bytes:
    return _Hasher(data).digest()


def install() -> None:
    """Make `from xxhash import xxh3_128, xxh3_128_digest` work in this process."""
    module = ModuleType("xxhash", __doc__)
    vars(module).update(xxh3_128=_Hasher, xxh3_128_digest=_digest)
    sys.modules["xxhash"] = module
