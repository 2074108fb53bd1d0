"""Checks a model folder before a process is started: what is missing, cut off or contradictory in files and headers.

Reads `config.json`, the index and the headers of the weights, and what there is of a tokeniser and a chat template. Imports
neither torch nor `transformers`, so that a broken folder is refused within a second. It knows names, not architectures: that
every tensor is there in the shape that the model needs is checked by `executor.model_loading`, and whether the architecture
can be served by `executor.model_support`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.api.chat_template import check_template
from baton.core.config import BadConfig
from baton.core.errors import SetupError
from baton.executor.gguf_folder import gguf_in
from baton.executor.model_shapes import shape_in
from baton.executor.safetensors_header import FETCH_AGAIN, LFS_POINTER, BadWeights, TensorHeader, read_header

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
TOKENIZER = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OTHER_TOKENIZERS = ("vocab.json", "vocab.txt")
"""Files from which `transformers` makes a tokeniser without further packages."""
NAMED_MAX = 3
"""Most names of missing things in one sentence."""

_DECODER = r"(?:model|model\.language_model|language_model\.model)"
_LAYER = re.compile(rf"{_DECODER}\.layers\.(\d+)\.")
_EMBEDDING = re.compile(rf"{_DECODER}\.embed_tokens\.weight")

Json = Mapping[str, object]


class ModelUnavailable(SetupError):
    """The name is not a model we can open; the message says what to do instead."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What the small files of a folder say."""

    path: Path
    config: Json
    tensors: Mapping[str, TensorHeader]
    """Empty where the folder stands for a shape, whose weights are drawn, and where they are in a GGUF file."""
    gguf: Path | None = None

    @property
    def decoder(self) -> Json:
        """The part of the configuration that describes the decoder."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def elements(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())


def check_folder(path: Path, own_template: bool = True) -> ModelFolder:
    """Raises ModelUnavailable, BadWeights or BadTemplate. `own_template`: the model's chat template will be used."""
    config = _config(path)
    gguf = gguf_in(path)
    if gguf is not None and not gguf.is_file():
        raise ModelUnavailable(f"the GGUF file {gguf} of the folder {path} is gone; give it again as the model")
    tensors = {} if shape_in(path) or gguf is not None else _tensors(path)
    folder = ModelFolder(path, config, tensors, gguf)
    _check_against_config(folder)
    _check_tokenizer(path)
    if own_template:
        _check_own_template(path)
    return folder


def check_context(folder: ModelFolder, context_tokens: int | None) -> None:
    """Raises BadConfig where more is asked for than the model has positions. The executor knows it for all models."""
    most = folder.decoder.get("max_position_embeddings")
    if context_tokens is not None and isinstance(most, int) and context_tokens > most:
        raise BadConfig(
            f"--max-model-len {context_tokens} is more than the {most} positions of the model (max_position_embeddings in "
            f"{folder.path / CONFIG}); give at most {most}, or leave it out"
        )


# ── configuration ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _config(folder: Path) -> Json:
    path = folder / CONFIG
    if not path.is_file():
        raise ModelUnavailable(_why_no_config(folder))
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelUnavailable(
            f"{path} names no model_type, so the architecture is not known; take the config.json that the model came with"
        )
    return config


def _why_no_config(folder: Path) -> str:
    try:
        names = sorted(child.name for child in folder.iterdir())
    except OSError as error:
        return f"the folder {folder} cannot be read: {error.strerror}"
    if not names:
        return f"the folder {folder} is empty; download the model into it"
    if ADAPTER in names:
        return _adapter(folder)
    if "model_index.json" in names:
        return f"the folder {folder} is a pipeline of diffusers (model_index.json), not a language model"
    if ggufs := [name for name in names if name.lower().endswith(".gguf")]:
        return f"the folder {folder} has no config.json; for a GGUF file give the file: {folder / ggufs[0]}"
    return f"the folder {folder} has no config.json, so it is not a model folder; give the folder that has one"


def _adapter(folder: Path) -> str:
    base = read_json(folder / ADAPTER).get("base_model_name_or_path")
    of = f" for {base}" if isinstance(base, str) and base else ""
    return (
        f"the folder {folder} is an adapter (LoRA){of}, not a model; merge it into its model first "
        "(peft: merge_and_unload, then save_pretrained) and give that folder"
    )


def read_json(path: Path) -> Json:
    """The object in a JSON file of a model. Raises ModelUnavailable."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ModelUnavailable(f"{path} is not JSON ({where}); {FETCH_AGAIN}") from None
    except (UnicodeDecodeError, RecursionError):
        raise ModelUnavailable(f"{path} is not JSON; {FETCH_AGAIN}") from None
    if not isinstance(found, dict):
        raise ModelUnavailable(f"{path} holds no JSON object; {FETCH_AGAIN}")
    return found


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(folder: Path) -> Mapping[str, TensorHeader]:
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _of_index(folder)
    raise ModelUnavailable(_why_no_weights(folder))


def _of_index(folder: Path) -> Mapping[str, TensorHeader]:
    path = folder / INDEX
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ModelUnavailable(f"{path} does not say which file has which tensor (weight_map); {FETCH_AGAIN}")
    names = sorted(set(places.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelUnavailable(f"{path} names a file outside of its folder: {outside[0]}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BadWeights(f"{folder} lacks {_some(missing)} of the {len(names)} files that {INDEX} names; download the rest")
    shards = {name: read_header(folder / name) for name in names}
    for tensor, name in places.items():
        if tensor not in shards[name]:
            raise BadWeights(f"{folder / name} lacks the tensor {tensor}, which {INDEX} places there; {FETCH_AGAIN}")
    return {tensor: shards[name][tensor] for tensor, name in places.items()}


def _why_no_weights(folder: Path) -> str:
    if (folder / ADAPTER).is_file():
        return _adapter(folder)
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return (
            f"the folder {folder} has {_some(others)}, but no {WEIGHTS} and no {INDEX} that would say which file has which "
            "tensor; download the index too"
        )
    if any(next(folder.glob(pattern), None) for pattern in PICKLES):
        return (
            f"the folder {folder} has its weights only as pickles (.bin, .pt), which can run code when opened; convert them "
            "to safetensors (save_pretrained of transformers), or download the model's .safetensors files"
        )
    return f"the folder {folder} has no .safetensors files; download the model's weights"


def _check_against_config(folder: ModelFolder) -> None:
    found = {int(hit[1]) for name in folder.tensors if (hit := _LAYER.match(name))}
    layers = folder.decoder.get("num_hidden_layers")
    missing = [f"layer {layer}" for layer in range(layers) if layer not in found] if isinstance(layers, int) else []
    if found and missing:
        raise BadWeights(
            f"the weights in {folder.path} lack {_some(missing)} of the {layers} layers that {CONFIG} names; download the "
            f"missing files, or take the {CONFIG} of these weights"
        )
    wanted = tuple(folder.decoder.get(name) for name in ("vocab_size", "hidden_size"))
    for name, tensor in folder.tensors.items():
        if _EMBEDDING.fullmatch(name) and None not in wanted and tensor.shape != wanted:
            raise BadWeights(
                f"the tensor {name} in {folder.path} has the shape {list(tensor.shape)}, and {CONFIG} says {list(wanted)} "
                f"(vocab_size, hidden_size): weights and {CONFIG} are of two models; download both again"
            )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMED_MAX} more" if len(listed) > NAMED_MAX else ""
    return ", ".join(listed[:NAMED_MAX]) + more


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_tokenizer(folder: Path) -> None:
    path = folder / TOKENIZER
    if path.is_file():
        _check_readable(path)
        return
    if any((folder / name).is_file() for name in OTHER_TOKENIZERS):
        return
    if pieces := next((name for name in SENTENCEPIECE if (folder / name).is_file()), None):
        _check_sentencepiece(folder, pieces)
        return
    raise ModelUnavailable(f"the folder {folder} has no {TOKENIZER}; download the model's tokenizer files into it")


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begin = file.read(len(LFS_POINTER))
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from None
    if begin == LFS_POINTER:
        raise ModelUnavailable(f"{path} is a pointer of Git LFS, not the file; run git lfs pull in its folder")


def _check_sentencepiece(folder: Path, pieces: str) -> None:
    """`transformers` converts such a file where two packages are installed that nothing else here needs."""
    if not all(_is_installed(package) for package in ("sentencepiece", "google.protobuf")):
        raise ModelUnavailable(
            f"the folder {folder} has its tokenizer only as {pieces} (SentencePiece), and {TOKENIZER} is needed: download "
            'that file too, or write it once with: pip install sentencepiece protobuf && python -c "from transformers '
            f"import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _check_own_template(folder: Path) -> None:
    """The file goes before the one in the tokeniser's configuration, as `transformers` reads them."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            check_template(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ModelUnavailable(f"{file} cannot be read: {error}") from None
        return
    path = folder / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, str):
        check_template(template, f"chat_template in {path}")
