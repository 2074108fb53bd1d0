"""Which certificates of servers the client commands trust: --cacert, else what Python and SSL_CERT_FILE say."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated

import typer

CaCert = Annotated[
    Path | None,
    typer.Option(
        "--cacert", metavar="FILE",
        help="For https: trust certificates signed by these (PEM). Default: the system's, or those of SSL_CERT_FILE.",
    ),
]  # fmt: skip


def trusting(cacert: Path | None) -> ssl.SSLContext | None:
    """Verifies certificates and names. None: the libraries' default, which does too."""
    if cacert is None:
        return None
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:  # ssl.SSLError is one
        reason = "holds no certificate in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise typer.BadParameter(f"{cacert}: {reason}", param_hint="--cacert") from None
