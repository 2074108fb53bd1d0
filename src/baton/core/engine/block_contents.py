"""What the blocks of the prefix cache hold, and which of them came and went: for routers other than ours.

Our own router is told keys, since it computes them from the same secret (`change_journal`). Others know neither the secret
nor the hash; they are told the tokens of each block. So the tokens are kept beside the index, for as long as the block is in
it, if `WorkerConfig.kv_events` asks for that.

As in the journal that this is built on, what is kept is the difference between what was reported and what is cached now: a
slow reader gets fewer, larger reports and never a wrong one, and beyond a few times the pool everything is reported anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from baton.core.engine.change_journal import PrefixJournal


class BlockContent(Struct, frozen=True, gc=False):
    """One block of the prefix cache."""

    key: bytes
    parent: bytes | None
    """Key of the block before it; None for the first block of a sequence."""
    tokens: bytes
    """Token ids, as int32 in little-endian order."""
    tenant: bytes
    """Of the first block of a salted sequence: the root of its keys, which is the same for all sequences with that salt."""


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Changes in which blocks are cached; apply in this order."""

    fresh: bool
    """All blocks reported before are void."""
    stored: tuple[BlockContent, ...]
    """A block comes after its parent if both are here."""
    removed: tuple[bytes, ...]


class BlockContents:
    def __init__(self, unsalted: bytes, blocks: int) -> None:
        """`unsalted`: the root of sequences without a salt. `blocks`: size of the pool."""
        self._unsalted = unsalted
        self._contents: dict[bytes, BlockContent] = {}
        self._journal = PrefixJournal(self._all_keys, 2 * blocks)

    @property
    def has_changes(self) -> bool:
        return self._journal.has_changes

    def keys(self) -> set[bytes]:
        """A copy, for the laws."""
        return set(self._contents)

    def add(self, keys: Sequence[bytes], parents: Sequence[bytes], tokens: Sequence[bytes], first: bool) -> None:
        """Blocks that were published; `first`: the first of them begins a sequence. Keys that are known are skipped."""
        root = parents[0] if first else None
        for key, parent, held in zip(keys, parents, tokens, strict=True):
            if key in self._contents:
                continue
            if parent == root:
                content = BlockContent(key, None, held, b"" if root == self._unsalted else parent)
            else:
                content = BlockContent(key, parent, held, b"")
            self._contents[key] = content
            self._journal.changed(key, True)

    def forget(self, key: bytes) -> None:
        del self._contents[key]
        self._journal.changed(key, False)

    def restart(self) -> None:
        """Report everything anew."""
        self._journal.restart()

    def take(self, keys_max: int) -> BlockEvents:
        """Changes since the last call, at most `keys_max` blocks; the first call begins with a fresh start."""
        changed = self._journal.take(keys_max)
        stored = tuple(self._contents[key] for key in self._parents_first(changed.named))
        return BlockEvents(changed.fresh, stored, changed.forgotten)

    def _all_keys(self) -> Iterable[bytes]:
        return self._parents_first(self._contents)

    def _parents_first(self, keys: Iterable[bytes]) -> list[bytes]:
        """These keys, each after its parent. A parent that was evicted and came back was added after its children."""
        wanted = dict.fromkeys(keys)
        ordered: dict[bytes, None] = {}
        for key in wanted:
            above: list[bytes] = []
            at: bytes | None = key
            while at is not None and at in wanted and at not in ordered:
                above.append(at)
                at = self._contents[at].parent
            ordered.update(dict.fromkeys(reversed(above)))
        return list(ordered)
