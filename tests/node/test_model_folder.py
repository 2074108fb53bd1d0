"""What is wrong with a model's files is said in one sentence that names the file, before anything slow is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.core.config import BadConfig
from baton.core.errors import SetupError
from baton.node.model_folder import ModelUnavailable, check_context, check_folder
from baton.node.models import resolve_model
from baton.node.scripted_text import write_byte_tokenizer
from tests.support.broken_models import FOUND_IN_FILES, INDEX, SHARDS, WEIGHTS, BrokenModel, shard, write_config

LAYERS, HIDDEN, VOCABULARY = 3, 64, 257


@pytest.fixture
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "m"
    write_byte_tokenizer(folder)
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.{layer}.mlp.weight": np.zeros((4, HIDDEN), np.float32) for layer in range(LAYERS)}
    tensors["model.embed_tokens.weight"] = np.zeros((VOCABULARY, HIDDEN), np.float32)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def test_a_sound_folder_is_taken_whole_and_in_parts(sound: Path) -> None:
    whole = check_folder(sound)
    assert whole.elements == HIDDEN * (VOCABULARY + LAYERS * 4)
    assert check_folder(shard(sound)).tensors == whole.tensors


@pytest.mark.parametrize("broken", FOUND_IN_FILES.values(), ids=FOUND_IN_FILES)
def test_a_broken_model_is_refused_in_one_line(sound: Path, broken: BrokenModel) -> None:
    name = str(broken.break_it(sound))
    with pytest.raises(SetupError, match=broken.said) as refusal:
        resolve_model(name, own_template=True)
    assert "\n" not in str(refusal.value)


def test_an_index_leads_to_no_file_outside_of_the_folder(sound: Path) -> None:
    shard(sound)
    places = json.loads((sound / INDEX).read_text())["weight_map"]
    outside = f"../{SHARDS[0]}"
    (sound / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(places, outside)}))
    with pytest.raises(ModelUnavailable, match="names a file outside of its folder"):
        check_folder(sound)


def test_a_template_of_the_model_does_not_matter_where_another_is_given(sound: Path) -> None:
    (sound / "chat_template.jinja").write_text("{% if %}")
    check_folder(sound, own_template=False)


def test_a_composite_model_is_judged_by_its_decoder(sound: Path) -> None:
    config = json.loads((sound / "config.json").read_text())
    write_config(
        sound, **dict.fromkeys(config) | {"model_type": "both"}, text_config=config | {"num_hidden_layers": LAYERS + 2}
    )
    with pytest.raises(SetupError, match="lack layer 3, layer 4 of the 5 layers"):
        check_folder(sound)


def test_a_context_beyond_the_model_is_refused_with_the_longest_that_works(sound: Path) -> None:
    folder = check_folder(sound)
    check_context(folder, None)
    check_context(folder, 1024)
    with pytest.raises(BadConfig, match=r"--max-model-len 1025 is more than the 1024 positions.*config\.json"):
        check_context(folder, 1025)


def test_a_folder_with_a_gguf_file_names_the_file_to_give(sound: Path) -> None:
    (sound / "config.json").unlink()
    (sound / "q4.gguf").touch()
    with pytest.raises(ModelUnavailable, match=rf"for a GGUF file give the file: {sound / 'q4.gguf'}"):
        check_folder(sound)


def test_a_damaged_copy_of_ours_is_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    folder = resolve_model("shape:tiny-llama")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable, match=f"Baton's own copy: remove {folder}, and start again"):
        resolve_model("shape:tiny-llama")


WITHOUT_OVERRIDE = """
import ctypes, os, sys
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24
if os.getuid() == 0 and "dropped" not in os.environ:
    libc = ctypes.CDLL(None)
    if any(libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) for number in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH)):
        sys.exit(77)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"dropped": "1"})
from baton.core.errors import SetupError
from baton.node.models import resolve_model
try:
    resolve_model(sys.argv[1])
except SetupError as error:
    print(error)
"""
"""Root reads every file, as long as it keeps the capabilities for it."""


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", ""])
def test_what_may_not_be_read_is_named(sound: Path, name: str) -> None:
    (sound / name).chmod(0)
    command = [sys.executable, "-c", WITHOUT_OVERRIDE, str(sound)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})
    (sound / name).chmod(0o700)
    if done.returncode == 77:
        pytest.skip("this process may not give up its capabilities")
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert str(sound / name) in line
    assert "cannot be read" in line
    assert "Permission denied" in line
