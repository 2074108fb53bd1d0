"""Fingerprints of models: two executors with equal fingerprints compute equal KV for equal tokens.

A fingerprint is the mark of the model, computed from its folder, followed by a hash of mark, number format and block layout.
The mark hashes the configuration and, for each weights file in name order, its name, its size, its safetensors header
(names, shapes and offsets of all tensors) and 64 samples of 4 KiB spread over the data. Reading every byte of a large model
would take longer than loading it; a fine-tune changes every sample, a truncated or swapped file changes size or header.
Files that agree in all of this and differ elsewhere are not distinguished. A folder without weights that stands for a shape
has the mark of the shape and its seed, and one that was made of a GGUF file the mark of that file, whether it was converted
or not.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.executor.gguf_folder import gguf_note
from baton.executor.model_shapes import shape_in, shape_mark

SAMPLES = 64
SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 100 * 1024 * 1024


SCRIPTED_MARK = b"scripted-1:"


def fingerprint_model(path: Path, dtype: str, layout: str) -> bytes:
    return fingerprint_of(model_mark(path), dtype, layout)


def fingerprint_of(mark: bytes, dtype: str, layout: str) -> bytes:
    """`layout` describes the block layout and anything else that makes KV incompatible."""
    digest = hashlib.blake2b(mark, digest_size=16)
    for part in (dtype.encode(), layout.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return mark + digest.digest()


def model_mark(path: Path) -> bytes:
    """The hash of the model alone, the same for every number format."""
    shape = shape_in(path)
    if shape is not None:
        return shape_mark(shape)
    gguf = gguf_note(path)
    if gguf is not None:
        return gguf.mark
    config = (path / "config.json").read_bytes()
    digest = hashlib.blake2b(len(config).to_bytes(8, "little") + config, digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        _add_file(digest, file)
    return digest.digest()


def _add_file(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}:".encode())
    with file.open("rb") as reader:
        header_bytes = int.from_bytes(reader.read(8), "little")
        digest.update(reader.read(min(header_bytes, HEADER_BYTES_MAX)))
        data_begin = 8 + header_bytes
        stride = max(1, (size - data_begin) // SAMPLES)
        for offset in range(data_begin, size, stride):
            reader.seek(offset)
            digest.update(reader.read(SAMPLE_BYTES))
