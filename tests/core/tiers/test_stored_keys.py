"""What the store is believed to have: bounded in number and in time."""

from __future__ import annotations

from baton.core.engine.prefix import Key
from baton.core.tiers.stored_keys import BELIEVED_US, KEPT_PER_ROW, StoredKeys


def key(number: int) -> Key:
    return Key(number.to_bytes(4, "big"))


def test_the_oldest_is_forgotten_when_there_are_more_than_four_for_each_row() -> None:
    stored = StoredKeys(host_rows=2)
    for number in range(2 * KEPT_PER_ROW + 1):
        stored.remember(key(number), 0)
    assert not stored.has(key(0), 0)
    assert stored.has(key(1), 0)


def test_what_is_heard_of_again_is_believed_anew() -> None:
    stored = StoredKeys(host_rows=1)
    stored.remember(key(0), 0)
    assert not stored.has(key(0), BELIEVED_US)
    stored.remember(key(0), BELIEVED_US)
    assert stored.has(key(0), BELIEVED_US)
