"""Borders of files that operators name: options in TOML, and models as GGUF."""

from __future__ import annotations

import atexit
import importlib.util
import os
import random
import shutil
import struct
import tempfile
from pathlib import Path

from tests.fuzz.border import Border, MakeBorder
from tests.fuzz.inputs import from_bytes


class _Scratch:
    """A file whose contents are replaced for each input; it goes with the process."""

    def __init__(self, name: str) -> None:
        folder = tempfile.mkdtemp(prefix="baton-fuzz-")
        atexit.register(shutil.rmtree, folder)
        self.path = Path(folder) / name

    def put(self, data: bytes) -> Path:
        self.path.write_bytes(data)
        return self.path


_TOML_VALUES = (
    "1", "-1", "0", "9" * 30, "9" * 400, "9" * 5000, "1e999", "1.5", "nan", "inf", "true", '"x"', '"scripted"', "[]",
    "[1, 'a']", "{}", "{a = 1}", "1979-05-27T07:32:00Z", "07:32:00", "0xffff", "0o7", "0b1", '"\\uD800"', '"""a\nb"""', "''",
    '"' + "x" * 5000 + '"', "[" * 300 + "]" * 300, "[" * 3000, "{a." * 50, "1__0", "+1", "''''", "-0.0",
)  # fmt: skip


def _toml() -> Border:
    import typer

    from baton.cli.main import app
    from baton.cli.toml_options import read_options

    commands = _commands_with_config(app)
    names = sorted({name for _, options in commands for name in options})
    scratch = _Scratch("options.toml")
    samples = [
        b'port = 8000\nhost = "127.0.0.1"\nmax-num-seqs = 64\n',
        b'router-port = 8000\nmixed = 2\nexecutor = "scripted"\nstep-ms = 20.5\n',
        b'[table]\na = 1\n[[many]]\nb.c.d = [1, 2, {e = "f"}]\n# a comment\n',
    ]
    by_bytes = from_bytes(samples)

    def draw_input(draw: random.Random) -> bytes:
        if draw.random() < 0.4:
            return by_bytes(draw)
        lines = [f"{draw.choice(names)} = {draw.choice(_TOML_VALUES)}" for _ in range(draw.choice((1, 1, 2, 4)))]
        return "\n".join(lines).encode()

    turn = 0

    def decode(data: bytes) -> object:
        nonlocal turn
        turn += 1
        return read_options(scratch.put(data), commands[turn % len(commands)][0], "config")

    return Border(decode, (typer.BadParameter,), draw_input)


def _commands_with_config(_app: object) -> list[tuple[object, list[str]]]:
    """The commands that take --config, with the names of their options."""
    from typing import get_type_hints

    from baton.cli.router import router
    from baton.cli.serve import serve
    from baton.cli.up import up

    found = []
    for command in (serve, router, up):
        hints = get_type_hints(command, include_extras=True)
        found.append((command, [name.replace("_", "-") for name in hints if name not in ("return", "config")]))
    return found


# ── GGUF ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gguf_file(nested: bool = False) -> bytes:
    """A small valid file: values of several types, and two tensors. `nested`: with an array in an array, as no model has."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    fields = [
        (b"general.architecture", 8, text(b"llama")),
        (b"general.alignment", 4, struct.pack("<I", 32)),
        (b"llama.block_count", 4, struct.pack("<I", 1)),
        (b"llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        (b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 3) + text(b"a") + text(b"b") + text(b"c")),
        (b"tokenizer.ggml.scores", 9, struct.pack("<IQ3f", 6, 3, 0.0, 1.0, 2.0)),
    ]
    if nested:
        fields.append((b"nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQI", 4, 1, 7)))
    tensors = [(b"token_embd.weight", (4, 3), 0, 0), (b"output_norm.weight", (4,), 0, 64)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    head += b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in fields)
    for name, shape, kind, offset in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, offset)
    head += bytes(-len(head) % 32)
    return head + bytes(128)


HAS_GGUF_CHECK = importlib.util.find_spec("baton.executor.gguf_header") is not None
"""Whether the header is checked before a library reads it, which believes every number in it."""


def _gguf() -> Border:
    """The header of a GGUF file: the check, and then the library's reader with what the check let pass."""
    from gguf import GGUFReader

    scratch = _Scratch("model.gguf")
    if not HAS_GGUF_CHECK:
        return Border(
            lambda data: GGUFReader(os.fspath(scratch.put(data))),
            (ValueError,),
            from_bytes([gguf_file(), gguf_file(), gguf_file(nested=True)]),
        )
    from baton.executor.gguf_header import BadGguf, check_gguf

    def decode(data: bytes) -> object:
        check_gguf(scratch.put(data))
        return len(GGUFReader(os.fspath(scratch.path)).tensors)

    return Border(decode, (BadGguf, ValueError, KeyError), from_bytes([gguf_file(), gguf_file(), gguf_file(nested=True)]))


BORDERS: dict[str, MakeBorder] = {"file-toml": _toml, "file-gguf": _gguf}
