"""Serves the built-in model from nothing but the wheel, and says what that took.

    .venv/bin/python tools/try_wheel.py [--python PYTHON] [--models FOLDER]

Builds the wheel and the source archive, makes an empty virtual environment, installs the wheel with what it depends on and
torch, starts `baton serve` there with that environment's programs alone in PATH (no compiler), asks a question and stops it.
Where this runs as root, the server runs as `nobody`, if that user may read the Python that the environment is made of.
`--models` is a BATON_CACHE that may have the built-in model already; else it is fetched and converted.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOBODY = "nobody"
SERVED = re.compile(r"is served at (http://\S+)")
KERNELS = re.compile(r"native kernels: built for (\S+)")
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "Paris"
READY_S_MAX, ANSWER_S_MAX, STOP_S_MAX = 300, 120, 60
PASSED_ON = ("PIP_", "SSL_", "LANG")
"""Starts of the names of variables that the new environment gets of ours."""


class Failed(Exception):
    """What was tried did not work; the message says what and how."""


@dataclass(frozen=True)
class TriedWheel:
    """What it took, in MB and seconds."""

    wheel_mb: float
    environment_mb: int
    torch_mb: int
    install_s: float
    start_s: float
    """From the command to the first answer; with the built-in model fetched and converted unless it was there."""
    user: str
    answer: str
    kernels: str
    """Which of the wheel's CPU kernels were used."""
    log: str

    def __str__(self) -> str:
        return (
            f"wheel {self.wheel_mb:.1f} MB; environment {self.environment_mb} MB, of which torch {self.torch_mb} MB; "
            f"installed in {self.install_s:.0f} s, first answer {self.start_s:.0f} s after the start, as {self.user}, "
            f"kernels {self.kernels}: {self.answer!r}"
        )


def build(folder: Path) -> Path:
    """The wheel, with the kernels that can be built here, and the source archive; returns the wheel."""
    kernels = folder.with_name("kernels")
    variables = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "WHEEL_KERNELS": str(kernels)}
    _run([sys.executable, str(ROOT / "tools" / "build_kernels.py"), str(kernels)], variables)
    _run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], variables)
    (wheel,) = folder.glob("*.whl")
    (_,) = folder.glob("*.tar.gz")
    return wheel


def install(wheel: Path, venv: Path, python: str, variables: Mapping[str, str]) -> None:
    """The wheel, its dependencies in the tested versions, and the torch that the set-up would take."""
    _run([python, "-m", "venv", str(venv)], variables)
    inside = [str(venv / "bin" / "python")]
    pip = [*inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], variables)
    if next(venv.glob("lib/python*/site-packages/torch"), None) is not None:
        raise Failed("the wheel brought torch with it")
    _run([*inside, str(ROOT / "tools" / "torch_setup.py")], {**variables, "PYTHONPATH": str(ROOT / "src")})
    _run([*pip, "torch"], variables)


@contextmanager
def serving(venv: Path, home: Path, user: str | None, variables: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """A server of the built-in model; yields its address and its log. It must stop in order at the end."""
    log = home / "log"
    command = [str(venv / "bin" / "baton"), "serve", "--port", "0", "--log-level", "info"]
    as_user = {} if user is None else {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=home, env=dict(variables), stdout=out, stderr=out, **as_user)  # type: ignore[call-overload]
    try:
        yield _address(process, log), log
        process.send_signal(signal.SIGTERM)
        if process.wait(STOP_S_MAX) != 0:
            raise Failed(f"the server ended with code {process.returncode}:\n{log.read_text()}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline_s:
        if found := SERVED.search(log.read_text()):
            return found[1]
        if process.poll() is not None:
            raise Failed(f"the server ended with code {process.returncode}:\n{log.read_text()}")
        time.sleep(0.1)
    raise Failed(f"the server was not ready within {READY_S_MAX} s:\n{log.read_text()}")


def ask(url: str) -> str:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}]}
    request = urllib.request.Request(  # noqa: S310  of the server started here
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S_MAX) as answer:  # noqa: S310
        return str(json.load(answer)["choices"][0]["message"]["content"])


def try_wheel(folder: Path, python: str, models: Path | None) -> TriedWheel:
    """All of it, in an empty folder. Raises Failed where a step does not work."""
    venv, home = folder / "venv", folder / "home"
    folder.chmod(0o755)
    home.mkdir()
    inherited = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    variables = {**inherited, "HOME": str(home), "PATH": os.environ["PATH"]}
    wheel = build(folder / "dist")
    began_s = time.monotonic()
    install(wheel, venv, python, variables)
    install_s = time.monotonic() - began_s
    user = other_user(venv / "bin" / "python")
    if user is not None:
        models = None if models is None else _copied(models, home)
        _give(home, pwd.getpwnam(user).pw_uid)
    alone = {**variables, "PATH": str(venv / "bin"), "BATON_CACHE": str(models or home / "cache")}
    if shutil.which("g++", path=alone["PATH"]) is not None:
        raise Failed("there is a compiler in the new environment")
    began_s = time.monotonic()
    with serving(venv, home, user, alone) as (url, log):
        answer = ask(url)
        start_s = time.monotonic() - began_s
    if ANSWER not in answer:
        raise Failed(f"the answer has no {ANSWER} in it: {answer}")
    torch_mb = sum(_megabytes(part) for part in venv.glob("lib/python*/site-packages/torch"))
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    said = log.read_text()
    found = KERNELS.search(said)
    kernels = "none" if found is None else found[1]
    return TriedWheel(
        wheel.stat().st_size / 1e6, _megabytes(venv), torch_mb, install_s, start_s, name, answer, kernels, said
    )


def _copied(models: Path, home: Path) -> Path:
    """A cache with the same models: another user may neither read nor lock those of ours."""
    cache = home / "cache"
    if (models / "models").is_dir():
        shutil.copytree(models / "models", cache / "models")
    return cache


def _give(folder: Path, user_id: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user_id, -1, follow_symlinks=False)


def other_user(python: Path) -> str | None:
    """`nobody`, where this is root and that user may run a Python that serves."""
    if os.geteuid() != 0:
        return None
    account = pwd.getpwnam(NOBODY)
    probe = [str(python), "-c", "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"]
    try:
        done = subprocess.run(probe, check=False, capture_output=True, user=NOBODY, group=account.pw_gid, extra_groups=[])
    except OSError:
        return None
    return NOBODY if done.returncode == 0 else None


def _megabytes(folder: Path) -> int:
    return round(sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 1e6)


def _run(command: Sequence[str], variables: Mapping[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=dict(variables), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the Python that the environment is made of")
    parser.add_argument("--models", type=Path, help="a BATON_CACHE that may have the built-in model already")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-wheel-") as folder:
        try:
            sys.stdout.write(f"{try_wheel(Path(folder), given.python, given.models)}\n")
        except Failed as failure:
            sys.stderr.write(f"{failure}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
