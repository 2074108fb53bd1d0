"""`valkey`: objects in a Valkey or Redis server.

    look   EXISTS for each, pipelined         put    SET NX for each, pipelined; an existing object stays as it is
    get    one MGET, from the socket straight into the buffers

Keys begin with `baton:`; no other key of the server is counted or removed. The server decides how much it holds and what it
evicts (maxmemory, maxmemory-policy): a full server that may not evict answers a put with "no room". A connection on which
anything failed is closed, since its next reply would belong to another command; the next call opens a new one. Of
`valkey://` password and objects travel in the clear; `valkeys://` is TLS (`kv.valkey_tls`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import valkey
from valkey.exceptions import OutOfMemoryError, ResponseError, ValkeyError

from baton.core.errors import InvariantViolated
from baton.kv.store import BadStore, Store, StoreFailed, StoreStat, StoreUrl
from baton.kv.valkey_connection import Command, Reply, ReplyParser, ValkeyConnection
from baton.kv.valkey_tls import TLS_OPTIONS, tls_context

PORT = 6379
PREFIX = b"baton:"
_PAGE = 512
"""Names per page when all of them are listed."""
_SHOWN = ("valkey_version", "redis_version", "used_memory_human", "maxmemory_human", "maxmemory_policy")


def open_valkey(url: StoreUrl, timeout_s: float, limit_bytes: int | None) -> Store:
    """Connects at the first use, so the server may start later than this instance."""
    known = TLS_OPTIONS if url.is_tls else ()
    for name in url.options:
        if name not in known:
            only_tls = f"{name} is only for valkeys://, which is TLS" if name in TLS_OPTIONS else ""
            raise BadStore(
                f"{url}: {only_tls or f'a valkey store has no option {name!r}, only ' + ', '.join(('limit', *known))}"
            )
    if url.path and not url.path.isdecimal():
        raise BadStore(f"{url}: what follows the port is the number of a database, such as /0")
    return ValkeyStore(url, timeout_s, limit_bytes)


class ValkeyStore:
    kind = "valkey"

    def __init__(self, url: StoreUrl, timeout_s: float, limit_bytes: int | None) -> None:
        self._shown = str(url)
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        self._closed = False
        self._connections = valkey.ConnectionPool(
            connection_class=ValkeyConnection, host=url.host, port=url.port or PORT, db=int(url.path or 0),
            username=url.user, password=url.password, timeout_s=timeout_s,
            tls=tls_context(url) if url.is_tls else None,
        )  # fmt: skip

    def look(self, names: Sequence[str]) -> list[bool]:
        return [_count(reply) > 0 for reply in self._ask([(b"EXISTS", _key(name)) for name in names])]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        if not names:
            return []
        with self._connected() as parser:
            return parser.fetch((b"MGET", *(_key(name) for name in names)), into)

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        commands = [(b"SET", _key(name), content, b"NX") for name, content in zip(names, objects, strict=True)]
        return [not isinstance(reply, OutOfMemoryError) for reply in self._ask(commands)]

    def drop(self, names: Sequence[str]) -> None:
        self._ask([(b"UNLINK", _key(name)) for name in names])

    def attach(self, arena: memoryview) -> None:
        """Nothing to do: sockets read into any memory."""

    def names(self) -> Iterator[tuple[str, int]]:
        seen: set[bytes] = set()
        for page in self._pages():
            keys = [key for key in page if key not in seen]
            seen.update(keys)
            for key, size in zip(keys, self._ask([(b"STRLEN", key) for key in keys]), strict=True):
                if isinstance(size, int) and size:
                    yield key.removeprefix(PREFIX).decode("utf-8", "replace"), size

    def stat(self) -> StoreStat:
        objects = total_bytes = 0
        for _, size in self.names():
            objects += 1
            total_bytes += size
        known = self._info()
        maxmemory = int(known.get("maxmemory", "0"))
        limit = self._limit_bytes if self._limit_bytes is not None else maxmemory or None
        return StoreStat(self.kind, objects, total_bytes, limit, {name: known[name] for name in _SHOWN if name in known})

    def clear(self) -> int:
        return sum(_count(reply) for page in self._pages() for reply in self._ask([(b"UNLINK", key) for key in page]))

    def close(self) -> None:
        self._closed = True
        self._connections.disconnect()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, commands: Sequence[Command]) -> list[Reply]:
        if not commands:
            return []
        with self._connected() as parser:
            replies = parser.ask(commands)
        for reply in replies:
            if isinstance(reply, ValkeyError) and not _bearable(reply):
                raise StoreFailed(f"{self._shown}: {reply}")
        return replies

    @contextlib.contextmanager
    def _connected(self) -> Iterator[ReplyParser]:
        deadline_s = time.monotonic() + self._timeout_s
        if self._closed:
            raise StoreFailed(f"{self._shown} is closed")
        try:
            conn = self._checked_out()
            conn.reply_parser.deadline_s = deadline_s
            with self._kept_if_sound(conn):
                yield conn.reply_parser
        except (TimeoutError, valkey.exceptions.TimeoutError) as error:
            raise StoreFailed(f"{self._shown} does not answer within {self._timeout_s:g} s") from error
        except (OSError, ValkeyError) as error:
            raise StoreFailed(f"{self._shown}: {error}") from error

    def _checked_out(self) -> ValkeyConnection:
        try:
            conn = self._connections.get_connection("baton")
        except ValueError as error:  # from the resolver, for impossible host names
            raise StoreFailed(f"{self._shown}: {error}") from error
        if not isinstance(conn, ValkeyConnection):
            raise InvariantViolated("the pool made a connection that is not ours")
        return conn

    @contextlib.contextmanager
    def _kept_if_sound(self, conn: ValkeyConnection) -> Iterator[None]:
        sound = False
        try:
            yield
            sound = True
        finally:
            if not sound:
                conn.disconnect()  # type: ignore[no-untyped-call]
            self._connections.release(conn)

    def _pages(self) -> Iterator[list[bytes]]:
        """All our keys in pages; a key may occur twice."""
        cursor = b"0"
        while True:
            (reply,) = self._ask([(b"SCAN", cursor, b"MATCH", PREFIX + b"*", b"COUNT", b"%d" % _PAGE)])
            match reply:
                case [bytes() as cursor, list() as keys]:
                    yield [key for key in keys if isinstance(key, bytes)]
                case _:
                    raise StoreFailed(f"{self._shown} does not know SCAN")
            if cursor == b"0":
                return

    def _info(self) -> dict[str, str]:
        """The server's INFO fields; empty if it does not answer."""
        known: dict[str, str] = {}
        for reply in self._ask([(b"INFO", b"server"), (b"INFO", b"memory")]):
            if isinstance(reply, bytes):
                lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
                known |= {name: value for name, colon, value in lines if colon}
        return known


def _key(name: str) -> bytes:
    return PREFIX + name.encode()


def _count(reply: Reply) -> int:
    return reply if isinstance(reply, int) else 0


def _bearable(error: ValkeyError) -> bool:
    """Whether the error concerns one object only, not the server."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE"))
