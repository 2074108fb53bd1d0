"""TLS to a Valkey or Redis server: `valkeys://` and `rediss://`, and the options of such an address.

    ca=FILE              trust certificates signed by these (PEM), instead of those that the system trusts
    cert=FILE key=FILE   a client certificate and its private key, for servers that want one
    verify=none          encrypt, but trust every certificate: whoever sits in between can read and forge KV

The certificate and the host's name are verified unless `verify=none` is given, which is a WARNING.
"""

from __future__ import annotations

import logging
import ssl

from baton.kv.store import BadStore, StoreUrl

log = logging.getLogger("baton.store")

TLS_OPTIONS = ("ca", "cert", "key", "verify")


def tls_context(url: StoreUrl) -> ssl.SSLContext:
    """Raises BadStore, which names the file or the option."""
    ca, cert, key, verify = (url.options.get(name) for name in TLS_OPTIONS)
    if verify not in (None, "none"):
        raise BadStore(f"{url}: verify={verify} is not known; leave it out, or write verify=none to trust every certificate")
    if verify == "none" and ca is not None:
        raise BadStore(f"{url}: ca={ca} is not used with verify=none; leave one of them out")
    if key is not None and cert is None:
        raise BadStore(f"{url}: key={key} is only for cert=FILE")
    context = _verifying(url, ca)
    if verify == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        log.warning("%s is encrypted but not verified (verify=none): whoever sits in between can read and forge KV", url)
    if cert is not None:
        _present(context, url, cert, key or cert)
    return context


def _verifying(url: StoreUrl, ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        reason = "it holds no certificate in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadStore(f"{url}: cannot use ca={ca}: {reason}") from None


def _present(context: ssl.SSLContext, url: StoreUrl, cert: str, key: str) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _KeyEncrypted:
        raise BadStore(f"{url}: the private key in {key} is encrypted, which is not supported; decrypt it") from None
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise BadStore(
            f"{url}: cannot use cert={cert} with key={key}: {(reason or 'no PEM').lower().replace('_', ' ')}"
        ) from None


class _KeyEncrypted(Exception):
    """OpenSSL asks for a password; left alone it would ask at the terminal."""


def _no_password() -> str:
    raise _KeyEncrypted
