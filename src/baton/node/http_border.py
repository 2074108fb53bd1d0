"""What all HTTP connections of a server share: limits, the table of connections, and one counted line for what is refused.

`core.http` decides who stays and for how long; `node.http_protocol` asks here and acts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from uvicorn.server import ServerState

from baton.api.errors import ApiError
from baton.api.log_rate import LogRate
from baton.core.http.connection_clock import Overdue, TimeLimits
from baton.core.http.connection_table import Admitted, ConnectionTable, NoRoom
from baton.core.http.unsent_answers import UNSENT_BYTES_MAX, UnsentAnswers
from baton.node.client_address import (
    IpNetwork,
    counted_as,
    forwarded_for,
    hostname,
    is_in,
    is_local_name,
    parse_address,
)
from baton.node.server_certificate import ServerCertificate

log = logging.getLogger("baton.http")

SHED = "shed"
PROBE_PATHS = frozenset((b"/health", b"/ping", b"/ready"))
"""Asked by whoever would restart a server that does not answer."""
SHED_AT_ONCE_MAX = 32
"""Connections closed in one look where descriptors have run out."""
_MESSAGES = {
    NoRoom.IN_ALL: "Too many connections are open, and all of them are at work; try again",
    NoRoom.FROM_ADDRESS: "Too many connections from this address are open",
}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on what clients may send and hold, before anything of theirs is understood."""

    connections: int = 1024
    probe_connections: int = 16
    """Further ones, for connections that ask how the server is while all others are at work."""
    connections_per_address: int | None = None
    trusted_proxies: tuple[IpNetwork, ...] = ()
    """X-Forwarded-For is believed from these addresses alone."""
    hosts: frozenset[str] | None = None
    """Names in the Host header that are answered besides loopback ones; None: every name is answered."""
    header_bytes_max: int = 32 * 1024
    headers_max: int = 100
    url_bytes_max: int = 8 * 1024
    unparsed_bytes_max: int = 16 * 1024
    """Bytes of the next request that are taken while one is answered; beyond it the connection is not read."""
    discarded_bytes_max: int = 1 << 20
    """Bytes that are read on after a refusal, so that its sender comes to read it."""
    unsent_bytes_max: int = UNSENT_BYTES_MAX
    """Of answers to all connections; beyond it connections are closed."""
    times: TimeLimits = field(default_factory=TimeLimits)


class Client(Protocol):
    """A connection, as its server sees it."""

    who: str
    """Its address, for the log."""

    def __hash__(self) -> int:
        """By identity."""

    def shed(self) -> None:
        """Close at once, whatever is unread."""

    def look(self, now_s: float) -> None:
        """Close if a time limit has passed."""


class HttpBorder(ServerState):
    """Uvicorn's state of a server, which it gives to every connection, and the limits."""

    def __init__(
        self,
        limits: HttpLimits,
        count: Callable[[str], None],
        clock_s: Callable[[], float],
        certificate: ServerCertificate | None = None,
    ) -> None:
        """With a certificate connections speak TLS."""
        super().__init__()
        self.limits = limits
        self.clock_s = clock_s
        self.certificate = certificate
        self.table: ConnectionTable[Client] = ConnectionTable(
            limits.connections, limits.connections_per_address, limits.probe_connections
        )
        self.unsent: UnsentAnswers[Client] = UnsentAnswers(limits.unsent_bytes_max)
        self._count = count
        self._lines = LogRate()

    def admit(self, one: Client, host: str) -> ApiError | None:
        """Take in a new connection, if need be instead of one that only waits; or say why not."""
        return self._taken(self.table.open(one, self._address(host)))

    def why_not_asked(self, one: Client, method: bytes, url: bytes) -> ApiError | None:
        """Why a connection may not ask this: its place may be one for probes alone."""
        if not self.table.is_spare(one) or is_probe(method, url):
            return None
        return self._taken(self.table.promote(one))

    def _taken(self, outcome: Admitted[Client] | NoRoom) -> ApiError | None:
        if isinstance(outcome, NoRoom):
            return ApiError(
                503, _MESSAGES[outcome], "service_unavailable_error", code=outcome.value, headers={"Retry-After": "1"}
            )
        if outcome.instead_of is not None:
            self._shed(outcome.instead_of)
        return None

    def _address(self, host: str) -> str | None:
        """None where it is not counted: no limit is set, or it is a proxy's, whose requests are counted one by one."""
        if self.limits.connections_per_address is None:
            return None
        address = parse_address(host)
        return None if address is None or is_in(address, self.limits.trusted_proxies) else counted_as(address)

    def forwarded_address(self, host: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The address that a request through a trusted proxy is counted for."""
        proxies = self.limits.trusted_proxies
        if self.limits.connections_per_address is None or not proxies:
            return None
        peer = parse_address(host)
        if peer is None or not is_in(peer, proxies):
            return None
        return forwarded_for(headers, proxies)

    def why_not_host(self, host: bytes) -> ApiError | None:
        """Without keys a page in a browser of this machine could reach us under a name of its own: it is not answered."""
        names = self.limits.hosts
        if names is None or is_local_name(host) or hostname(host) in names:
            return None
        message = (
            f"Without API keys this server answers only to loopback names, not to '{hostname(host)}': "
            "use http://127.0.0.1 or localhost, or start it with --api-key or --allowed-hosts"
        )
        return ApiError(421, message, code="host_not_allowed")

    def refused(self, reason: str, who: str, message: str) -> None:
        """Count, and log now or later."""
        self._count(reason)
        line = printable(f"{reason}: {message} [{who}]")
        if (left_out := self._lines.take(reason, self.clock_s(), line)) is not None:
            _warn(line, left_out)

    def look(self) -> None:
        """Call about once a second."""
        now_s = self.clock_s()
        for one in list(self.table):
            one.look(now_s)
        self.drop_unread()
        for line, left_out in self._lines.due(now_s):
            _warn(line, left_out)

    def drop_unread(self) -> None:
        """Close connections while too much of answers waits to be read."""
        for one in self.unsent.drop(self.clock_s()):
            self.refused(Overdue.UNREAD.value, one.who, "closed a connection: too much of answers waits to be read")
            one.shed()

    def relieve(self) -> None:
        """Descriptors have run out: close connections that only wait, and say so."""
        for _ in range(SHED_AT_ONCE_MAX):
            if (longest := self.table.shed()) is None:
                break
            self._shed(longest)
        self.refused("no_descriptors", "this process", "no file descriptor is left; raise the limit of open files")

    def _shed(self, one: Client) -> None:
        one.shed()
        self.refused(SHED, one.who, "closed a connection without a whole request, to take another")


def printable(text: str) -> str:
    """What a client wrote must not move an operator's cursor or begin a line: escape all that is not printable."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def is_probe(method: bytes, url: bytes) -> bool:
    return method in (b"GET", b"HEAD") and url.partition(b"?")[0] in PROBE_PATHS


def _warn(line: str, left_out: int) -> None:
    if left_out:
        log.warning("%s (and %d more like it)", line, left_out)
    else:
        log.warning("%s", line)
