"""GGUF files that lie about themselves: refused in one line, within bounded memory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import EXIT_SETUP
from baton.executor.gguf_header import (
    ALIGNMENT_MAX,
    FIELDS_MAX,
    ITEM_BYTES_MAX,
    ITEMS_MAX,
    PART_COUNTS,
    TENSORS_MAX,
    BadGguf,
    UnreadableGguf,
    check_gguf,
)

U32, U64, STRING, ARRAY, F32, Q8_K = 4, 10, 8, 9, 0, 15
HUGE = 1 << 60
ROOM_BYTES = 6 << 30
"""Address space of a child: torch and its libraries take most of it."""
DATA_BYTES_MAX = 1 << 30
SERVE = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, ({ROOM_BYTES}, {ROOM_BYTES}))
resource.setrlimit(resource.RLIMIT_DATA, ({DATA_BYTES_MAX}, {DATA_BYTES_MAX}))
from baton.cli.main import app
app()
"""


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _array(key: str, kind: int, count: int, items: bytes) -> bytes:
    return _field(key, ARRAY, struct.pack("<IQ", kind, count) + items)


def _tensor(name: str, *shape: int, kind: int = F32, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def _file(fields: list[bytes], tensors: list[bytes], data: bytes = b"", *, counts: tuple[int, int] | None = None) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(fields)))) + b"".join(fields + tensors)
    return header + bytes(-len(header) % 32) + data


SOUND = _file(
    [
        _field("general.architecture", STRING, _text("llama")),
        _field("llama.block_count", U32, struct.pack("<I", 1)),
        _array("tokenizer.ggml.tokens", STRING, 3, _text("a") + _text("bc") + _text("")),
        _array("tokenizer.ggml.scores", 6, 3, bytes(12)),
    ],
    [_tensor("output.weight", 4, 4), _tensor("other", 4, offset=64)],
    bytes(80),
)

LYING = {
    "empty": b"",
    "magic": b"GGML" + SOUND[4:],
    "version": SOUND[:4] + b"\xff" + SOUND[5:],
    "tensors": _file([], [], counts=(HUGE, 0)),
    "fields": _file([], [], counts=(0, HUGE)),
    "more tensors than there are": _file([], [], counts=(TENSORS_MAX, 0)),
    "more fields than there are": _file([], [], counts=(0, FIELDS_MAX)),
    "length of a name": _file([struct.pack("<Q", HUGE)], []),
    "length of a text": _file([_field("k", STRING, struct.pack("<Q", HUGE))], []),
    "items of an array": _file([_array("k", 0, HUGE, b"")], []),
    "items of several arrays": _file([_array(f"k{n}", 0, ITEMS_MAX // 2, bytes(ITEMS_MAX // 2)) for n in range(3)], []),
    "texts of an array": _file([_array("k", STRING, ITEMS_MAX, b"")], []),
    "length of an item": _file([_array("k", STRING, 1, _text("x" * (ITEM_BYTES_MAX + 1)))], []),
    "nested arrays": _file([_array("k", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 100_000)], []),
    "type of a field": _file([_field("k", 99, b"")], []),
    "layers": _file([_field("llama.block_count", U32, struct.pack("<I", PART_COUNTS[".block_count"] + 1))], []),
    "experts": _file([_field("llama.expert_count", U64, struct.pack("<Q", HUGE))], []),
    "alignment": _file([_field("general.alignment", U32, struct.pack("<I", ALIGNMENT_MAX + 1))], []),
    "no alignment": _file([_field("general.alignment", U32, struct.pack("<I", 0))], []),
    "dimensions": _file([], [_text("t") + struct.pack("<I", 1 << 31)]),
    "size of a tensor": _file([], [_tensor("t", HUGE, HUGE)], bytes(64)),
    "type of a tensor": _file([], [_tensor("t", 4, kind=77)], bytes(64)),
    "part of a group": _file([], [_tensor("t", 5, kind=2)], bytes(64)),
    "offset": _file([], [_tensor("t", 4, offset=HUGE)], bytes(64)),
    "tensors that share their bytes": _file([], [_tensor(f"t{n}", 16) for n in range(100)], bytes(64)),
}


def test_a_sound_file_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(SOUND)
    check_gguf(file)


@pytest.mark.parametrize("content", LYING.values(), ids=LYING)
def test_a_lie_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(BadGguf, match=r"^m\.gguf is no usable GGUF file: ") as refusal:
        check_gguf(file)
    assert "\n" not in str(refusal.value)


def test_a_type_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(_file([], [_tensor("t", 256, kind=Q8_K)], bytes(1024)))
    with pytest.raises(UnreadableGguf, match=r"^m\.gguf cannot be converted: the tensor 't' is of the type Q8_K, .*; take"):
        check_gguf(file)


@pytest.mark.parametrize("size", range(0, len(SOUND), 7))
def test_a_part_of_a_file_is_refused(tmp_path: Path, size: int) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(SOUND[:size])
    with pytest.raises(BadGguf):
        check_gguf(file)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(4, len(SOUND) - 1), st.binary(min_size=1, max_size=9), st.integers(0, 9))
def test_whatever_is_overwritten_it_is_accepted_or_refused(tmp_path: Path, at: int, other: bytes, more: int) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(SOUND[:at] + other + SOUND[at + len(other) - min(more, len(other)) :])
    try:
        check_gguf(file)
    except BadGguf as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017


def _served(file: Path, cache: Path) -> tuple[int, str]:
    """Exit status and output of a `baton serve` of that file, in a process with little memory."""
    environment = {**os.environ, "BATON_CACHE": str(cache), "COLUMNS": "300"}
    command = [sys.executable, "-c", SERVE, "serve", str(file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True) as process:
        output = process.stdout.read() if process.stdout is not None else ""
    return process.returncode, output


@pytest.mark.parametrize("lie", ["items of an array", "nested arrays"])
def test_a_server_refuses_a_lie_in_one_line_and_bounded_memory(tmp_path: Path, lie: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(LYING[lie])
    code, output = _served(file, tmp_path / "cache")
    assert code == EXIT_SETUP
    assert output.splitlines()[-1].startswith("baton serve: m.gguf is no usable GGUF file")
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_file_whose_header_is_sound_and_that_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(SOUND)
    code, output = _served(file, tmp_path / "cache")
    assert code == EXIT_SETUP
    assert output.splitlines()[-1].startswith("baton serve: m.gguf cannot be converted: ")
    assert "Traceback" not in output
