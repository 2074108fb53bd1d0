"""The certificate of an HTTP server: what is wrong with its files is one line, and renewed files are read."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.node.server_certificate import BadCertificate, CertificateFiles, ServerCertificate, server_certificate
from baton.node.settings import HttpSettings
from tests.support.certificates import PASSWORD, Authority, Pair, encrypted, needs_openssl

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    return authority.sign("one"), authority.sign("two")


@pytest.fixture
def pair(made: tuple[Pair, Pair], tmp_path: Path) -> Pair:
    """Files of this test's own."""
    own = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    _put(made[0], own)
    return own


def _put(source: Pair, target: Pair) -> None:
    shutil.copyfile(source.certificate, target.certificate)
    shutil.copyfile(source.key, target.key)
    target.key.chmod(0o600)


def loaded(pair: Pair, password: Path | None = None) -> ServerCertificate:
    return ServerCertificate(CertificateFiles(pair.certificate, pair.key, password))


def shown_to_a_client(certificate: ServerCertificate) -> bytes | None:
    """The certificate that a new connection gets."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(to_client, to_server)
    server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True)


def der(pair: Pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:120])


BAD_FILES: dict[str, tuple[Callable[[Pair, Pair], object], str]] = {
    "no certificate file": (
        lambda pair, _: pair.certificate.unlink(), r"cannot read --ssl-certfile .*cert\.pem: No such file",
    ),
    "no key file": (lambda pair, _: pair.key.unlink(), r"cannot read --ssl-keyfile .*key\.pem: No such file"),
    "a folder": (
        lambda pair, _: (pair.certificate.unlink(), pair.certificate.mkdir()), r"cannot read .*cert\.pem: Is a directory",
    ),
    "nothing in the certificate": (
        lambda pair, _: pair.certificate.write_bytes(b""), r"cert\.pem holds no certificate in PEM form",
    ),
    "DER": (
        lambda pair, _: pair.certificate.write_bytes(der(pair)), r"cert\.pem holds no certificate in PEM form",
    ),
    "no key in the key": (
        lambda pair, _: shutil.copyfile(pair.certificate, pair.key), r"--ssl-keyfile .*key\.pem holds no private key in PEM",
    ),
    "a certificate cut short": (lambda pair, _: _cut(pair.certificate), r"cannot use the certificate in .*cert\.pem"),
    "a key cut short": (lambda pair, _: _cut(pair.key), r"cannot use .* with the key in .*key\.pem"),
    "another's key": (
        lambda pair, other: shutil.copyfile(other.key, pair.key),
        r"the private key in .*key\.pem does not belong to the first certificate in .*cert\.pem",
    ),
    "an encrypted key without a password": (
        lambda pair, _: shutil.copyfile(encrypted(pair.key), pair.key), r"encrypted: give .* --ssl-keyfile-password-file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trouble", BAD_FILES)
def test_bad_files_are_one_line_that_names_the_file_and_what_to_do(
    trouble: str, pair: Pair, made: tuple[Pair, Pair]
) -> None:
    spoil, expected = BAD_FILES[trouble]
    spoil(pair, made[1])
    with pytest.raises(BadCertificate, match=expected) as refused:
        loaded(pair)
    assert "\n" not in str(refused.value)


def test_a_file_without_permission_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    with pytest.raises(BadCertificate, match=r"cannot read --ssl-certfile .*cert\.pem: Permission denied"):
        loaded(pair)


def test_an_encrypted_key_is_opened_by_the_password_in_a_file_and_by_no_other(pair: Pair, tmp_path: Path) -> None:
    key, password = encrypted(pair.key), tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    assert shown_to_a_client(loaded(Pair(pair.certificate, key), password)) == der(pair)
    password.write_text("another")
    with pytest.raises(
        BadCertificate, match=r"the password in .*password does not open the private key in .*key\.encrypted"
    ):
        loaded(Pair(pair.certificate, key), password)
    password.unlink()
    with pytest.raises(BadCertificate, match="cannot read --ssl-keyfile-password-file"):
        loaded(Pair(pair.certificate, key), password)


def test_a_key_that_every_user_may_read_is_a_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    loaded(pair)
    assert not caplog.records
    pair.key.chmod(0o644)
    loaded(pair)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "can read the private key in" in record.message
    assert "mode 644" in record.message


def test_certificate_and_key_may_be_one_file(pair: Pair) -> None:
    both = pair.certificate.with_name("both.pem")
    both.write_bytes(pair.key.read_bytes() + pair.certificate.read_bytes())
    both.chmod(0o600)
    certificate = server_certificate(HttpSettings(ssl_certfile=str(both)))
    assert certificate is not None
    assert shown_to_a_client(certificate) == der(pair)
    with pytest.raises(BadCertificate, match="holds no private key: give it with --ssl-keyfile"):
        server_certificate(HttpSettings(ssl_certfile=str(pair.certificate)))


def test_a_key_without_a_certificate_is_refused_and_nothing_at_all_is_plain_http(pair: Pair) -> None:
    with pytest.raises(BadCertificate, match="--ssl-keyfile is only for --ssl-certfile"):
        server_certificate(HttpSettings(ssl_keyfile=str(pair.key)))
    assert server_certificate(HttpSettings()) is None


def test_nothing_older_than_tls_1_2_is_spoken(pair: Pair) -> None:
    assert loaded(pair).context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_renewed_pair_is_used_by_new_connections(
    pair: Pair, made: tuple[Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    certificate, before = loaded(pair), der(pair)
    certificate.look()
    assert shown_to_a_client(certificate) == before
    _put(made[1], pair)
    certificate.look()  # seen; it may be half of a change
    assert shown_to_a_client(certificate) == before
    certificate.look()
    assert shown_to_a_client(certificate) == der(made[1]) != before
    assert ["new connections use" in record.message for record in caplog.records] == [True]
    certificate.look()
    assert len(caplog.records) == 1


def test_files_that_are_replaced_one_after_the_other_are_no_trouble(
    pair: Pair, made: tuple[Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    certificate = loaded(pair)
    shutil.copyfile(made[1].certificate, pair.certificate)
    certificate.look()
    shutil.copyfile(made[1].key, pair.key)
    certificate.look()
    certificate.look()
    assert shown_to_a_client(certificate) == der(made[1])
    assert not caplog.records


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("nonsense"), os.unlink], ids=["nonsense", "gone"])
def test_a_bad_new_pair_leaves_the_old_one_in_use_with_one_warning(
    spoil: Callable[[Path], object], pair: Pair, made: tuple[Pair, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    certificate, before = loaded(pair), der(pair)
    spoil(pair.certificate)
    for _ in range(5):
        certificate.look()
    assert shown_to_a_client(certificate) == before
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(pair.certificate) in record.message
    _put(made[1], pair)
    certificate.look()
    certificate.look()
    assert shown_to_a_client(certificate) == der(made[1])
