"""What is said of a torch that is missing, too old, or of the other kind than the machine."""

from __future__ import annotations

import logging
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from baton.executor import torch_build
from baton.executor.torch_build import TorchBuild, TorchUnusable, cannot_import, has_nvidia_gpu, need_torch, remark_on

CPU, CUDA, WORKING = (
    TorchBuild("2.13.0+cpu", None, False),
    TorchBuild("2.13.0", "13.0", False),
    TorchBuild("2.13.0", "13.0", True),
)


def _is_one_line_and_both_commands(text: str) -> bool:
    first, *commands = text.splitlines()
    return bool(first) and len(commands) == 2 and "install selector" in commands[0] and "baton-serve[cuda]" in commands[1]


@pytest.mark.parametrize("left_over", [None, ModuleSpec("torch", None)], ids=["not installed", "an empty folder"])
def test_a_missing_torch_is_one_line_and_a_command_for_each_kind(
    left_over: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build.importlib.util, "find_spec", lambda _: left_over)
    with pytest.raises(TorchUnusable, match="torch is not installed") as raised:
        need_torch()
    assert _is_one_line_and_both_commands(str(raised.value))


@pytest.mark.parametrize("found", ["2.10.1", "1.13.0+cpu"])
def test_a_torch_that_is_too_old_is_refused_by_its_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "version", lambda _: found)
    with pytest.raises(TorchUnusable, match=f"torch {found.split('+')[0]}.* is older than 2.11"):
        need_torch()


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "2.15.0a0+git1234", "10.0.1"])
def test_a_torch_that_is_new_enough_will_do(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "version", lambda _: found)
    need_torch()


def test_a_torch_that_does_not_load_is_one_line_too() -> None:
    error = cannot_import(OSError("libcudart.so.13: cannot open shared object file\nand more"))
    assert "cannot be imported: libcudart.so.13" in str(error)
    assert _is_one_line_and_both_commands(str(error))


@pytest.mark.parametrize(
    ("build", "has_gpu", "hidden", "level", "told"),
    [
        (CPU, True, False, logging.WARNING, "is a build without CUDA: serving on the CPU"),
        (CUDA, True, False, logging.WARNING, "cannot use it: serving on the CPU"),
        (CUDA, False, False, logging.INFO, "several gigabytes smaller"),
    ],
)
def test_a_build_of_the_other_kind_is_told(build: TorchBuild, has_gpu: bool, hidden: bool, level: int, told: str) -> None:
    remark = remark_on(build, has_gpu, hidden)
    assert remark is not None
    assert remark.level == level
    assert told in remark.text


@pytest.mark.parametrize(("build", "has_gpu", "hidden"), [(CPU, False, False), (WORKING, True, False), (CUDA, True, True)])
def test_nothing_is_told_where_torch_and_machine_fit_or_the_gpu_is_hidden(
    build: TorchBuild, has_gpu: bool, hidden: bool
) -> None:
    assert remark_on(build, has_gpu, hidden) is None


def test_a_gpu_is_told_by_its_device_node(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not has_nvidia_gpu(tmp_path, tmp_path / "wsl")
    (tmp_path / "nvidia0").touch()
    assert has_nvidia_gpu(tmp_path, tmp_path / "wsl")


def test_inside_wsl_a_gpu_is_told_by_its_driver(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    assert not has_nvidia_gpu(tmp_path, tmp_path / "libcuda.so.1")
    (tmp_path / "libcuda.so.1").touch()
    assert has_nvidia_gpu(tmp_path, tmp_path / "libcuda.so.1")
