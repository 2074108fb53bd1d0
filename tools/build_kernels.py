"""Builds the CPU kernels that a wheel for Linux on x86-64 carries, in every variant.

    PYTHONPATH=src .venv/bin/python tools/build_kernels.py FOLDER

FOLDER gets a library for each variant, the digest of the sources and the tag of the wheel, which names the oldest C library
that they work with. Where there is no g++, or on another system, it is left without any, and the wheel compiles its kernels
at first use like a checkout. `tools/wheel_hook.py` puts the folder into the wheel.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from pathlib import Path

from baton.executor.cpu.kernel_build import DIGEST_NAME, VARIANTS, build, source_digest
from tools.wheel_hook import TAG_NAME

GLIBC = re.compile(rb"GLIBC_2\.(\d+)\0")
GLIBC_LEAST = 17
"""The oldest that any wheel is tagged for."""


def wheel_tag(libraries: list[Path]) -> str:
    """By the newest version of the C library of which one of them uses a function."""
    minors = [int(minor) for path in libraries for minor in GLIBC.findall(path.read_bytes())]
    return f"py3-none-manylinux_2_{max([GLIBC_LEAST, *minors])}_x86_64"


def why_not() -> str | None:
    """Why no kernels can be built here."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"this is {platform.system()} on {platform.machine()}, not Linux on x86_64"
    return None if shutil.which("g++") else "there is no g++ in PATH"


def build_all(folder: Path) -> str | None:
    """Empties the folder and builds; returns the reason where there are no kernels."""
    shutil.rmtree(folder, ignore_errors=True)
    if (reason := why_not()) is not None:
        return reason
    folder.mkdir(parents=True)
    made = [folder / f"{variant.name}.so" for variant in VARIANTS]
    for variant, path in zip(VARIANTS, made, strict=True):
        build("g++", variant.flags, path)
    (folder / DIGEST_NAME).write_text(source_digest(), encoding="utf-8")
    (folder / TAG_NAME).write_text(wheel_tag(made), encoding="utf-8")
    return None


if __name__ == "__main__":
    if (missing := build_all(Path(sys.argv[1]))) is not None:
        sys.stderr.write(f"the wheel carries no CPU kernels: {missing}\n")
