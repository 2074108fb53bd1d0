"""Inputs that once raised what their decoder does not declare, or took memory that nobody bounds."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import msgspec
import pytest
import typer

from baton.cli.serve import serve
from baton.cli.toml_options import read_options
from baton.core.content_hashes import RecordedHashes
from baton.kv.mooncake_client import MooncakeConnection
from baton.kv.mooncake_store import MooncakeStore
from baton.kv.store import BadStore, StoreFailed, parse_size, parse_url
from baton.wire.recording_file import MAGIC, BadRecording, Recording
from baton.wire.snapshot import FORMAT, BadSnapshot, Kind, decode_value, restore

NESTED = b"\x91" * 5000 + b"\xc0"


def _frame(kind: int, body: bytes) -> bytes:
    data = zlib.compress(body)
    return struct.pack("<BII", kind, len(data), zlib.crc32(data)) + data


def test_a_recording_that_is_nested_without_end_is_damaged() -> None:
    with pytest.raises(BadRecording, match="damaged"):
        Recording(MAGIC + _frame(1, NESTED))


@pytest.mark.parametrize(
    "data",
    [
        b"\x94\x01\x90\xc0" + NESTED,
        msgspec.msgpack.encode((FORMAT, [], None, 0.5)),
        msgspec.msgpack.encode((FORMAT, [(5, "Request", ())], None, [])),
        msgspec.msgpack.encode((FORMAT, [("baton.core.errors", "Refusal", 7)], None, [])),
        msgspec.msgpack.encode((FORMAT, [], None, [(Kind.BYTE_ARRAY, 1 << 40)])),
        msgspec.msgpack.encode((FORMAT, [], None, [(Kind.DEQUE, 2**63)])),
        msgspec.msgpack.encode((FORMAT, [], None, [(Kind.ARRAY, "<i4", [2**63], b"", True)])),
        msgspec.msgpack.encode((FORMAT, [], [Kind.NUMPY_SCALAR, ",i8", b"x" * 8], [])),
        msgspec.msgpack.encode((FORMAT, [], None, [(Kind.ARRAY, "|O8", [1], b"x" * 8, True)])),
    ],
)
def test_what_is_no_snapshot_is_a_bad_snapshot_and_takes_no_memory(data: bytes) -> None:
    with pytest.raises(BadSnapshot):
        restore(data, RecordedHashes())
    with pytest.raises(BadSnapshot):
        decode_value(data)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000 + "G", "1." + "9" * 400])
def test_a_size_with_hundreds_of_digits_is_none(text: str) -> None:
    with pytest.raises(BadStore, match="not a size"):
        parse_size(text)
    with pytest.raises(BadStore, match="not a size"):
        parse_url(f"file:/kv?limit={text}")


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400, "[" * 3000, "9223372036854775808"])
def test_options_in_a_file_that_no_option_can_have_are_refused_by_name(tmp_path: Path, value: str) -> None:
    file = tmp_path / "options.toml"
    file.write_text(f"max-num-seqs = {value}\n")
    with pytest.raises(typer.BadParameter, match=r"options\.toml"):
        read_options(file, serve, "config")


@pytest.mark.parametrize("capacity", ["+Inf", "nan", "many", ""])
def test_a_master_that_tells_no_number_is_trouble_of_the_store(capacity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"/get_all_keys": b"", "/metrics": f"master_total_capacity_bytes {capacity}\n".encode()}
    pytest.importorskip("mooncake")
    monkeypatch.setattr(MooncakeConnection, "ask_master", lambda _, path: told[path])
    from baton.kv.mooncake_store import open_mooncake

    store = open_mooncake(parse_url("mooncake://127.0.0.1:1"), 5.0, None)
    assert isinstance(store, MooncakeStore)
    try:
        with pytest.raises(StoreFailed, match="capacity"):
            store.stat()
    finally:
        store.close()
