"""Kernels that come with the package: which variant a CPU gets, when they are left alone, and that the plainest computes."""

from __future__ import annotations

import ctypes
import logging
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tests.executor.cpu import test_native_kernels as against_torch
from tests.executor.cpu.test_kernel_cache import SMALL

from baton.executor.cpu import kernel_build
from baton.executor.cpu import native_kernels as native
from baton.executor.cpu.kernel_build import DIGEST_NAME, PREBUILT, VARIANTS, best_variant, build, cpu_features, source_digest
from baton.executor.cpu.native_kernels import NativeKernels, load_kernels, packed

ON_X86_64 = platform.system() == "Linux" and platform.machine() == "x86_64"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not ON_X86_64, reason="needs g++ on Linux on x86-64")

HASWELL = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
SKYLAKE_X = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
CPUS = {
    "x86-64": "fpu sse sse2",
    "x86-64-v3": f"sse2 {HASWELL}",
    "x86-64-v3-vnni": f"sse2 {HASWELL} avx_vnni",
    "x86-64-v4": f"sse2 {SKYLAKE_X}",
    "x86-64-v4-vnni": f"sse2 {SKYLAKE_X} avx512_vnni",
    "x86-64-v4-vnni-bf16": f"sse2 {SKYLAKE_X} avx512_vnni avx512_bf16 avx_vnni",
}
INTRINSIC = re.compile(r"\b_mm\w*\(|\b__m\d+\w*")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with kernels, of small sources, on a machine without a compiler."""
    (tmp_path / "kernels.cpp").write_text(SMALL)
    monkeypatch.setattr(kernel_build, "HERE", tmp_path)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / PREBUILT
    folder.mkdir()
    build("g++", (), tmp_path / "built.so")
    for variant in VARIANTS:
        shutil.copyfile(tmp_path / "built.so", folder / f"{variant.name}.so")
    (folder / DIGEST_NAME).write_text(source_digest())
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    return tmp_path


@pytest.mark.parametrize(("name", "flags"), CPUS.items())
def test_a_cpu_gets_the_best_variant_that_it_runs(name: str, flags: str) -> None:
    cpuinfo = f"processor\t: 0\nmodel name\t: some\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n"
    assert best_variant(cpu_features(cpuinfo)).name == name


def test_kernels_of_the_package_need_no_compiler(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load_kernels(torch.float32) is not None
    assert "native kernels: built for x86-64" in caplog.text
    assert "g++" not in caplog.text
    assert not (package / "cache").exists()


@pytest.mark.parametrize("changed", ["kernels.cpp", "more.h"])
def test_kernels_of_other_sources_are_left_alone(package: Path, changed: str, caplog: pytest.LogCaptureFixture) -> None:
    (package / changed).write_text(f"{SMALL}\n// changed")
    with caplog.at_level(logging.INFO):
        assert load_kernels(torch.float32) is None
    assert "are of other sources" in caplog.text
    assert "there is no g++ in PATH. torch does their work" in caplog.text


def test_kernels_that_cannot_be_loaded_are_compiled(
    package: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in (package / PREBUILT).glob("*.so"):
        library.write_bytes(b"no library")
    monkeypatch.undo()
    monkeypatch.setattr(kernel_build, "HERE", package)
    monkeypatch.setenv("BATON_CACHE", str(package / "cache"))
    with caplog.at_level(logging.INFO):
        assert load_kernels(torch.float32) is not None
    assert "cannot be loaded" in caplog.text
    assert "compiled native kernels" in caplog.text


def test_all_sources_of_the_folder_are_in_the_library_and_in_its_digest(package: Path) -> None:
    before = source_digest()
    (package / "second.cpp").write_text('extern "C" int baton_second() { return 2; }')
    assert source_digest() != before
    build("g++", (), package / "both.so")
    library = ctypes.CDLL(str(package / "both.so"))
    assert library.baton_second() == 2
    assert library.baton_linear_f32 is not None
    assert not list(package.glob("*.o"))


def test_without_vector_extensions_the_sources_use_no_intrinsics() -> None:
    """So that they compile where there are none: on other architectures."""
    for source in kernel_build.sources():
        command = ["g++", "-E", "-std=c++17", "-fopenmp", "-march=x86-64", str(source)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        ours, mine = [], False
        for line in lines:
            if line.startswith("# "):
                mine = str(kernel_build.HERE) in line
            elif mine:
                ours.append(line)
        assert len(ours) > 100
        assert not [line for line in ours if INTRINSIC.search(line)]


@pytest.fixture(scope="module", params=[VARIANTS[-1], *(pytest.param(one, marks=pytest.mark.slow) for one in VARIANTS[:-1])])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one variant, the plainest in every run of the tests."""
    if not request.param.needs <= cpu_features(Path("/proc/cpuinfo").read_text(encoding="utf-8")):
        pytest.skip(f"this CPU does not run {request.param.name}")
    made = tmp_path_factory.mktemp(request.param.name) / "kernels.so"
    build("g++", request.param.flags, made)
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_kernels_of_every_variant_compute_what_those_for_this_machine_do(
    library: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """But for rounding, which differs between instruction sets."""
    ours, theirs = load_kernels(dtype), NativeKernels(native._opened(library), dtype)
    assert ours is not None
    draw = torch.Generator().manual_seed(0)
    weight = packed(torch.randn(96, 64, generator=draw).to(dtype))
    norm = torch.rand(64, generator=draw)
    for rows in (1, 7):
        x = torch.randn(rows, 64, generator=draw).to(dtype)
        for compute in (
            lambda kernels, x=x: kernels.linear(x, weight, None),
            lambda kernels, x=x: kernels.head(x, weight),
            lambda kernels, x=x: kernels.norm(x, norm, 1e-5),
            lambda kernels, x=x: kernels.gate(x, 0),
            lambda kernels, x=x: kernels.gate(x, 1),
        ):
            torch.testing.assert_close(compute(theirs), compute(ours), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_every_variant_is_that_of_torch(library: Path, dtype: torch.dtype) -> None:
    for seed in range(6):
        against_torch.test_native_and_gathered_attention_agree(NativeKernels(native._opened(library), dtype), seed)
