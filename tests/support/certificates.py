"""Certificates made on the spot, by `openssl`: an authority, and what it signs for localhost."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="there is no openssl to make certificates with")
PASSWORD = "a password of the tests"
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "30")


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        return "--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key)


class Authority:
    """Signs certificates into `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl(
            "req", "-x509", *_EC, "-noenc", "-subj", f"/CN={name} of the tests",
            "-addext", "keyUsage=critical,keyCertSign", "-keyout", self._key, "-out", self.certificate,
        )  # fmt: skip

    def sign(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        openssl(
            "req", "-x509", *_EC, "-noenc", "-subj", f"/CN={name}", "-CA", self.certificate, "-CAkey", self._key,
            "-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE",
            "-keyout", made.key, "-out", made.certificate,
        )  # fmt: skip
        return made

    def trusted(self) -> ssl.SSLContext:
        """What a client needs that trusts this authority alone."""
        return ssl.create_default_context(cafile=self.certificate)


def encrypted(key: Path) -> Path:
    """The same key, under PASSWORD."""
    made = key.with_suffix(".encrypted")
    openssl("pkcs8", "-topk8", "-in", key, "-out", made, "-passout", f"pass:{PASSWORD}")
    made.chmod(0o600)
    return made


def openssl(*arguments: str | Path) -> None:
    subprocess.run([OPENSSL or "openssl", *map(str, arguments)], check=True, capture_output=True)
