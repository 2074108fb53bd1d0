"""Checks the header of a GGUF file before a library reads it, which believes every number in it.

    magic, version   u32 each            little-endian
    tensors, fields  u64 each            how many of each follow
    fields           key, type, value    an array: type of its items, count, items
    tensors          name, dimensions, type, offset
    data             from the next multiple of `general.alignment` on

A count of 2^60 in a file of 100 bytes would otherwise fill the memory, and so would many tensors that name the same bytes.
Reading stays within these limits, which are several times those of the largest models known.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from baton.core.errors import SetupError
from baton.executor.safetensors_header import LFS_POINTER

TAKE_ANOTHER = "take another file of the model, or its folder of safetensors"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIELDS_MAX = 1 << 14
TENSORS_MAX = 1 << 16
ITEMS_MAX = 1 << 21
"""Items of all arrays together: the reader makes an object of each."""
ITEM_BYTES_MAX = 1 << 12
TEXT_BYTES_MAX = 1 << 24
NAME_BYTES_MAX = 1 << 10
DIMENSIONS_MAX = 4
ALIGNMENT_MAX = 1 << 20
PART_COUNTS = {".block_count": 1 << 10, ".expert_count": 1 << 12}
"""Fields by which the model's modules are made, by the end of their names, and how many there may be."""

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each type of fixed size."""
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
_ARCHITECTURE = "general.architecture"


class BadGguf(SetupError):
    """The file is not what a GGUF file must be, or beyond the limits; the message says where."""


class UnreadableGguf(BadGguf):
    """The file is sound, and holds what cannot be converted."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """Outermost first, other than in the file."""
    kind: int
    """Its type, as `gguf.GGMLQuantizationType` numbers them."""
    offset: int
    """From the begin of the file."""
    bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    architecture: str
    tensors: list[GgufTensor]


@dataclass(slots=True)
class _HeaderReader:
    """The position in the file, and what was counted up to there."""

    data: mmap.mmap
    at: int = 0
    items: int = 0
    alignment: int = 32
    architecture: str = ""
    tensors: list[GgufTensor] = field(default_factory=list)
    """Their offsets count from the begin of the data."""

    def take(self, count: int) -> int:
        """Step over so many bytes; returns where they begin."""
        begin = self.at
        if count > len(self.data) - begin:
            raise BadGguf(f"it ends within a value of {count} bytes at byte {begin}")
        self.at = begin + count
        return begin

    def integer(self, form: str) -> int:
        return int(struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))[0])

    def text(self, what: str, bytes_max: int) -> bytes:
        count = self.integer("<Q")
        if count > bytes_max:
            raise BadGguf(f"{what} at byte {self.at} has {count} bytes, more than {bytes_max}")
        begin = self.take(count)
        return self.data[begin : begin + count]


def check_gguf(path: Path) -> None:
    """Raise BadGguf unless every count, length and offset of the header is within the file and within the limits."""
    read_gguf_header(path)


def read_gguf_header(path: Path) -> GgufHeader:
    """The checked header; raises as `check_gguf` does."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _checked(_HeaderReader(data))
    except ValueError:  # an empty file cannot be mapped
        raise BadGguf(f"{path.name} is no usable GGUF file: it is empty; download it again") from None
    except UnreadableGguf as flaw:
        raise UnreadableGguf(f"{path.name} cannot be converted: {flaw}; {TAKE_ANOTHER}") from None
    except BadGguf as flaw:
        raise BadGguf(f"{path.name} is no usable GGUF file: {flaw}; download it again") from None


def _checked(reader: _HeaderReader) -> GgufHeader:
    begin = reader.take(len(MAGIC))
    if reader.data[: len(LFS_POINTER)] == LFS_POINTER:
        raise BadGguf("it is a pointer of Git LFS, not the file (git lfs pull)")
    if reader.data[begin : len(MAGIC)] != MAGIC:
        raise BadGguf("it does not begin with GGUF")
    version = reader.integer("<I")
    if version not in VERSIONS:
        raise BadGguf(f"it has version {version}, and {' and '.join(map(str, VERSIONS))} can be read")
    count, fields = reader.integer("<Q"), reader.integer("<Q")
    _limit("tensors", count, TENSORS_MAX)
    _limit("fields", fields, FIELDS_MAX)
    for _ in range(fields):
        _check_field(reader)
    for _ in range(count):
        _check_tensor(reader)
    begin = _check_data(reader)
    tensors = [replace(tensor, offset=begin + tensor.offset) for tensor in reader.tensors]
    return GgufHeader(reader.architecture, tensors)


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise BadGguf(f"it claims {count} {what}, and {most} are the most")


def _check_field(reader: _HeaderReader) -> None:
    key = reader.text("a field's name", NAME_BYTES_MAX).decode(errors="replace")
    kind = reader.integer("<I")
    if kind in _INTEGERS:
        _check_number(reader, key, reader.integer(_INTEGERS[kind]))
    elif kind in _SIZES:
        reader.take(_SIZES[kind])
    elif kind == _STRING:
        text = reader.text(f"the field {key!r}", TEXT_BYTES_MAX)
        if key == _ARCHITECTURE:
            reader.architecture = text.decode(errors="replace")
    elif kind == _ARRAY:
        _check_array(reader, key)
    else:
        raise BadGguf(f"the field {key!r} has an unknown type {kind}")


def _check_number(reader: _HeaderReader, key: str, value: int) -> None:
    for end, most in PART_COUNTS.items():
        if key.endswith(end):
            _limit(f"parts by {key!r}", value, most)
    if key == _ALIGNMENT:
        if not 0 < value <= ALIGNMENT_MAX or value & (value - 1):
            raise BadGguf(f"its alignment is {value}, which is no power of two up to {ALIGNMENT_MAX}")
        reader.alignment = value


def _check_array(reader: _HeaderReader, key: str) -> None:
    kind, count = reader.integer("<I"), reader.integer("<Q")
    reader.items += count
    _limit("items in arrays", reader.items, ITEMS_MAX)
    if kind in _SIZES:
        reader.take(count * _SIZES[kind])
    elif kind == _STRING:
        for _ in range(count):
            reader.text(f"an item of {key!r}", ITEM_BYTES_MAX)
    else:
        raise BadGguf(f"the field {key!r} is an array of type {kind}, which no model needs")


def _check_tensor(reader: _HeaderReader) -> None:
    name = reader.text("a tensor's name", NAME_BYTES_MAX).decode(errors="replace")
    dimensions = reader.integer("<I")
    _limit(f"dimensions of {name!r}", dimensions, DIMENSIONS_MAX)
    shape = [reader.integer("<Q") for _ in range(dimensions)]
    kind, offset = reader.integer("<I"), reader.integer("<Q")
    reader.tensors.append(GgufTensor(name, tuple(reversed(shape)), kind, offset, _tensor_bytes(name, shape, kind)))


def _tensor_bytes(name: str, shape: list[int], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in GGML_QUANT_SIZES:
        raise BadGguf(f"the tensor {name!r} has an unknown type {kind}")
    values, size = map(int, GGML_QUANT_SIZES[kind])
    if not _can_be_read(kind, size):
        raise UnreadableGguf(f"the tensor {name!r} is of the type {GGMLQuantizationType(kind).name}, which cannot be read")
    count = math.prod(shape)
    if count % values:
        raise BadGguf(f"the tensor {name!r} has {count} values, and its type packs {values} at a time")
    return count // values * size


@functools.cache
def _can_be_read(kind: int, group_bytes: int) -> bool:
    """Whether the library that converts can read tensors of a type: tried with one group of zeros."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, group_bytes), dtype=np.uint8), GGMLQuantizationType(kind))
    except RuntimeError:  # the reader of this type is not written
        return False
    return True


def _check_data(reader: _HeaderReader) -> int:
    """Where the data begins."""
    begin = -(-reader.at // reader.alignment) * reader.alignment
    data_bytes = max(0, len(reader.data) - begin)
    for tensor in reader.tensors:
        if tensor.offset + tensor.bytes > data_bytes:
            raise BadGguf(f"a tensor of {tensor.bytes} bytes at byte {begin + tensor.offset} reaches beyond its end")
    claimed = sum(tensor.bytes for tensor in reader.tensors)
    if claimed > data_bytes:
        raise BadGguf(f"its tensors claim {claimed} bytes in all, and it has {data_bytes}: some share them")
    return begin
