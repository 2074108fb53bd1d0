"""What is kept of cached blocks: a reader catches up whatever it takes, and gets a block after its parent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import BadConfig, WorkerConfig
from baton.core.engine.block_contents import BlockContents, BlockEvents
from baton.core.engine.prefix import Key, PrefixIndex

BLOCKS = 8
KEYS = [bytes([number]) for number in range(6)]
"""A chain: each is the parent of the next."""


class Listener:
    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}

    def hear(self, changes: BlockEvents, cached: set[bytes]) -> None:
        if changes.fresh:
            self.known.clear()
        here = [block.key for block in changes.stored]
        for at, block in enumerate(changes.stored):
            assert block.key not in self.known
            assert block.parent not in here[at:], "before its parent"
            self.known[block.key] = block.tokens
        assert cached >= set(here)
        for key in changes.removed:
            del self.known[key]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(0, 5), st.just("take")), max_size=80), st.integers(1, 5), st.integers(1, 4))
def test_a_reader_catches_up_however_little_it_takes(acts: list[int | str], keys_max: int, blocks: int) -> None:
    contents, listener, cached = BlockContents(b"root", blocks), Listener(), set[bytes]()
    for act in acts:
        if isinstance(act, str):
            listener.hear(contents.take(keys_max), cached)
        elif KEYS[act] in cached:
            cached.discard(KEYS[act])
            contents.forget(KEYS[act])
        else:
            cached.add(KEYS[act])
            contents.add([KEYS[act]], [KEYS[act - 1] if act else b"root"], [b"tokens" + KEYS[act]], first=act == 0)
    assert contents.keys() == cached
    while contents.has_changes:
        listener.hear(contents.take(keys_max), cached)
    assert listener.known == {key: b"tokens" + key for key in cached}


def test_the_first_report_is_a_fresh_start_even_without_blocks() -> None:
    contents = BlockContents(b"root", 4)
    assert contents.has_changes
    assert contents.take(9) == BlockEvents(True, (), ())
    assert not contents.has_changes


def test_a_parent_that_came_back_after_its_child_is_told_first() -> None:
    contents = BlockContents(b"root", 4)
    contents.take(9)
    contents.add(KEYS[:2], [b"root", KEYS[0]], [b"1", b"2"], first=True)
    contents.forget(KEYS[0])
    contents.add(KEYS[:1], [b"root"], [b"1"], first=True)
    assert [block.key for block in contents.take(9).stored] == KEYS[:2]


def test_an_index_keeps_no_contents_unless_asked_to() -> None:
    index = PrefixIndex(b"secret", b"model", BLOCKS)
    root = index.root(b"")
    index.publish([Key(index.chain(root, b"tokens"))], [root], [1])
    assert index.contents is None


def test_kv_events_need_the_prefix_cache() -> None:
    with pytest.raises(BadConfig, match="prefix cache"):
        WorkerConfig(slots=1, blocks=4, prefix_cache=False, kv_events=True)
