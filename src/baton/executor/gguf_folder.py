"""A folder that was made of a GGUF file: configuration and tokeniser as `transformers` saves them, and a note of the file.

The weights are in the file, which is read when the model is loaded, or beside the note as safetensors, if it was converted.
Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

NOTE = "gguf.json"
"""File in a folder made of a GGUF file that names it."""
SAMPLES = 64
SAMPLE_BYTES = 4096
BEGIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufNote:
    file: str | None
    """The file with the weights, absolute or in the folder; None where they were converted."""
    mark: bytes
    """See `fingerprint`."""


def note_gguf(folder: Path, note: GgufNote) -> None:
    (folder / NOTE).write_text(json.dumps({"file": note.file, "mark": note.mark.hex()}))


def gguf_note(folder: Path) -> GgufNote | None:
    """None for a folder that was not made of a GGUF file."""
    path = folder / NOTE
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    return GgufNote(None if found["file"] is None else str(found["file"]), bytes.fromhex(found["mark"]))


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file with the weights of a folder; None where they are safetensors or drawn."""
    note = gguf_note(folder)
    return None if note is None or note.file is None else folder / note.file


def gguf_mark(file: Path) -> bytes:
    """A hash of the file's size, its begin, and 64 samples spread over it."""
    size = file.stat().st_size
    digest = hashlib.blake2b(f"gguf:{size}:".encode(), digest_size=16)
    with file.open("rb") as reader:
        digest.update(reader.read(BEGIN_BYTES))
        for offset in range(0, size, max(1, size // SAMPLES)):
            reader.seek(offset)
            digest.update(reader.read(SAMPLE_BYTES))
    return digest.digest()
