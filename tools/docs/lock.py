"""Writes tools/docs/requirements.lock: the versions of constraints.txt beside it, with the hashes of their wheels.

python -m tools.docs.lock ADDRESS        in the root of the checkout; the address as for tools/lock.py
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.lock import locked

FOLDER = Path(__file__).parent
HEAD = "# What `make docs` installs, with the hashes of every wheel. Written by tools/docs/lock.py from constraints.txt.\n"


def pins() -> list[tuple[str, str]]:
    lines = (FOLDER / "constraints.txt").read_text().splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(name, version) for name, version in found]


def main(address: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        entries = pool.map(lambda pin: locked(address.rstrip("/"), *pin), pins())
        (FOLDER / "requirements.lock").write_text(HEAD + "".join(entries))


if __name__ == "__main__":
    main(sys.argv[1])
