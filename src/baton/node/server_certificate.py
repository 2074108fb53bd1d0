"""The certificate and private key of an HTTP server: read from files at the start, and again when the files change.

Bad files are one line that names the file and what to do. A renewed pair is read when its files have stayed the same for
one look, since two files are not replaced in one moment; connections that are open keep the certificate they began with. A
bad new pair is a WARNING, and the last good one stays in use.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from baton.api.home_folders import expanded
from baton.core.errors import SetupError
from baton.node.settings import HttpSettings

log = logging.getLogger("baton.http")

PEM_BYTES_MAX = 1 << 20
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"
_MISMATCH = "KEY_VALUES_MISMATCH"

Stamp = tuple[tuple[int, int, int] | None, ...]
"""Of each file: when it was changed, its size and its number; None where it is not there."""


class BadCertificate(SetupError):
    """A certificate or key that cannot be used; the message names the file and what to do."""


class _PasswordWanted(Exception):
    """The key is encrypted, and no password was given."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    certificate: Path
    """The server's certificate, followed by those between it and its root."""
    key: Path
    password: Path | None = None

    @property
    def is_one_file(self) -> bool:
        return self.key == self.certificate

    def stamp(self) -> Stamp:
        return tuple(_stamp(path) for path in (self.certificate, self.key))

    def context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer with the ciphers that Python chooses. Raises BadCertificate."""
        if _CERTIFICATE not in _read("--ssl-certfile", self.certificate):
            raise BadCertificate(f"--ssl-certfile {self.certificate} holds no certificate in PEM form (BEGIN CERTIFICATE)")
        self._check_key()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        self._load_into(context)
        return context

    def _check_key(self) -> None:
        option = "--ssl-certfile" if self.is_one_file else "--ssl-keyfile"
        if _KEY not in _read(option, self.key):
            fix = ": give it with --ssl-keyfile" if self.is_one_file else " in PEM form (BEGIN PRIVATE KEY)"
            raise BadCertificate(f"{option} {self.key} holds no private key{fix}")

    def _load_into(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certificate, self.key, self._password)
        except _PasswordWanted:
            raise BadCertificate(
                f"the private key in {self.key} is encrypted: give a file with its password with --ssl-keyfile-password-file"
            ) from None
        except (ssl.SSLError, ValueError) as error:
            raise BadCertificate(self._why_not(error)) from None

    def _password(self) -> bytes:
        """Asked for by OpenSSL where the key is encrypted; without this it would ask at the terminal."""
        if self.password is None:
            raise _PasswordWanted
        return _read("--ssl-keyfile-password-file", self.password).split(b"\n", 1)[0].rstrip(b"\r")

    def _why_not(self, error: ssl.SSLError | ValueError) -> str:
        reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
        if reason == _MISMATCH:
            return (
                f"the private key in {self.key} does not belong to the first certificate in {self.certificate}: "
                "give the key that the certificate was made for"
            )
        if self.password is not None and b"ENCRYPTED" in _read("--ssl-keyfile", self.key):
            return f"the password in {self.password} does not open the private key in {self.key}"
        words = (reason or "not readable").lower().replace("_", " ")
        return f"TLS cannot use the certificate in {self.certificate} with the key in {self.key}: {words}"

    def warn_of_access(self) -> None:
        mode = self.key.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            log.warning(
                "every user of this machine can %s the private key in %s (mode %o): chmod o= it",
                "replace" if mode & stat.S_IWOTH else "read", self.key, stat.S_IMODE(mode),
            )  # fmt: skip


class ServerCertificate:
    """The context that new connections of a server use."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises BadCertificate."""
        self._files = files
        self._tried = self._seen = files.stamp()
        self.context = files.context()
        files.warn_of_access()

    def look(self) -> None:
        """Read changed files again. Call about once a second."""
        stamp = self._files.stamp()
        if stamp == self._seen and stamp != self._tried:
            self._tried = stamp
            self._renew()
        self._seen = stamp

    def _renew(self) -> None:
        try:
            self.context = self._files.context()
            self._files.warn_of_access()
        except (BadCertificate, OSError) as error:
            log.warning("the certificate was changed and cannot be used, the one before stays: %s", error)
        else:
            log.info("new connections use the certificate now in %s", self._files.certificate)


def server_certificate(settings: HttpSettings) -> ServerCertificate | None:
    """None where plain HTTP is spoken. Raises BadCertificate."""
    files = _files_of(settings)
    return None if files is None else ServerCertificate(files)


def check_certificate(settings: HttpSettings) -> None:
    """Raise BadCertificate for what the server of these settings would refuse."""
    files = _files_of(settings)
    if files is not None:
        files.context()


def _files_of(settings: HttpSettings) -> CertificateFiles | None:
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise BadCertificate("--ssl-keyfile is only for --ssl-certfile, which is not given")
        return None
    certificate = expanded(settings.ssl_certfile, BadCertificate)
    key = certificate if settings.ssl_keyfile is None else expanded(settings.ssl_keyfile, BadCertificate)
    password = settings.ssl_keyfile_password_file
    return CertificateFiles(certificate, key, None if password is None else expanded(password, BadCertificate))


def _read(option: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(PEM_BYTES_MAX)
    except OSError as error:
        raise BadCertificate(f"cannot read {option} {path}: {error.strerror or error}") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
