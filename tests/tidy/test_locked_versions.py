"""The versions that the set-up installs: exact, with hashes, complete, and for serving no more than serving needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.lock import SERVE_LOCK, TEST_LOCK, serving

ROOT = Path(__file__).parents[2]
UNHASHED = "torch"
ENTRY = re.compile(r"^([\w.-]+)==([\w.+!-]+)(?: ; .+?)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)
RENEW = "write it anew with tools/lock.py"


def _constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def _locked(file: str) -> dict[str, Version]:
    text = (ROOT / file).read_text()
    entries = ENTRY.findall(text)
    locked = {str(canonicalize_name(name)): Version(version) for name, version, _ in entries}
    assert len(locked) == len(entries) == text.count("==") - text.count(" == ")
    return locked


def _requirements() -> list[Requirement]:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"]
    wanted = [*declared["project"]["dependencies"], *declared["build-system"]["requires"]]
    wanted += [line for extra in ("dev", "plot", "valkey", "mooncake", "cuda") for line in extras[extra]]
    return [Requirement(line) for line in wanted]


def test_every_version_has_a_hash_but_torch_and_is_in_one_of_the_locks() -> None:
    served, tested = _locked(SERVE_LOCK), _locked(TEST_LOCK)
    assert not set(served) & set(tested)
    assert served | tested | {UNHASHED: _constraints()[UNHASHED]} == _constraints(), RENEW


def test_what_serves_and_nothing_else_is_in_the_lock_for_serving() -> None:
    assert set(_locked(SERVE_LOCK)) == serving(), RENEW


def test_every_requirement_is_among_them() -> None:
    pinned = _constraints()
    for wanted in _requirements():
        assert pinned[canonicalize_name(wanted.name)] in wanted.specifier, wanted


def test_no_package_that_serves_brings_torch() -> None:
    """torch's default build may be gigabytes of CUDA libraries: it is installed only where somebody chose a build."""
    from importlib.metadata import requires

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = [*declared, *(line for name in serving() for line in requires(name) or ())]
    found = [line for line in map(Requirement, lines) if line.name in ("torch", "triton")]
    assert not [line for line in found if line.marker is None or "extra" not in str(line.marker)]


def test_the_template_engine_is_one_whose_sandbox_holds() -> None:
    (jinja,) = (wanted for wanted in _requirements() if wanted.name == "jinja2")
    assert "3.1.5" not in jinja.specifier


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("target", "needs_more"), [("serve", False), ("test", True)])
def test_only_tests_need_their_tools_mooncake_and_a_browser(target: str, needs_more: bool, tmp_path: Path) -> None:
    command = ["make", "--dry-run", f"VENV={tmp_path / 'none'}", target]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert SERVE_LOCK in steps
    assert "tools/torch_setup.py" in steps
    for more in (TEST_LOCK, "tools/mooncake-libraries.sh", "tools/browser.sh"):
        assert (more in steps) is needs_more
