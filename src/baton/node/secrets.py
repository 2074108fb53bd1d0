"""The secret behind the prefix cache's names, kept in a file so that names are stable over restarts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from baton.core.errors import BatonError

SECRET_BYTES = 32


class BadSecret(BatonError):
    """The file with the secret is there but does not hold one."""


def prefix_secret(folder: Path) -> bytes:
    """Read the secret, or make it. Of two processes that make it at once, both end up with the same one."""
    path = folder / "prefix.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_once(path, secrets.token_bytes(SECRET_BYTES))
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise BadSecret(f"{path} holds {len(secret)} bytes instead of {SECRET_BYTES}; remove it to have a new one made")
    return secret


def _write_once(path: Path, secret: bytes) -> None:
    own = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
    try:
        os.link(own, path)  # fails where another was first, and then the other's counts
    except FileExistsError:
        pass
    finally:
        own.unlink()
