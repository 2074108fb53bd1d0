"""The wheel: it has what serves, says what it needs, and serves the built-in model by itself, without a compiler."""

from __future__ import annotations

import ast
import os
import pwd
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton import __version__
from baton.executor.cache_folder import cache_folder
from baton.executor.cpu.kernel_build import DIGEST_NAME, PREBUILT, VARIANTS, best_variant, cpu_features
from tools.build_kernels import GLIBC_LEAST, wheel_tag
from tools.try_wheel import ANSWER, other_user, try_wheel

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
GIVEN_BY_HAND = {"mooncake": "mooncake-transfer-engine-non-cuda"}
"""Distributions of modules that may not be installed here."""
OF_THE_SYSTEM = Path("/usr/bin/python3")
"""A Python that all users can run, where ours is in somebody's home folder."""


def _built(folder: Path, kernels: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "WHEEL_KERNELS": str(kernels)})
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Without kernels, as on a machine that has no compiler."""
    folder = tmp_path_factory.mktemp("dist")
    return zipfile.ZipFile(_built(folder, folder / "kernels"))


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    here = {path.relative_to(SOURCE).as_posix() for path in (SOURCE / "baton").rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    packed = {name for name in wheel.namelist() if name.startswith("baton/")}
    assert packed == here
    assert {"baton/executor/cpu/kernels.cpp", "baton/node/static/index.html"} <= packed


def test_kernels_that_were_built_are_in_the_wheel_which_is_tagged_for_their_platform(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    names = {f"{variant.name}.so" for variant in VARIANTS} | {DIGEST_NAME}
    for name in names:
        (kernels / name).write_text(name)
    (kernels / "wheel.tag").write_text("py3-none-manylinux_2_27_x86_64")
    built = _built(tmp_path, kernels)
    assert built.name == f"baton_serve-{__version__}-py3-none-manylinux_2_27_x86_64.whl"
    with zipfile.ZipFile(built) as archive:
        folder = f"baton/executor/cpu/{PREBUILT}/"
        assert {name.removeprefix(folder) for name in archive.namelist() if name.startswith(folder)} == names
        (told,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in told


def test_the_tag_names_the_oldest_c_library_that_has_all_functions(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.27\0GLIBC_2.14\0GLIBCXX_3.4.30\0")
    assert wheel_tag([library]) == "py3-none-manylinux_2_27_x86_64"
    library.write_bytes(b"\0GLIBC_2.2.5\0")
    assert wheel_tag([library]) == f"py3-none-manylinux_2_{GLIBC_LEAST}_x86_64"


def test_its_metadata_name_version_licence_and_no_torch(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    told = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert told["Version"] == __version__
    assert told["License-Expression"] == "Apache-2.0"
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    needed = [Requirement(line) for line in told.get_all("Requires-Dist") or ()]
    assert not [line for line in needed if line.name in ("torch", "triton") and "extra" not in str(line.marker)]
    assert "baton = baton.cli.main:run" in wheel.read(f"{folder}/entry_points.txt").decode()


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.tar.gz")
    return built


def test_the_source_archive_has_what_a_build_needs_and_nothing_that_git_ignores(source_archive: Path) -> None:
    with tarfile.open(source_archive) as archive:
        top = source_archive.name.removesuffix(".tar.gz")
        packed = {member.name.removeprefix(f"{top}/") for member in archive if not member.isdir()}
    here = {path.relative_to(ROOT).as_posix() for path in (SOURCE / "baton").rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    assert {name for name in packed if name.startswith("src/")} == here
    assert {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= packed
    assert top == f"baton_serve-{__version__}"
    listed = {name for name in packed if name != "PKG-INFO"}
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"], cwd=ROOT, input="\n".join(sorted(listed)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ignored.stdout == ""


def test_a_wheel_built_from_the_source_archive_alone_is_the_same_one(
    wheel: zipfile.ZipFile, source_archive: Path, tmp_path: Path
) -> None:
    """Without a network: what builds it is installed."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source_archive)], cwd=tmp_path, check=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as again:
        assert {one.filename: one.CRC for one in again.infolist()} == {one.filename: one.CRC for one in wheel.infolist()}


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"baton", "_typeshed"}


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines]
    declared = {canonicalize_name(Requirement(line).name) for line in [*project["dependencies"], *extras]}
    known = packages_distributions()
    undeclared = set()
    for path in sorted((SOURCE / "baton").rglob("*.py")):
        for module in _imported(path):
            owners = known.get(module, [GIVEN_BY_HAND.get(module, module)])
            if not declared & {canonicalize_name(owner) for owner in owners}:
                undeclared.add(f"{path.relative_to(SOURCE)} imports {module}")
    assert not undeclared


@pytest.mark.slow
def test_a_new_environment_with_only_the_wheel_serves_the_built_in_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a folder of pytest, which other users cannot read: as root, another one serves."""
    python = OF_THE_SYSTEM if other_user(OF_THE_SYSTEM) else Path(sys.executable)
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # only what is imported is compiled, when it is
    with tempfile.TemporaryDirectory(prefix="baton-wheel-") as folder:
        tried = try_wheel(Path(folder), str(python), cache_folder())
    assert tried.user == (other_user(python) or pwd.getpwuid(os.geteuid()).pw_name)
    assert ANSWER in tried.answer
    assert tried.kernels == best_variant(cpu_features(Path("/proc/cpuinfo").read_text(encoding="utf-8"))).name
    assert "no native kernels" not in tried.log
    assert "Traceback" not in tried.log


def test_the_wheel_is_made_with_kernels_by_one_command() -> None:
    planned = subprocess.run(["make", "--dry-run", "dist"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "tools/build_kernels.py build/kernels\n" in planned
    (packing,) = (line for line in planned.splitlines() if line.endswith("-m hatchling build"))
    assert packing.startswith(f"WHEEL_KERNELS={ROOT}/build/kernels ")


def test_the_wheel_is_tried_with_the_python_that_make_is_given() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "try-wheel", "PYTHON=/some/python"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "tools/try_wheel.py --python /some/python\n" in planned.stdout
