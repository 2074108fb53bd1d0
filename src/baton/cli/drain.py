"""`baton drain`: an instance gets nothing new from its router, finishes what it has, and ends."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer
from rich.console import Console

from baton.cli.options import option
from baton.cli.server_trust import CaCert, trusting
from baton.core.errors import BatonError

console = Console(stderr=True, highlight=False)

LOOK_S = 0.2

Name = Annotated[str, typer.Argument(help="The instance, by the name under which the router lists it.")]
Url = Annotated[str, option("url", "Drain", "Address of the router.")]
ApiKey = Annotated[str | None, option("api-key", "Drain", "The router's admin key, or where it has none an API key of it.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the instance is gone.", rich_help_panel="Drain")]


class CannotDrain(BatonError):
    """The router was not reached, or refused."""


class RouterUrl:
    """The router's API calls of this command."""

    def __init__(self, url: str, api_key: str | None, tls: ssl.SSLContext | None) -> None:
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise CannotDrain(f"{url} is not an address such as http://127.0.0.1:8000")
        self._tls = tls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def call(self, method: str, path: str) -> Any:
        connection = self._connection()
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, headers=self._headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except ssl.SSLCertVerificationError as error:
            advice = "give its CA with --cacert or SSL_CERT_FILE"
            raise CannotDrain(
                f"the certificate of {self._parts.netloc} is not trusted: {error.verify_message}; {advice}"
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CannotDrain(f"no router answers at {self._parts.netloc}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise CannotDrain(answer.get("error", {}).get("message", f"the router answered {response.status}"))
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=30, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=30)


def drain(
    name: Name, url: Url = "http://127.0.0.1:8000", api_key: ApiKey = None, wait: Wait = True, cacert: CaCert = None
) -> None:
    """Empty an instance: its router gives it nothing new, and it ends when it has finished what it has.

    [dim]baton drain decode-1[/dim] waits until it is gone; what is still open after the router's --drain-timeout goes on at
    another instance. An instance of [dim]baton up[/dim] is started again when it has ended.
    """
    try:
        at = RouterUrl(url, api_key, trusting(cacert))
        life = _life_of(at, name)
        answer = at.call("POST", f"/v1/instances/{quote(name, safe='')}/drain")
        if "warning" in answer:
            console.print(f"baton drain: {answer['warning']}", style="yellow", markup=False, soft_wrap=True)
        if wait:
            _wait(at, name, life, lambda left: console.print(f"{name} drains: {left} open", style="dim", markup=False))
    except BatonError as error:
        console.print(f"baton drain: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"{name} is {'gone' if wait else 'draining'}", style="dim", markup=False)


def _wait(at: RouterUrl, name: str, life: int | None, say: Callable[[int], None]) -> None:
    """Wait until this process of the instance is gone; a supervisor may restart it at once."""
    shown: int | None = None
    while life is not None and (view := _view(at, name)) is not None and view["incarnation"] == life:
        if view["open"] != shown:
            shown = view["open"]
            say(view["open"])
        time.sleep(LOOK_S)


def _life_of(at: RouterUrl, name: str) -> int | None:
    view = _view(at, name)
    return None if view is None else int(view["incarnation"])


def _view(at: RouterUrl, name: str) -> Any:
    return next((one for one in at.call("GET", "/v1/instances")["data"] if one["name"] == name), None)
