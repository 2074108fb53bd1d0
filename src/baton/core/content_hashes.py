"""Hashes of what requests contain: the only values that are decided on and depend on a secret.

Deciding code compares these hashes with each other and reads nothing off them. So a recording keeps the results in the order
in which they were computed, and a replay returns them instead of hashing: it needs neither the secret nor the real tokens.

    key = hashes.root(salt)          keys of the prefix cache
    hashes.noted(digest)             any other hash: what this returns is used
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 16


class ContentHashes:
    def __init__(self, secret: bytes) -> None:
        # The secret, hashed to a fixed length, goes in front of what is hashed. BLAKE2 is a sound keyed hash that way too:
        # its output cannot be extended. Its own keyed mode pads the key to a whole block, which would double the work.
        # Copying a hasher that has the key is faster than making one.
        key = hashlib.blake2b(secret, digest_size=32, person=b"key").digest()
        self._root_hasher = hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"root")
        self._block_hasher = hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"block")
        self.results: list[bytes] | None = None
        """Every hash in the order of the calls, once a recorder has set a list."""

    def root(self, data: bytes) -> bytes:
        hasher = self._root_hasher.copy()
        hasher.update(data)
        return self.noted(hasher.digest())

    def block(self, parent: bytes, tokens: bytes) -> bytes:
        hasher = self._block_hasher.copy()
        hasher.update(parent + tokens)
        return self.noted(hasher.digest())

    def chain(self, key: bytes, data: bytes, width: int) -> list[bytes]:
        """The hash of each whole `width` bytes of `data`, chained, `key` first. In one loop: a long prompt has thousands."""
        keys, new_hasher = [], self._block_hasher.copy
        for at in range(0, len(data) - width + 1, width):
            hasher = new_hasher()
            hasher.update(key + data[at : at + width])
            key = hasher.digest()
            keys.append(key)
        if self.results is not None:
            self.results += keys
        return keys

    def noted(self, result: bytes) -> bytes:
        """The hash to use: this one, which a recorder keeps."""
        if self.results is not None:
            self.results.append(result)
        return result


class RecordedHashes(ContentHashes):
    """Returns recorded hashes. Once they have run out, or were asked for otherwise than recorded, it hashes with a key of
    its own: the replay has gone another way and its effects will show it."""

    def __init__(self) -> None:
        super().__init__(b"replay")
        self._recorded: list[bytes] = []
        self._next = 0
        self.missing = 0
        """Hashes that were asked for and not recorded."""

    def put(self, recorded: list[bytes]) -> None:
        """The next results."""
        self._recorded = [*self._recorded[self._next :], *recorded]
        self._next = 0

    @property
    def unused(self) -> int:
        return len(self._recorded) - self._next

    def chain(self, key: bytes, data: bytes, width: int) -> list[bytes]:
        hashed = super().chain(key, data, width)
        return [self.noted(key) for key in hashed]

    def noted(self, result: bytes) -> bytes:
        if self._next >= len(self._recorded):
            self.missing += 1
            return result
        self._next += 1
        return self._recorded[self._next - 1]
