"""A reader of KV events as others write them: with its own definitions of the messages, for both forms."""

from __future__ import annotations

import msgspec
import zmq

DEADLINE_S = 20


class ArrayBlockStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class ArrayBlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class ArrayAllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayBlockStored | ArrayBlockRemoved | ArrayAllBlocksCleared]
    data_parallel_rank: int | None = None


class MapBlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class MapBlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class MapAllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[MapBlockStored | MapBlockRemoved | MapAllBlocksCleared]
    data_parallel_rank: int | None = None


class KvReader:
    """Knows which blocks there are, if it has had all batches from the first one on."""

    def __init__(self, by_name: bool = False, strict: bool = True) -> None:
        """`strict`: it has all batches from the first one on."""
        self._strict = strict
        self._batch = MapBatch if by_name else ArrayBatch
        self.blocks: dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]] = {}
        """Hash → the hash of the block before it, and its tokens."""
        self.marks: dict[int | bytes, list[str]] = {}
        """Extra keys of blocks that have some."""
        self.orphans: list[int | bytes] = []
        """Blocks whose parent was not known when they came."""
        self.seen = {"stored": 0, "removed": 0, "cleared": 0}

    def read(self, batch: bytes) -> None:
        for event in msgspec.msgpack.decode(batch, type=self._batch).events:
            match event:
                case ArrayBlockStored() | MapBlockStored():
                    self._store(event)
                case ArrayBlockRemoved() | MapBlockRemoved():
                    assert event.medium == "GPU"
                    self.seen["removed"] += len(event.block_hashes)
                    for block in event.block_hashes:
                        assert block in self.blocks or not self._strict, "it never heard of what is gone"
                        self.blocks.pop(block, None)
                        self.marks.pop(block, None)
                case _:
                    self.seen["cleared"] += 1
                    self.blocks.clear()
                    self.marks.clear()

    def _store(self, event: ArrayBlockStored | MapBlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert event.medium == "GPU"
        assert len(event.token_ids) == size * len(event.block_hashes)
        if parent is not None and parent not in self.blocks:
            self.orphans.append(event.block_hashes[0])
        for at, block in enumerate(event.block_hashes):
            assert block not in self.blocks, "told twice"
            self.blocks[block] = (parent, tuple(event.token_ids[at * size : (at + 1) * size]))
            if event.extra_keys is not None and (mark := event.extra_keys[at]):
                self.marks[block] = mark
            parent = block
        self.seen["stored"] += len(event.block_hashes)

    def sequences(self) -> set[tuple[int, ...]]:
        """The tokens from the first on, up to the end of each block that can be reached."""
        found: dict[int | bytes | None, tuple[int, ...]] = {None: ()}
        for block in self.blocks:
            self._tokens_to(block, found)
        return set(found.values()) - {()}

    def _tokens_to(self, block: int | bytes, found: dict[int | bytes | None, tuple[int, ...]]) -> None:
        above = []
        at: int | bytes | None = block
        while at is not None and at not in found and at in self.blocks:
            above.append(at)
            at = self.blocks[at][0]
        for one in reversed(above):
            parent, tokens = self.blocks[one]
            if parent in found:
                found[one] = found[parent] + tokens


class Subscriber:
    """A subscription over a real socket, that asks for what it missed."""

    def __init__(
        self,
        endpoint: str,
        replay: str,
        topic: str = "",
        by_name: bool = False,
        buffers_little: bool = False,
        strict: bool = True,
    ) -> None:
        self.reader = KvReader(by_name, strict)
        self.next_number = 0
        self.gaps = 0
        """How often a batch had a later number than the next one."""
        self._replay_endpoint = replay
        self._context = zmq.Context()
        self._events: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        if buffers_little:
            self._events.setsockopt(zmq.RCVHWM, 1)
            self._events.setsockopt(zmq.RCVBUF, 1 << 16)
        self._events.subscribe(topic)
        self._events.connect(endpoint)
        self.topic = topic.encode()

    def catch_up(self) -> None:
        """Read all that was published from the next number on and is still kept."""
        with self._context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self._replay_endpoint)
            asking.send_multipart((b"", self.next_number.to_bytes(8, "big")))
            while True:
                empty, number, batch = asking.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert batch == b""
                    return
                assert int.from_bytes(number, "big") >= self.next_number
                self._read(number, batch)

    def hear(self) -> None:
        """Read the next batch that comes; before it, what lies between."""
        topic, number, batch = self._events.recv_multipart()
        assert topic == self.topic
        if int.from_bytes(number, "big") > self.next_number:
            self.gaps += 1
            self.catch_up()
        if int.from_bytes(number, "big") == self.next_number:  # else it came in between
            self._read(number, batch)

    def hears_within(self, seconds: float) -> bool:
        return bool(self._events.poll(round(seconds * 1000)))

    def _read(self, number: bytes, batch: bytes) -> None:
        self.reader.read(batch)
        self.next_number = int.from_bytes(number, "big") + 1

    def close(self) -> None:
        self._context.destroy(0)
