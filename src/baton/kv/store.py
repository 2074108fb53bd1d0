"""Stores of KV that outlive an instance: the protocol of a store, and opening one by its address.

A store moves opaque objects by name. It knows nothing of blocks, models or tenants. It does not inspect objects and does not
promise to return them intact: the caller verifies what it fetches (`wire.envelope`). The rules for every kind:

- Methods block, each no longer than the time-out that the store was opened with, and are called from several threads at
  once. (A file system that hangs cannot be interrupted: the calling thread is lost, and its owner deals with that.)
- An object is complete or absent, as far as the store can ensure it.
- A missing object and a full store are ordinary results. Trouble of the store itself raises StoreFailed.
- Names are those of `wire.envelope.object_name`, in the order of their chain: an object is useless without those before it.

Adding a kind: a module with a function that takes (StoreUrl, timeout_s, limit_bytes) and returns a Store, and one line each
here, in `KINDS` and in the factories of the contract's tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from baton.core.errors import BatonError, SetupError

KINDS = ("file", "valkey", "mooncake")

MISSING = -1
OVERSIZED = -2

_SCHEMES = {
    "file": "file", "valkey": "valkey", "redis": "valkey", "valkeys": "valkey", "rediss": "valkey", "mooncake": "mooncake"
}  # fmt: skip
_TLS_SCHEMES = ("valkeys", "rediss")
_EXAMPLES = "file:DIR, valkey://HOST:PORT/0 (valkeys:// with TLS) or mooncake://HOST:PORT"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE_DIGITS_MAX = 20
"""Of a size: more than any disk has, and few enough that the number is finite."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


class StoreFailed(BatonError):
    """Trouble of the store itself: not reached, timed out, an I/O error."""


class BadStore(SetupError):
    """The store cannot exist: a wrong address, a missing library, a path that is not a folder."""


@dataclass(frozen=True)
class StoreStat:
    kind: str
    objects: int
    bytes: int
    limit_bytes: int | None
    details: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Further facts for the operator, by name."""


class Store(Protocol):
    kind: str

    def look(self, names: Sequence[str]) -> list[bool]:
        """Whether each of these objects exists."""

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        """Read objects into buffers; returns the bytes of each, MISSING if absent, OVERSIZED if it does not fit.

        After StoreFailed the buffers may hold anything.
        """

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        """Store objects; returns whether each exists now, False for no room. An existing object may stay as it was."""

    def drop(self, names: Sequence[str]) -> None:
        """Remove objects that were found corrupt."""

    def attach(self, arena: memoryview) -> None:
        """Announce that all later buffers lie in `arena`, for stores that register memory."""

    def names(self) -> Iterator[tuple[str, int]]:
        """Name and size of every object, in any order. Objects added or removed meanwhile may be listed or not."""

    def stat(self) -> StoreStat: ...

    def clear(self) -> int:
        """Remove all objects; returns how many."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class StoreUrl:
    """The parsed address of a store. `limit` is not among the options."""

    kind: str
    host: str = ""
    port: int | None = None
    path: str = ""
    """The folder of `file:`; otherwise the part after the port, without its first slash."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    limit_bytes: int | None = None
    is_tls: bool = False

    def __str__(self) -> str:
        """For logs and messages: without the password and the options."""
        if self.kind == "file":
            return f"file:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.kind}{'s' if self.is_tls else ''}://{host}{port}/{self.path}".removesuffix("/")


def open_store(url: str, timeout_s: float = 1.0, limit_bytes: int | None = None, create: bool = True) -> Store:
    """Open a store. `limit_bytes` overrides the address's `?limit=`.

    Without `create`, a missing folder is an error and an existing one is not tidied: to inspect a store that others use.
    """
    parsed = parse_url(url)
    limit = parsed.limit_bytes if limit_bytes is None else limit_bytes
    if limit is not None and limit <= 0:
        raise BadStore(f"a store with a limit of {limit} bytes holds nothing")
    try:
        match parsed.kind:
            case "file":
                from baton.kv.file_store import open_file

                return open_file(parsed, timeout_s, limit, create)
            case "valkey":
                from baton.kv.valkey_store import open_valkey

                return open_valkey(parsed, timeout_s, limit)
            case _:
                from baton.kv.mooncake_store import open_mooncake

                return open_mooncake(parsed, timeout_s, limit)
    except ImportError as error:
        raise BadStore(
            f"a {parsed.kind} store needs a library that is not here ({error}); install 'baton-serve[{parsed.kind}]'"
        ) from error


def parse_url(url: str) -> StoreUrl:
    scheme, colon, rest = url.strip().partition(":")
    kind = _SCHEMES.get(scheme.lower())
    if not colon or kind is None:
        raise BadStore(f"{_shown(url)} is not the address of a store, such as {_EXAMPLES}")
    return _file_url(url, rest) if kind == "file" else _net_url(url, kind, scheme.lower() in _TLS_SCHEMES)


def parse_size(text: str) -> int:
    """`20G`, `512MiB` or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or len(match[1]) > _SIZE_DIGITS_MAX:
        raise BadStore(f"{text[:40]!r} is not a size; write for example 512M or 20G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _file_url(url: str, rest: str) -> StoreUrl:
    """The path is taken literally, without %-codes, up to a question mark."""
    path, _, query = rest.partition("?")
    if path.startswith("//"):
        if not path.startswith("///"):
            raise BadStore(f"{url} names a host; a folder of this machine is file:DIR or file:///DIR")
        path = path[2:]
    if not path:
        raise BadStore(f"{url} names no folder; write file:DIR")
    options, limit = _options(url, query)
    if options:
        raise BadStore(f"{url}: a file store has no option {next(iter(options))!r}, only limit")
    return StoreUrl("file", path=path, options=options, limit_bytes=limit)


def _net_url(url: str, kind: str, is_tls: bool) -> StoreUrl:
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadStore(f"{_shown(url)} is not the address of a store: {error}") from None
    if not parts.netloc or not host:
        raise BadStore(f"{_shown(url)} names no host; write for example {_EXAMPLES}")
    options, limit = _options(url, parts.query)
    return StoreUrl(
        kind=kind, host=host, port=port, path=parts.path.removeprefix("/"),
        user=None if not parts.username else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        options=options, limit_bytes=limit, is_tls=is_tls,
    )  # fmt: skip


def _options(url: str, query: str) -> tuple[dict[str, str], int | None]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise BadStore(f"{_shown(url)}: what follows the question mark is not name=value") from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise BadStore(f"{_shown(url)} has an option twice")
    limit = options.pop("limit", None)
    return options, None if limit is None else parse_size(limit)


def _shown(url: str) -> str:
    """The address without user and password."""
    scheme, mark, rest = url.strip().partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if mark else url.strip()
