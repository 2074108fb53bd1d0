"""Secrets that this machine makes and keeps in files: for the keys of the prefix cache, and for a local cluster."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from pathlib import Path

from baton.api.home_folders import expanded
from baton.executor.private_files import check_folder, private_folder, read_private_file
from baton.kv.file_store import prepare_folder
from baton.kv.store import BadStore, parse_url
from baton.wire.keyfile import KEY_BYTES, read_key, write_key

log = logging.getLogger("baton.node")


def prefix_secret(folder: Path) -> bytes:
    """The secret of prefix cache keys, kept so that they are stable over restarts."""
    return kept_secret(folder / "prefix.key", "KV that was stored under the old one is not found")


def shared_prefix_secret(cluster_key: bytes) -> bytes:
    """The same for all holders of the cluster key, so that a router computes the prefix keys of its instances."""
    return hashlib.blake2b(key=cluster_key, digest_size=KEY_BYTES, person=b"baton-prefixes").digest()


def store_key(store: str, folder: Path) -> str:
    """Replaces a cluster key where a store has none: all users of the store get the same prefix keys.

    It is kept with the store where that is a folder, else in `folder`. A reader of this file could read the stored KV too.
    Raises BadStore where the store's folder cannot be made, UnsafeFile where another user may write there.
    """
    url = parse_url(store)
    if url.kind == "file":
        folder = expanded(url.path, BadStore)
        prepare_folder(str(folder))
        check_folder(folder)  # who may write there can forge KV
    return prefix_secret(folder).hex()


def kept_secret(path: Path, when_replaced: str) -> bytes:
    """Read the secret, or make it. Two processes that make it at once get the same one.

    A damaged file is replaced (of two processes that do so, the last one's secret stays). Where the folder cannot be
    written, the secret changes with every start. Raises UnsafeFile where another user may have written the file.
    """
    made = secrets.token_bytes(KEY_BYTES)
    try:
        if not path.exists():
            private_folder(path.parent)
            _write(path, made, replace=False)
        check_folder(path.parent)
        found = read_key(read_private_file(path))
        if found is None:
            log.warning("%s is damaged; a new key takes its place, and %s", path, when_replaced)
            _write(path, made, replace=True)
            found = read_key(read_private_file(path))
    except OSError as error:
        log.warning("cannot keep the key in %s: %s", path, error)
        return made
    return found or made


def _write(path: Path, secret: bytes, *, replace: bool) -> None:
    own = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(write_key(secret))
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(own, path)
        else:
            os.link(own, path)
    except FileExistsError:
        pass  # another process was first; its secret is used
    finally:
        own.unlink(missing_ok=True)
