"""Reads the header of a safetensors file, and checks it against the file's size, without reading a weight.

    length   u64, little-endian
    header   JSON: tensor name → dtype, shape, [begin, end] in the data; `__metadata__` is free text
    data     as long as the last tensor's end

A file that passes can be opened by the library; what it can still be is the weights of another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.core.errors import SetupError

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The library's own limit."""
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that a clone without Git LFS has in place of the real one."""
FETCH_AGAIN = "download it again"
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""Number formats of whole bytes. Others are left to the library."""


class BadWeights(SetupError):
    """The weights are incomplete or no weights; the message names the file."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_Header = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> Mapping[str, TensorHeader]:
    """The tensors of a file by name. Raises BadWeights where the file cannot be what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(LENGTH_BYTES)
            if begin and LFS_POINTER.startswith(begin):
                raise BadWeights(f"{path} is a pointer of Git LFS, not the weights; run git lfs pull in its folder")
            length = int.from_bytes(begin, "little")
            _check_length(path, size, length)
            raw = file.read(length)
    except OSError as error:
        raise BadWeights(f"{path} cannot be read: {error.strerror}") from None
    entries = _entries(path, raw)
    _check_spans(path, entries, size - LENGTH_BYTES - length)
    return {name: TensorHeader(entry.dtype, entry.shape) for name, entry in entries.items()}


def _check_length(path: Path, size: int, length: int) -> None:
    if size < LENGTH_BYTES:
        raise BadWeights(f"{path} has {size} bytes, too few for a safetensors file; {FETCH_AGAIN}")
    if length > HEADER_BYTES_MAX:
        raise BadWeights(f"{path} is no safetensors file: its header would have {length} bytes; {FETCH_AGAIN}")
    if length > size - LENGTH_BYTES:
        raise BadWeights(f"{path} ends within its header: it has {size} bytes, and the header {length}; {FETCH_AGAIN}")


def _entries(path: Path, raw: bytes) -> dict[str, _Entry]:
    try:
        found = msgspec.json.decode(raw, type=_Header)
        found.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in found.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadWeights(f"{path} is no safetensors file: its header is not what one has; {FETCH_AGAIN}") from None


def _check_spans(path: Path, entries: Mapping[str, _Entry], data_bytes: int) -> None:
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        each = DTYPE_BYTES.get(entry.dtype)
        wrong_size = each is not None and end - begin != each * math.prod(entry.shape)
        if not 0 <= begin <= end or wrong_size or any(part < 0 for part in entry.shape):
            raise BadWeights(f"{path} is no usable safetensors file: shape and place of {name!r} differ; {FETCH_AGAIN}")
    claimed = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if claimed > data_bytes:
        raise BadWeights(f"{path} is cut off: it has {data_bytes} of {claimed} bytes of weights; {FETCH_AGAIN}")
    if claimed < data_bytes:
        raise BadWeights(f"{path} is no usable safetensors file: {data_bytes - claimed} bytes too many; {FETCH_AGAIN}")
