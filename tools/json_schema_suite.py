"""Prints the folder with JSON-Schema-Test-Suite's required tests of draft 2020-12, which it fetches once.

    .venv/bin/python tools/json_schema_suite.py

They are in the source archive of the package `jsonschema`, which pip downloads and takes only with the hash that is known
here. For a source archive pip asks the package's build backend what it holds; a stand-in for that backend answers, so that
nothing is built, no code but ours is run, and nothing else is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "json-schema-suite"
"""Git ignores it."""
NAME, VERSION = "jsonschema", "4.25.1"
SHA256 = "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85"
TESTS = f"{NAME}-{VERSION}/json/tests/draft2020-12"
BACKEND = "hatchling"
"""What that package names as its build backend."""
STAND_IN = f'''"""Says what pip wants to know of a source archive before it keeps it."""

import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{NAME}-{VERSION}.dist-info"
    pathlib.Path(folder, name).mkdir()
    pathlib.Path(folder, name, "METADATA").write_text("Metadata-Version: 2.1\\nName: {NAME}\\nVersion: {VERSION}\\n")
    return name
'''
NOT_REACHED = re.compile(r"No matching distribution found")
"""What pip says in the end where no registry answers, or none has the package."""
DOWNLOAD_S_MAX = 300


class NotReached(Exception):
    """There is no network, or no registry with that package."""


class FetchFailed(Exception):
    """pip could not get the package; the message says why."""


def suite(kept: Path = KEPT) -> Path:
    """The folder of the tests, fetched if it is not there. Raises NotReached or FetchFailed."""
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".suite-", dir=kept.parent) as name:
        folder = Path(name)
        tests = _unpacked(_download(folder), folder / "tests")
        try:
            tests.rename(kept)  # whole, or not at all
        except OSError:
            if not kept.is_dir():
                raise
    return kept


def _download(folder: Path) -> Path:
    wanted, stand_in = folder / "requirements.txt", folder / "stand-in" / BACKEND
    wanted.write_text(f"{NAME}=={VERSION} --hash=sha256:{SHA256}\n")
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "build.py").write_text(STAND_IN)
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"),
        *("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"),
        *("--dest", str(folder), "--requirement", str(wanted)),
    ]
    variables = {**os.environ, "PYTHONPATH": str(stand_in.parent)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=DOWNLOAD_S_MAX, check=False)
    if done.returncode != 0:
        raise (NotReached if NOT_REACHED.search(done.stderr) else FetchFailed)(done.stderr.strip())
    (archive,) = folder.glob("*.tar.gz")
    return archive


def _unpacked(archive: Path, target: Path) -> Path:
    """The files of the draft's own folder: those below it are of optional tests."""
    target.mkdir()
    with tarfile.open(archive) as packed:
        for member in packed:
            path = Path(member.name)
            if member.isfile() and path.parent.as_posix() == TESTS and path.suffix == ".json":
                content = packed.extractfile(member)
                if content is not None:
                    with (target / path.name).open("wb") as file:
                        shutil.copyfileobj(content, file)
    if not any(target.iterdir()):
        raise FetchFailed(f"{archive.name} holds no tests in {TESTS}")
    return target


def main() -> int:
    try:
        sys.stdout.write(f"{suite()}\n")
    except (NotReached, FetchFailed) as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
