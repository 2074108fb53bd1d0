"""Installs torch for `make serve`, if none is there; the CUDA build on a machine without an NVIDIA GPU only if told to.

    PYTHONPATH=src .venv/bin/python tools/torch_setup.py [any]

A torch that is installed already is kept. Else pip is asked what it would install for the version in constraints.txt: where
that is the CUDA build and no NVIDIA GPU is here, this says what it costs and how to get the CPU build, and exits 1; with
`any` it installs what is on offer. Only torch itself is installed; what it needs comes with requirements-serve.lock.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from baton.executor.torch_build import SELECTOR, TorchUnusable, has_nvidia_gpu, need_torch

ROOT = Path(__file__).parents[1]
CUDA_PACKAGE = re.compile(r"(?:nvidia|cuda)-[\w-]+")
CUDA_VERSION = re.compile(r"\+cu\d+$")
CUDA_DISK_GB = 5.4
"""On disk: the CUDA build of torch 2.13.0 for Linux x86-64 with all that it needs."""
SIZE_S_MAX = 10
PIP = (sys.executable, "-m", "pip")
QUIETLY = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--no-deps")


@dataclass(frozen=True)
class TorchOffer:
    """What pip would install."""

    version: str
    is_cuda: bool
    bytes: int | None = None
    """Of its file; None where the registry does not tell."""


@dataclass(frozen=True)
class TakeOffer:
    remark: str | None = None


@dataclass(frozen=True)
class LeaveOffer:
    why: str


def offer_in(report: Mapping[str, Any]) -> TorchOffer:
    """What a report of `pip install --dry-run --report` says about torch."""
    (found,) = [one["metadata"] for one in report["install"] if one["metadata"]["name"].lower() == "torch"]
    is_linux = report["environment"]["platform_system"] == "Linux"
    needed = [line for line in found.get("requires_dist", ()) if is_linux and "extra ==" not in line]
    is_cuda = any(map(CUDA_PACKAGE.match, needed)) or CUDA_VERSION.search(found["version"]) is not None
    return TorchOffer(found["version"], is_cuda)


def decide(offer: TorchOffer, has_gpu: bool, takes_any: bool, python: str) -> TakeOffer | LeaveOffer:
    if offer.is_cuda and not has_gpu and not takes_any:
        return LeaveOffer(_why_left(offer, python))
    if has_gpu and not offer.is_cuda:
        return TakeOffer(
            f"this machine has an NVIDIA GPU, but torch {offer.version}, the one on offer, serves on the CPU only"
        )
    return TakeOffer(f"torch {offer.version} is the CUDA build: several gigabytes" if offer.is_cuda else None)


def _why_left(offer: TorchOffer, python: str) -> str:
    size = "" if offer.bytes is None else f" ({offer.bytes / 1e6:,.0f} MB to download)"
    return f"""\
torch is not installed, and the only torch {offer.version} on offer here is the CUDA build{size}:
with its CUDA libraries it takes about {CUDA_DISK_GB} GB of disk, and this machine has no NVIDIA GPU.

  for the CPU build: the pip command for the CPU that {SELECTOR} shows,
                     with {python} -m pip for pip and torch=={offer.version.partition("+")[0]} for torch; then make again
  for this one:      TORCH=any make serve
"""


def pinned() -> str:
    (line,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    return line


def asked_offer(requirement: str) -> TorchOffer:
    """Ask pip, which installs nothing, and look up the size of the file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "install", *QUIETLY, "--dry-run", "--ignore-installed", "--report", str(report), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"pip finds no {requirement}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
        found = json.loads(report.read_text())
    offer = offer_in(found)
    return replace(offer, bytes=_size(found["install"][0]["download_info"]["url"]))


def _size(url: str) -> int | None:
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SIZE_S_MAX) as answer:  # noqa: S310
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None  # only a number in a message


def installed() -> str | None:
    """The version that is there; None where there is none that Baton can use."""
    try:
        need_torch()
        return version("torch")
    except (TorchUnusable, PackageNotFoundError):
        return None


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["any"]):
        sys.stderr.write(f"TORCH can be 'any' or left out, not {' '.join(arguments)!r}\n")
        return 2
    requirement, there = pinned(), installed()
    if there is not None:
        if there.partition("+")[0] != requirement.partition("==")[2]:
            sys.stderr.write(f"torch {there} is installed and is kept; tested is {requirement}\n")
        return 0
    match decide(asked_offer(requirement), has_nvidia_gpu(), arguments == ["any"], sys.executable):
        case LeaveOffer(why):
            sys.stderr.write(f"\n{why}\n")
            return 1
        case TakeOffer(remark):
            if remark is not None:
                sys.stderr.write(f"{remark}\n")
    return subprocess.run([*PIP, "install", *QUIETLY, "--no-compile", requirement], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
