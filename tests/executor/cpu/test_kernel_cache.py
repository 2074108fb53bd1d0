"""Where compiled kernels are kept, and which are not loaded."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from baton.executor.cpu import kernel_build
from baton.executor.cpu.native_kernels import load_kernels

PLANTED = """
#include <fcntl.h>
__attribute__((constructor)) static void planted() { open(MARK, O_CREAT | O_WRONLY, 0600); }
"""
SMALL = """
#define KERNELS(suffix) \\
    void baton_attend_##suffix() {} void baton_write_##suffix() {} void baton_rotate_##suffix() {} \\
    void baton_linear_##suffix() {} void baton_norm_##suffix() {} void baton_gate_##suffix() {} \\
    void baton_head_##suffix() {} void baton_layer_##suffix() {} void baton_lookup_##suffix() {} \\
    void baton_encode_##suffix() {}
extern "C" { KERNELS(bf16) KERNELS(f32) void baton_pack() {} void baton_panel_bytes() {} }
"""
"""Compiles in a moment, and has every function."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "kernels.cpp").write_text(SMALL)
    monkeypatch.setattr(kernel_build, "HERE", tmp_path / "module")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    assert load_kernels(torch.float32) is not None
    return tmp_path / "cache"


def _plant(cache: Path) -> tuple[Path, Path]:
    """A library in the place of the compiled one, and the file that it makes when it is loaded."""
    (library,) = (cache / "kernels").glob("*.so")
    mark = cache.parent / "loaded"
    source = cache.parent / "planted.c"
    source.write_text(PLANTED.replace("MARK", f'"{mark}"'))
    library.unlink()
    os.system(f"g++ -x c -shared -fPIC -o {library} {source}")  # noqa: S605
    return library, mark


def test_a_library_is_compiled_once_and_nobody_else_reads_or_writes_it(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (library,) = (cache / "kernels").iterdir()
    assert library.stat().st_mode & 0o077 == 0
    with caplog.at_level(logging.INFO):
        assert load_kernels(torch.float32) is not None
    assert not caplog.records


@pytest.mark.parametrize("harm", ["folder", "kernels", "library"])
def test_what_others_may_have_written_is_not_loaded_and_kernels_are_compiled_elsewhere(
    cache: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    library, mark = _plant(cache)
    {"folder": cache, "kernels": cache / "kernels", "library": library}[harm].chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(torch.float32) is not None
    assert not mark.exists()
    assert "compiled at every start" in caplog.text
    assert "can be written by everybody" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_library_of_another_user_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    library, mark = _plant(cache)
    os.chown(library, 65534, 65534)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(torch.float32) is not None
    assert not mark.exists()
    assert "belongs to user 65534" in caplog.text


def test_a_link_in_place_of_a_library_is_not_followed(cache: Path) -> None:
    library, mark = _plant(cache)
    other = library.rename(cache.parent / "other.so")
    library.symlink_to(other)
    assert load_kernels(torch.float32) is not None
    assert not mark.exists()
