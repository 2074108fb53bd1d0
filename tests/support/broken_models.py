"""Model folders and GGUF files that are broken in one way each, made from a sound tiny model, and what is said of each."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LFS = "version https://git-lfs\noid sha256:0\nsize 1\n"
STRING, U32, F32, Q8_K = 8, 4, 0, 15


@dataclass(frozen=True, slots=True)
class BrokenModel:
    """`break_it` changes a copy of the sound folder, and returns what is given to `baton serve`."""

    break_it: Callable[[Path], Path]
    said: str
    """A regular expression found in the one line."""


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / WEIGHTS, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary


def write_config(folder: Path, **fields: object) -> Path:
    """Change fields of `config.json`; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def _with_file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return write


def _without(*names: str) -> Callable[[Path], Path]:
    def remove(folder: Path) -> Path:
        for name in names:
            (folder / name).unlink()
        return folder

    return remove


def shard(folder: Path) -> Path:
    """The same model in two files with an index."""
    tensors = tensors_of(folder)
    places = {name: SHARDS[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in SHARDS:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHTS).unlink()
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def _cut(folder: Path) -> Path:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])
    return folder


def _one_shard_missing(folder: Path) -> Path:
    return _without(SHARDS[1])(shard(folder))


def _shards_without_index(folder: Path) -> Path:
    return _without(INDEX)(shard(folder))


def _tensor_not_in_its_shard(folder: Path) -> Path:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.extra"] = SHARDS[0]
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def _without_layer(folder: Path) -> Path:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    return with_tensors(folder, change)


def _other_embedding(folder: Path) -> Path:
    return with_tensors(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": np.zeros((7, 64))}))


def _only_pickles(folder: Path) -> Path:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return _without(WEIGHTS)(folder)


def _adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    return _without("config.json")(folder)


def _sentencepiece_only(folder: Path) -> Path:
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    return _without("tokenizer.json")(folder)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


def gguf_bytes(architecture: str = "llama", kind: int = F32) -> bytes:
    """A GGUF file with one small tensor."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    fields = text("general.architecture") + struct.pack("<I", STRING) + text(architecture)
    tensor = text("output.weight") + struct.pack("<IQIQ", 1, 256, kind, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + fields + tensor
    return header + bytes(-len(header) % 32) + bytes(1024)


def _gguf(content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder.parent / "broken.gguf"
        path.write_bytes(content)
        return path

    return write


def _hub_name(_: Path) -> Path:
    return Path("Qwen/Qwen3-0.6B")


def _huge(folder: Path) -> Path:
    """Weights of 4 TiB, which take no room on the disk."""
    rows, hidden = 1 << 34, 64
    entry = {"dtype": "F32", "shape": [rows, hidden], "data_offsets": [0, 4 * rows * hidden]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * rows * hidden)
    return write_config(folder, vocab_size=rows)


def _random_bytes(count: int) -> bytes:
    return random.Random(0).randbytes(count)


FOUND_IN_FILES = {
    "no config": BrokenModel(_without("config.json"), r"m has no config\.json"),
    "config no JSON": BrokenModel(_with_file("config.json", '{\n  "a": oops}'), r"config\.json is not JSON \(line 2, col"),
    "config no object": BrokenModel(_with_file("config.json", "[]"), r"config\.json holds no JSON object"),
    "no model_type": BrokenModel(lambda folder: write_config(folder, model_type=None), r"config\.json names no model_type"),
    "no tokenizer": BrokenModel(_without("tokenizer.json"), r"m has no tokenizer\.json; download"),
    "tokenizer in LFS": BrokenModel(_with_file("tokenizer.json", LFS), r"tokenizer\.json is a pointer of Git LFS"),
    "sentencepiece only": BrokenModel(_sentencepiece_only, r"only as tokenizer\.model .*pip install sentencepiece protobuf"),
    "no weights": BrokenModel(_without(WEIGHTS), r"m has no \.safetensors files; download"),
    "weights cut off": BrokenModel(_cut, r"model\.safetensors is cut off: it has \d+ of \d+ bytes"),
    "weights random": BrokenModel(_with_file(WEIGHTS, _random_bytes(4096)), r"model\.safetensors is no safetensors file"),
    "weights empty": BrokenModel(_with_file(WEIGHTS, b""), r"model\.safetensors has 0 bytes"),
    "weights in LFS": BrokenModel(_with_file(WEIGHTS, LFS), r"model\.safetensors is a pointer of Git LFS.*git lfs pull"),
    "shard missing": BrokenModel(_one_shard_missing, rf"lacks {SHARDS[1]} of the 2 files that"),
    "no index": BrokenModel(_shards_without_index, r"no model\.safetensors\.index\.json"),
    "tensor not in shard": BrokenModel(_tensor_not_in_its_shard, r"00001-of-00002.* lacks the tensor model\.layers\.9"),
    "layer missing": BrokenModel(_without_layer, r"lack layer 1 of the 3 layers that config\.json names"),
    "other shape": BrokenModel(_other_embedding, r"model\.embed_tokens\.weight in .* \[7, 64\], and config\.json says \["),
    "only pickles": BrokenModel(_only_pickles, r"only as pickles .* can run code"),
    "adapter": BrokenModel(_adapter, r"is an adapter \(LoRA\) for some/base.*merge_and_unload"),
    "empty folder": BrokenModel(_empty, r"m is empty; download"),
    "GGUF cut off": BrokenModel(_gguf(gguf_bytes()[:-1000]), r"broken\.gguf is no usable GGUF file.*download it again"),
    "GGUF random": BrokenModel(_gguf(_random_bytes(4096)), r"broken\.gguf is no usable GGUF file: it does not begin"),
    "GGUF quantisation": BrokenModel(_gguf(gguf_bytes(kind=Q8_K)), r"broken\.gguf cannot be converted: .* of the type Q8_K"),
    "hub name": BrokenModel(_hub_name, r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B, then: baton serve \./Qw"),
    "template": BrokenModel(_with_file("chat_template.jinja", "{% if a %}\n{{ c }"), r"chat_template\.jinja .* line 2"),
}  # fmt: skip
"""Found before a process is started, without torch."""


def _tensor_missing(folder: Path) -> Path:
    return with_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))


def _wrong_projection(folder: Path) -> Path:
    other = {"model.layers.1.self_attn.q_proj.weight": np.zeros((8, 64))}
    return with_tensors(folder, lambda tensors: tensors.update(other))


FOUND_BY_LOADING = {
    "unknown model_type": BrokenModel(lambda folder: write_config(folder, model_type="nolm"), r"the architecture 'nolm'"),
    "not causal": BrokenModel(lambda folder: write_config(folder, model_type="t5"), r"model t5 cannot be served: .*encoder"),
    "tokenizer no JSON": BrokenModel(_with_file("tokenizer.json", "{}"), r"tokenizer\.json is no usable tokenizer"),
    "tensor missing": BrokenModel(_tensor_missing, r"lack the tensor model\.layers\.1\.self_attn\.q_proj\.weight; download"),
    "tensor of other shape": BrokenModel(_wrong_projection, r"q_proj\.weight in .* the shape \[8, 64\], and .* \[64, 64\]"),
    "GGUF architecture": BrokenModel(_gguf(gguf_bytes("nolm")), r"broken\.gguf cannot be converted: .*architecture nolm"),
    "more than memory": BrokenModel(_huge, r"the weights in .* take \d+\.\d GiB as bfloat16, and there are"),
}
"""Found by the libraries that load tokenisers and weights, which take seconds to import."""
