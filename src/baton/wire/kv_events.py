"""KV events as bytes, in the form of vLLM's publisher, which routers other than ours read.

    batch   = msgpack of [time in seconds, [event, …], data-parallel rank]
    event   = an array that begins with the kind (vLLM until June 2026), or a map with the kind under "type" (since)
    frames  = topic, sequence number (8 bytes, big-endian), batch

A block's hash here is an unsigned integer, the low 64 bits of its key. Tokens come with it, since readers hash those their
own way. Blocks that follow each other in a sequence are one BlockStored.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.core.engine.block_contents import BlockContent, BlockEvents

MEDIUM = "GPU"
"""What readers know as the first tier: the pool that requests run in, on whatever device."""
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Instead of a sequence number, with an empty batch, after the last batch of a replay."""
_HASH_BYTES = 8
_TENANT_BYTES = 8


class _Stored(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class _Removed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = MEDIUM


class _Cleared(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="AllBlocksCleared"):
    pass


_Event = _Stored | _Removed | _Cleared


def batch_of(changes: BlockEvents, block_size: int, now_s: float, named: bool) -> bytes:
    """The batch that tells these changes; `named`: events as maps."""
    events: list[_Event] = [_Cleared()] if changes.fresh else []
    events += [_stored(run, block_size) for run in _runs(changes.stored)]
    if changes.removed:
        events.append(_Removed([block_hash(key) for key in changes.removed]))
    if named:
        return msgspec.msgpack.encode((now_s, [_by_name(event) for event in events], 0))
    return msgspec.msgpack.encode((now_s, events, 0))


def block_hash(key: bytes) -> int:
    """What stands for a key: 64 bits, since readers keep hashes as such numbers."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def tenant_mark(root: bytes) -> str:
    """What stands for a salt in `extra_keys`. It cannot be computed without the secret of the prefix cache."""
    return root[:_TENANT_BYTES].hex()


def _runs(stored: Sequence[BlockContent]) -> list[list[BlockContent]]:
    """Blocks that follow each other in a sequence, together."""
    runs: list[list[BlockContent]] = []
    for block in stored:
        if runs and block.parent == runs[-1][-1].key:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _stored(run: list[BlockContent], block_size: int) -> _Stored:
    first = run[0]
    tokens: list[int] = np.frombuffer(b"".join(block.tokens for block in run), dtype="<i4").tolist()
    marks: list[tuple[str, ...] | None] | None = None
    if first.tenant:
        marks = [(tenant_mark(first.tenant),), *[None] * (len(run) - 1)]
    return _Stored(
        block_hashes=[block_hash(block.key) for block in run],
        parent_block_hash=None if first.parent is None else block_hash(first.parent),
        token_ids=tokens,
        block_size=block_size,
        extra_keys=marks,
    )


def _by_name(event: _Event) -> dict[str, object]:
    """Without `extra_keys` where there are none: fields with a default may be missing."""
    fields = msgspec.structs.asdict(event)
    if fields.get("extra_keys", ...) is None:
        del fields["extra_keys"]
    return {"type": str(event.__struct_config__.tag), **fields}
