"""Conversations of tool calls with the official npm clients, in a `node` process.

The packages are installed with the versions and hashes of `agents_npm/package-lock.json` into Baton's cache, once for each
such file.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from baton.executor.cache_folder import cache_folder, private_cache
from benchmarks.agent_script import AgentEvent, AgentScript, Asked, Called, ConversationFailed

SOURCE = Path(__file__).parent / "agents_npm"
CACHE = "npm"
COMPLETE = ".complete"
"""A file that is written when the packages are there."""
INSTALL_S_MAX = 300
END_S_MAX = 30
SHOWN_CHARS = 300


class NpmUnavailable(Exception):
    """The clients cannot be had on this machine; the message says why."""


class NpmFailed(Exception):
    """npm did not install the packages; the message ends with what it said."""


def _named() -> str:
    return f"agents-{blake2b((SOURCE / 'package-lock.json').read_bytes(), digest_size=8).hexdigest()}"


def installed() -> Path | None:
    """The folder with the packages, if they were installed before and there is a node; nothing is fetched."""
    folder = cache_folder() / CACHE / _named()
    return folder if shutil.which("node") and (folder / COMPLETE).exists() else None


def install() -> Path:
    """The folder with the packages, which are fetched if need be. Raises NpmUnavailable, NpmFailed."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise NpmUnavailable(f"{program} is not on the PATH")
    if (found := installed()) is not None:
        return found
    folder = private_cache(CACHE) / _named()
    folder.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCE / name, folder / name)
    command = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise NpmFailed(f"npm did not end within {INSTALL_S_MAX} s") from None
    if done.returncode:
        raise NpmFailed(f"npm ended with code {done.returncode}: {done.stderr[-SHOWN_CHARS:]}")
    (folder / COMPLETE).touch()
    return folder


class _Line(msgspec.Struct):
    asked: int | None = None
    called: int | None = None
    name: str = ""
    arguments: str = ""
    id: str = ""
    failed: str | None = None


def npm_calls(script: AgentScript, folder: Path) -> Iterator[AgentEvent]:
    """Raises ConversationFailed. `folder` has the packages; node looks for those of a script from stdin where it runs."""
    command = ("node", "--input-type=module", "-", msgspec.json.encode(script).decode())
    with (
        (SOURCE / "agents.mjs").open("rb") as source,
        subprocess.Popen(command, cwd=folder, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        try:
            for line in process.stdout or ():
                yield _event(line)
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            raise ConversationFailed("node did not end after its last line") from None
        finally:
            if process.poll() is None:
                process.kill()
    if process.returncode:
        raise ConversationFailed(f"node ended with code {process.returncode}")


def _event(line: bytes) -> AgentEvent:
    try:
        said = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError:
        raise ConversationFailed(f"node: {line[:SHOWN_CHARS].decode(errors='replace').strip()}") from None
    if said.asked is not None:
        return Asked(said.asked)
    if said.called is not None:
        return Called(said.called, said.name, said.arguments, said.id)
    raise ConversationFailed(said.failed or "node said nothing that is known")
