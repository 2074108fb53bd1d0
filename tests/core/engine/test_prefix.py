"""What the name of a block depends on."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.engine.prefix import KEY_BYTES, PrefixIndex
from baton.core.engine.request import frozen_tokens

TOKENS = frozen_tokens(range(50))


def index(secret: bytes = b"secret", fingerprint: bytes = b"model") -> PrefixIndex:
    return PrefixIndex(secret, fingerprint, blocks=8)


def test_the_names_of_a_prompt_are_the_chain_of_its_full_blocks() -> None:
    prefix = index()
    chain = [prefix.root(b"tenant")]
    for begin in range(0, 48, 16):
        chain.append(prefix.chain(chain[-1], TOKENS[begin : begin + 16].tobytes()))
    assert prefix.keys_of(TOKENS, b"tenant", 16) == chain
    assert prefix.chain_each(chain[:3], TOKENS[:48].tobytes()) == chain[1:]
    assert all(len(key) == KEY_BYTES for key in chain)


def test_a_name_stands_for_the_whole_prefix() -> None:
    prefix = index()
    changed = np.array(TOKENS)
    changed[0] += 1
    pairs = zip(prefix.keys_of(TOKENS, b"", 16), prefix.keys_of(frozen_tokens(changed), b"", 16), strict=True)
    assert [one == other for one, other in pairs] == [True, False, False, False]


@pytest.mark.parametrize("other", [index(secret=b"Secret"), index(secret=b"secret" * 20), index(fingerprint=b"other")])
def test_another_secret_or_model_gives_other_names(other: PrefixIndex) -> None:
    names = index().keys_of(TOKENS, b"", 16)
    assert not set(names) & set(other.keys_of(TOKENS, b"", 16))


def test_another_salt_gives_other_names() -> None:
    assert not set(index().keys_of(TOKENS, b"a", 16)) & set(index().keys_of(TOKENS, b"b", 16))
