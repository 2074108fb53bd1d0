"""The prefix cache's index: which block holds the KV of which prefix.

The key of a full block is a keyed 128-bit hash of its tokens and of its parent's key, so that a key stands for the whole
prefix up to and including that block. The chain starts at a root made of the model's fingerprint and the tenant's salt: two
tenants, or two models, never share a key.

    root(salt) ──▶ chain(root, t0..t15) ──▶ chain(·, t16..t31) ──▶ …

The index maps keys to blocks. `blocks` knows which rows use a block. Looking up never changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, cast

from baton.core.content_hashes import KEY_BYTES as KEY_BYTES
from baton.core.content_hashes import ContentHashes
from baton.core.engine.block_contents import BlockContents
from baton.core.engine.change_journal import PrefixJournal
from baton.core.engine.request import Tokens
from baton.core.errors import InvariantViolated

Key = NewType("Key", bytes)


class PrefixIndex:
    def __init__(self, secret: bytes | ContentHashes, fingerprint: bytes, blocks: int) -> None:
        self.hashes = secret if isinstance(secret, ContentHashes) else ContentHashes(secret)
        self.fingerprint = fingerprint
        self._block_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * blocks
        self._parent_of: list[Key | None] = [None] * blocks
        """By block; the parent's key, not its block: a parent may be evicted and return in another block."""
        self.journal: PrefixJournal | None = None
        """Set once changes are to be reported."""
        self.contents: BlockContents | None = None
        """Set if the tokens of cached blocks are kept, for KV events."""
        self._children: dict[Key, int] = {}
        """Parent key → number of indexed blocks that have this parent."""

    def __len__(self) -> int:
        return len(self._block_of)

    def keep_journal(self) -> PrefixJournal:
        """Keep changes from now on; the first report has all keys."""
        self.journal = PrefixJournal(self._block_of.keys, 2 * len(self._key_of))
        return self.journal

    def keep_contents(self) -> None:
        """Keep what is in each block from now on; the index is empty."""
        self.contents = BlockContents(self.root(b""), len(self._key_of))

    def root(self, salt: bytes) -> Key:
        return Key(self.hashes.root(len(self.fingerprint).to_bytes(4, "little") + self.fingerprint + salt))

    def chain(self, parent: Key, tokens: bytes) -> Key:
        """The key of the block that holds `tokens` (int32, little-endian) after `parent`."""
        return Key(self.hashes.block(parent, tokens))

    def chain_each(self, parents: Sequence[Key], data: bytes) -> list[Key]:
        """The key of each parent's next block; `data` has their tokens end to end, the same number for each."""
        width = len(data) // max(1, len(parents))
        begins = range(0, len(data), max(1, width))
        return [self.chain(parent, data[at : at + width]) for parent, at in zip(parents, begins, strict=True)]

    def keys_of(self, tokens: Tokens, salt: bytes, block_size: int) -> list[Key]:
        """The root, then the key of each full block of `tokens`."""
        root = self.root(salt)
        return cast("list[Key]", [root, *self.hashes.chain(root, tokens.tobytes(), block_size * tokens.itemsize)])

    def longest(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest indexed run of `keys` (without the root)."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, keys: Sequence[Key], parents: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Index blocks under keys. Returns those that were added: a key that another block already has is skipped."""
        block_of, key_of, children, journal = self._block_of, self._key_of, self._children, self.journal
        named = []
        for key, parent, block in zip(keys, parents, blocks, strict=True):
            if key in block_of:
                continue
            if key_of[block] is not None:
                raise InvariantViolated(f"block {block} is already named")
            block_of[key] = block
            key_of[block] = key
            self._parent_of[block] = parent
            children[parent] = children.get(parent, 0) + 1
            named.append(block)
            if journal is not None:
                journal.changed(key, True)
        return named

    def forget(self, block: int) -> int | None:
        """Remove a block from the index. Returns the parent's block if this was its last child."""
        key, parent = self._key_of[block], self._parent_of[block]
        if key is None or parent is None:
            raise InvariantViolated(f"block {block} has no name")
        del self._block_of[key]
        if self.journal is not None:
            self.journal.changed(key, False)
        if self.contents is not None:
            self.contents.forget(key)
        self._key_of[block] = self._parent_of[block] = None
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return None
        del self._children[parent]
        return self._block_of.get(parent)

    def key_of(self, block: int) -> Key | None:
        return self._key_of[block]

    def is_leaf(self, block: int) -> bool:
        key = self._key_of[block]
        if key is None:
            raise InvariantViolated(f"block {block} has no name")
        return key not in self._children

    def leaves(self, blocks: Sequence[int]) -> list[int]:
        """The blocks of these that are no block's parent."""
        key_of, children = self._key_of, self._children
        return [block for block in blocks if key_of[block] not in children]

    def names(self) -> dict[int, Key]:
        """Block → its key; a copy, for the laws."""
        return {block: key for block, key in enumerate(self._key_of) if key is not None}
