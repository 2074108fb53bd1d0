"""Borders of KV: hand-over frames and introductions, envelopes of stored blocks, replies of store servers, addresses."""

from __future__ import annotations

import contextlib
import random
import struct
from types import SimpleNamespace

import numpy as np

from tests.fuzz.border import Border, MakeBorder
from tests.fuzz.inputs import from_bytes, length_lie
from tests.wire.harms import mutated


def _envelope() -> Border:
    from baton.wire.envelope import HEADER_BYTES, open_any, seal, unseal

    key, layout = b"k" * 16, b"l" * 16
    sealed = bytearray(HEADER_BYTES + 64)
    seal(key, layout, memoryview(bytes(range(64))), memoryview(sealed))
    by_bytes = from_bytes([bytes(sealed), bytes(sealed[:HEADER_BYTES])])

    def draw_input(draw: random.Random) -> bytes:
        made = by_bytes(draw)
        return _true_checksum(made) if draw.random() < 0.5 else made

    def decode(data: bytes) -> object:
        view = memoryview(data)
        return open_any(view), unseal(key, layout, view)

    return Border(decode, (), draw_input)


def _true_checksum(data: bytes) -> bytes:
    """Anybody can compute it, so an envelope may be wrong in everything else."""
    from xxhash import xxh3_128

    from baton.wire.envelope import HEADER_BYTES

    at = HEADER_BYTES - 16
    state = xxh3_128(data[:at])
    state.update(data[HEADER_BYTES:])
    return data[:at] + state.digest() + data[HEADER_BYTES:]


def _transfer() -> Border:
    """What P sends to D: a hello, the introduction of its kind, frames that claim ranges of expected blocks."""
    from baton.core.handover.messages import Handover, PeerId
    from baton.kv.expected_blocks import ExpectedBlocks
    from baton.kv.transfer_frames import (
        END_FRAME,
        FRAME_BYTES,
        HELLO_BYTES,
        EndFrame,
        MalformedFrame,
        decode_frame,
        decode_hello,
        encode_hello,
        encode_pieces,
    )

    hellos = [encode_hello(kind, Handover(PeerId("d"), 3, 1), b"l" * 16, b"t" * 16) for kind in ("shm", "tcp", "mooncake")]
    frames = [encode_pieces(range(4), 2, 6), encode_pieces(range(1, 3), 2, 1), END_FRAME]
    samples = [hello + frame + END_FRAME for hello in hellos for frame in frames]
    blocks = np.arange(6, dtype=np.int32)

    def decode(data: bytes) -> object:
        padded = data.ljust(HELLO_BYTES + FRAME_BYTES, b"\0")
        expected = ExpectedBlocks(2, blocks, 4)
        claimed = []
        for at in range(HELLO_BYTES, len(padded) - FRAME_BYTES + 1, FRAME_BYTES):
            try:
                frame = decode_frame(padded[at : at + FRAME_BYTES])
            except MalformedFrame:
                continue
            if not isinstance(frame, EndFrame) and expected.claim(frame) is None:
                expected.keep(frame)
                claimed.append(expected.targets(frame))
        kind = {1: "shm", 3: "mooncake"}.get(padded[4], "tcp")
        return claimed, decode_hello(kind, padded[:HELLO_BYTES])

    return Border(decode, (MalformedFrame,), from_bytes(samples))


def _introduction() -> Border:
    """What `mooncake` and `shm` say of P's pool before the first frame. No descriptor is passed: P must not be believed."""
    from baton.kv.transfer_mooncake import _POOL as MOONCAKE
    from baton.kv.transfer_mooncake import _MooncakeReceiverKind
    from baton.kv.transfer_shm import _ShmReceiverKind, encode_introduction

    expected = 8
    layout = SimpleNamespace(block_bytes=4096)
    mooncake = object.__new__(_MooncakeReceiverKind)
    mooncake._memory = SimpleNamespace(layout=layout)  # type: ignore[assignment]
    mooncake._read_threads = SimpleNamespace()  # type: ignore[assignment]
    shm = object.__new__(_ShmReceiverKind)
    shm._memory = SimpleNamespace(layout=layout, sharing=None)  # type: ignore[assignment]
    shm._maps = {}
    ids = np.arange(expected, dtype="<i4")
    samples = [
        MOONCAKE.pack(1 << 40, 64, b"127.0.0.1:4711") + ids.tobytes(),
        encode_introduction(64, b"a handle", ids),
        encode_introduction(64, b"", ids[::-1].copy()),
    ]

    def decode(data: bytes) -> object:
        met = []
        for kind in (mooncake, shm):
            size = kind.introduction_bytes(expected)  # a connection reads just so many bytes
            said = data[:size].ljust(size, b"\0")
            fds = [] if kind is mooncake else [_null()]
            met.append(kind.open_source(said, fds, expected))
        return met

    return Border(decode, (), from_bytes(samples))


def _null() -> int:
    import os

    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class _Replies:
    """A socket on which a server has replied, in pieces, and hung up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def settimeout(self, _seconds: float) -> None: ...

    def sendall(self, _data: bytes) -> None: ...

    def recv_into(self, view: memoryview) -> int:
        part = self._data[self._at : self._at + min(len(view), 1 + self._at % 700)]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)


def _valkey() -> Border:
    from valkey.exceptions import InvalidResponse, ValkeyError

    from baton.kv.valkey_connection import ReplyParser

    samples = [
        b"*2\r\n$5\r\nhello\r\n$-1\r\n",
        b"*2\r\n$40\r\n" + b"x" * 40 + b"\r\n$3\r\nabc\r\n",
        b"+OK\r\n:12\r\n-ERR no such thing\r\n$6\r\nfoobar\r\n",
        b"*3\r\n:1\r\n*2\r\n+a\r\n$1\r\nb\r\n$-1\r\n",
        b"-OOM command not allowed\r\n",
        b"$1048577\r\n" + b"x" * 100,
        b"*65536\r\n" + b":1\r\n" * 50,
    ]
    buffers = [bytearray(32), bytearray(32)]

    def parser_of(data: bytes) -> ReplyParser:
        parser = ReplyParser()
        parser._socket = _Replies(data)  # type: ignore[assignment]
        parser.deadline_s = float("inf")
        return parser

    def decode(data: bytes) -> object:
        with contextlib.suppress(ValkeyError, InvalidResponse):
            parser_of(data).fetch((b"MGET", b"a", b"b"), [memoryview(one) for one in buffers])
        return parser_of(data).ask([(b"GET", b"a")] * 3)

    return Border(decode, (ValkeyError, InvalidResponse), from_bytes(samples))


def _mooncake_master() -> Border:
    """What the master of a Mooncake Store answers over HTTP, where its client library is not in between."""
    from baton.kv.mooncake_store import MooncakeStore
    from baton.kv.store import StoreFailed

    metrics = b'# HELP x\nmaster_total_capacity_bytes 536870912\nmaster_key_count 3\nmaster_soft{a="b"} 1.5e9\n'
    samples = [metrics, b"baton:0123/4567\nbaton:89ab/cdef\nother\n", b"master_total_capacity_bytes +Inf\n"]
    store = object.__new__(MooncakeStore)
    answers: list[bytes] = []
    store._bounded = lambda _work, _late=None: answers[0]  # type: ignore[method-assign, assignment]
    store._sizes = lambda keys: iter([(key, 1) for key in keys])  # type: ignore[method-assign]
    store._connection = SimpleNamespace(mounted_bytes=0)  # type: ignore[assignment]
    store._settings = SimpleNamespace(shown="mooncake://h")  # type: ignore[assignment]

    def decode(data: bytes) -> object:
        answers[:] = [data]
        return store.stat()

    return Border(decode, (StoreFailed,), from_bytes(samples))


def _ledger() -> Border:
    """The file in a store's folder that counts its bytes; any process that may write there can have written it."""
    import os

    from baton.kv.file_ledger import _read
    from baton.wire.keyfile import read_key, write_key

    file = os.memfd_create("ledger")
    samples = [struct.pack("<8sQQ", b"batonled", 4096, 9000), write_key(b"k" * 32)]

    def decode(data: bytes) -> object:
        os.ftruncate(file, 0)
        os.pwrite(file, data, 0)
        return _read(file), read_key(data)

    return Border(decode, (), from_bytes(samples))


def _addresses() -> Border:
    """Addresses and sizes that operators write, and those of peers, which come in messages."""
    from baton.kv.mooncake_store import _settings_of
    from baton.kv.store import BadStore, parse_size, parse_url
    from baton.node.peer_options import BadPairing, split_address

    samples = [
        b"file:/var/kv?limit=20G",
        b"file:///var/kv",
        b"valkey://user:pass%2F@host:6379/0?limit=512MiB",
        b"redis://[::1]:6379/3",
        b"mooncake://host:50051?segment=1.5G&admin=host:9003&protocol=rdma&device=mlx5_0",
        b"127.0.0.1:8100",
        b"[::1]:8100",
        b"20.5GiB",
        b"9" * 400,
    ]

    def draw_input(draw: random.Random) -> bytes:
        sample = draw.choice(samples)
        return length_lie(sample, draw) if draw.random() < 0.1 else mutated(sample, draw.choice(samples), draw)

    def decode(data: bytes) -> object:
        text = data.decode("utf-8", "replace") if data[-1:] < b"\x80" else data.decode("latin-1")
        for ask in (lambda: parse_size(text), lambda: split_address("--peer", text)):
            with contextlib.suppress(BadStore, BadPairing):
                ask()
        url = parse_url(text)
        return str(url), _settings_of(url, None) if url.kind == "mooncake" else None

    return Border(decode, (BadStore, BadPairing), draw_input)


BORDERS: dict[str, MakeBorder] = {
    "kv-envelope": _envelope,
    "kv-transfer": _transfer,
    "kv-introduction": _introduction,
    "kv-valkey": _valkey,
    "kv-mooncake-master": _mooncake_master,
    "kv-ledger": _ledger,
    "kv-addresses": _addresses,
}
