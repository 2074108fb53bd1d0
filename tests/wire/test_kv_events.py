"""Batches of KV events, value by value, as readers of vLLM's events expect them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from baton.core.engine.block_contents import BlockContent, BlockEvents
from baton.wire.kv_events import batch_of, block_hash, tenant_mark

SIZE = 2


def key(number: int) -> bytes:
    return bytes(15) + bytes([number])


def block(number: int, parent: int | None, tenant: bytes = b"") -> BlockContent:
    tokens = np.array([10 * number, 10 * number + 1], dtype="<i4").tobytes()
    return BlockContent(key(number), None if parent is None else key(parent), tokens, tenant)


def told(changes: BlockEvents, named: bool = False) -> Any:
    return msgspec.msgpack.decode(batch_of(changes, SIZE, 1.5, named))


CHANGES = BlockEvents(True, (block(1, None), block(2, 1), block(4, 3)), (key(8), key(9)))


def test_events_by_position() -> None:
    assert told(CHANGES) == [
        1.5,
        [
            ["AllBlocksCleared"],
            ["BlockStored", [1, 2], None, [10, 11, 20, 21], 2, None, "GPU", None, None],
            ["BlockStored", [4], 3, [40, 41], 2, None, "GPU", None, None],
            ["BlockRemoved", [8, 9], "GPU"],
        ],
        0,
    ]


def test_events_by_name() -> None:
    plain = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "type": "BlockStored"}
    assert told(CHANGES, named=True) == [
        1.5,
        [
            {"type": "AllBlocksCleared"},
            {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [10, 11, 20, 21]} | plain,
            {"block_hashes": [4], "parent_block_hash": 3, "token_ids": [40, 41]} | plain,
            {"type": "BlockRemoved", "block_hashes": [8, 9], "medium": "GPU"},
        ],
        0,
    ]


def test_the_first_block_of_a_salted_sequence_has_the_mark_of_its_tenant() -> None:
    root = bytes(range(16))
    (event,) = told(BlockEvents(False, (block(1, None, root), block(2, 1)), ()))[1]
    assert event[-1] == [[tenant_mark(root)], None]
    assert tenant_mark(root) == "0001020304050607"


def test_a_hash_is_an_unsigned_number_of_64_bits() -> None:
    assert block_hash(bytes([255]) * 16) == 2**64 - 1
    assert block_hash(bytes(8) + bytes([0, 0, 0, 0, 0, 0, 1, 2])) == 258


def test_a_batch_without_changes_has_no_events() -> None:
    assert told(BlockEvents(False, (), ())) == [1.5, [], 0]
