"""The versions that the set-up installs: exact, with hashes, and complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
UNHASHED = "torch"
ENTRY = re.compile(r"^([\w.-]+)==([\w.+!-]+)(?: ; .+?)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def _constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def _requirements() -> list[Requirement]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"]
    wanted = [*declared["project"]["dependencies"], *declared["build-system"]["requires"]]
    wanted += [line for extra in ("dev", "plot", "valkey", "mooncake") for line in extras[extra]]
    return [Requirement(line) for line in wanted]


def test_every_version_has_a_hash_but_torch() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = ENTRY.findall(text)
    locked = {canonicalize_name(name): Version(version) for name, version, _ in entries}
    assert len(locked) == len(entries) == text.count("==") - text.count(" == ")
    assert locked | {UNHASHED: _constraints()[UNHASHED]} == _constraints(), "write it anew with tools/lock.py"


def test_every_requirement_is_among_them() -> None:
    pinned = _constraints()
    for wanted in _requirements():
        assert pinned[canonicalize_name(wanted.name)] in wanted.specifier, wanted


def test_the_template_engine_is_one_whose_sandbox_holds() -> None:
    (jinja,) = (wanted for wanted in _requirements() if wanted.name == "jinja2")
    assert "3.1.5" not in jinja.specifier
