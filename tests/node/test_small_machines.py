"""Weights and KV that do not fit are refused or warned of, with what would fit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.cli.declared_options import parse_bytes
from baton.cli.up import DEMO_KV
from baton.core.config import WorkerConfig
from baton.node import engine_setup
from baton.node.available_memory import whole_bytes
from baton.node.engine_setup import build_executor, warn_of_small_pool
from baton.node.model_memory import TooLittleMemory, check_gpu_memory, check_memory
from baton.node.scripted_text import write_byte_tokenizer
from baton.node.settings import CPU_KV_BYTES, DeviceChoice, Dtype, EngineSettings

SETTINGS = EngineSettings("", None, b"", dtype=Dtype.FLOAT32)
WEIGHTS = 4 * 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": np.zeros(1000, np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_weights_count_in_the_format_they_are_served_in(folder: Path) -> None:
    check_memory(replace(SETTINGS, kv_memory_bytes=1), folder, WEIGHTS + 1)
    with pytest.raises(TooLittleMemory, match=r"take 0\.0 GiB as float32.*or --dtype bfloat16"):
        check_memory(SETTINGS, folder, WEIGHTS - 1)
    check_memory(replace(SETTINGS, dtype=Dtype.BFLOAT16, kv_memory_bytes=1), folder, WEIGHTS - 1)


def test_weights_larger_than_the_whole_gpu_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_gpu_memory(SETTINGS, folder, WEIGHTS)
    monkeypatch.setattr(engine_setup, "gpu_bytes", lambda: WEIGHTS - 1)
    settings = replace(SETTINGS, device=DeviceChoice.CUDA, model_folder=str(folder))
    monkeypatch.setattr(engine_setup, "choose_device", lambda settings, found: settings.device)
    with pytest.raises(TooLittleMemory, match=r"memory on this GPU in all; use a smaller model.*or a GPU with more"):
        build_executor(settings)


def test_the_pool_of_the_demo_holds_the_longest_sequence_of_the_built_in_model() -> None:
    layers, kv_heads, head_dim, number_bytes, context = 30, 3, 64, 2, 8192
    assert parse_bytes(DEMO_KV) >= 2 * layers * kv_heads * head_dim * number_bytes * context


def test_a_pool_that_was_asked_for_must_fit_beside_the_weights(folder: Path) -> None:
    with pytest.raises(TooLittleMemory, match="--kv-memory 101 is more than there is; at most 100 fit beside the weights"):
        check_memory(replace(SETTINGS, kv_memory_bytes=101), folder, WEIGHTS + 100)


def test_the_usual_pool_is_warned_of_where_it_would_not_fit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_memory(SETTINGS, folder, WEIGHTS + CPU_KV_BYTES)
    assert not caplog.records
    check_memory(SETTINGS, folder, WEIGHTS + CPU_KV_BYTES - 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"at most {CPU_KV_BYTES - 1} fit" in record.getMessage()


def test_memory_is_that_of_the_machine_or_of_its_group_if_less(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    assert whole_bytes(meminfo, group) is None
    meminfo.write_text("MemTotal:  8 kB\nMemFree: 1 kB\nSwapTotal: 2 kB\n")
    assert whole_bytes(meminfo, group) == 10 * 1024
    group.mkdir()
    (group / "memory.max").write_text("max\n")
    assert whole_bytes(meminfo, group) == 10 * 1024
    (group / "memory.max").write_text("4096\n")
    assert whole_bytes(meminfo, group) == 4096


def test_a_context_that_the_pool_cannot_hold_is_warned_of_with_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = WorkerConfig(blocks=4, block_size=16, context_tokens=65)
    warn_of_small_pool(replace(SETTINGS, context_tokens=65), config, 100)
    warn_of_small_pool(SETTINGS, config, 0)
    asked, unasked = caplog.records
    assert (asked.levelno, unasked.levelno) == (logging.WARNING, logging.INFO)
    assert "holds sequences of 64 tokens, and --max-model-len is 65" in asked.getMessage()
    assert "--kv-memory 500 holds the longest" in asked.getMessage()
    assert "the model's context is 65" in unasked.getMessage()
    assert "--kv-blocks 5 holds the longest" in unasked.getMessage()
    caplog.clear()
    warn_of_small_pool(replace(SETTINGS, kv_memory_bytes=400), config, 100)
    warn_of_small_pool(replace(SETTINGS, blocks=4), config, 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2, "that pool was asked for"
    assert all("the model's context is 65" in record.getMessage() for record in caplog.records)
    caplog.clear()
    warn_of_small_pool(replace(SETTINGS, context_tokens=64), replace(config, context_tokens=64), 100)
    assert not caplog.records
