"""The tests that others wrote for JSON schemas: fetched whole or not at all, by their hash, without building anything."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from tools import json_schema_suite
from tools.json_schema_suite import BACKEND, NAME, TESTS, VERSION, FetchFailed, NotReached, suite

RAN = "ran"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, alone, in which pip looks for packages."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_" + "INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def source_archive(registry: Path) -> str:
    """A package of that name, which would leave a mark if any of it were run; returns its hash."""
    path = registry / f"{NAME}-{VERSION}.tar.gz"
    mark = f"open({str(registry / RAN)!r}, 'w')"
    files = {
        f"{NAME}-{VERSION}/setup.py": mark,
        f"{NAME}-{VERSION}/pyproject.toml": f'[build-system]\nrequires = ["nowhere"]\nbuild-backend = "{BACKEND}.build"\n',
        f"{NAME}-{VERSION}/{BACKEND}/__init__.py": mark,
        f"{TESTS}/required.json": "[]",
        f"{TESTS}/optional/format.json": "[]",
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_required_tests_are_kept_and_nothing_of_the_package_is_run(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_schema_suite, "SHA256", source_archive(registry))
    kept = suite(tmp_path / "build" / "suite")
    assert [path.name for path in kept.iterdir()] == ["required.json"]
    assert not (registry / RAN).exists()
    assert [path.name for path in kept.parent.iterdir()] == ["suite"], "nothing else is left"
    for path in registry.iterdir():
        path.unlink()
    assert suite(kept) == kept, "once is enough"


def test_an_archive_with_another_hash_is_not_opened(registry: Path, tmp_path: Path) -> None:
    source_archive(registry)
    with pytest.raises(FetchFailed, match="DO NOT MATCH THE HASHES"):
        suite(tmp_path / "build" / "suite")
    assert not list((tmp_path / "build").iterdir())


def test_without_a_registry_it_is_said_that_none_was_reached(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReached, match="No matching distribution found"):
        suite(tmp_path / "build" / "suite")
