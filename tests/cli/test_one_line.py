"""What a server's command says of what it cannot go on with: one line, and where it comes from only to those who debug."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.api.generation_config import BadGenerationConfig, given_defaults
from baton.cli import router as router_command
from baton.cli import serve as serve_command
from baton.cli.main import app
from baton.core.errors import EXIT_SETUP, BatonError, SetupError
from baton.executor.cache_folder import NoCacheFolder, cache_folder
from baton.kv.store import BadStore
from baton.node import service
from baton.node.kv_storage import open_kv_store
from baton.node.models import resolve_model
from baton.node.secrets import store_key
from baton.node.server_certificate import BadCertificate, check_certificate
from baton.node.settings import EngineSettings, HttpSettings, LogFormat, LogLevel
from baton.router import service as router_service

NOBODY_S = "~no-such-user/x"
SETTINGS = {"log_format": LogFormat.TEXT, "log_level": LogLevel.INFO}


def call(*options: str) -> tuple[int, str]:
    wide = {"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, options, env=wide)
    return result.exit_code, result.output


@pytest.fixture
def plain_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log stays as it is: a thread would write it."""
    for module in (serve_command, router_command):
        monkeypatch.setattr(module, "log_to_stderr", lambda settings: None)


@pytest.mark.usefixtures("plain_stderr")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", (NOBODY_S, "--device", "cpu")),
        ("serve", ("--ssl-certfile", NOBODY_S, "--executor", "scripted")),
        ("router", (NOBODY_S,)),
        ("up", (NOBODY_S,)),
        ("up", ("--executor", "scripted", "--ssl-certfile", NOBODY_S)),
    ],
)
def test_the_home_folder_of_an_unknown_user_is_told_in_one_line(command: str, options: tuple[str, ...]) -> None:
    code, output = call(command, *options, *(() if command == "up" else ("--port", "0")))
    told = f"baton {command}: {NOBODY_S!r} begins with a home folder that is not known here"
    assert (code, output.splitlines()[-1][: len(told)]) == (EXIT_SETUP, told)
    assert "Traceback" not in output


def test_the_home_folder_of_an_unknown_user_is_refused_wherever_a_path_is_given(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="home folder"):
        resolve_model(NOBODY_S)
    with pytest.raises(BadGenerationConfig, match="home folder"):
        given_defaults(NOBODY_S)
    with pytest.raises(BadCertificate, match="home folder"):
        check_certificate(HttpSettings(ssl_certfile=str(tmp_path), ssl_keyfile_password_file=NOBODY_S))
    with pytest.raises(BadStore, match="home folder"):
        store_key(f"file:{NOBODY_S}", tmp_path)
    with pytest.raises(BadStore, match="home folder"):
        open_kv_store(EngineSettings("", None, b"", kv_store=f"file:{NOBODY_S}"))


def test_a_user_without_a_home_folder_is_told_how_to_name_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("BATON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(NoCacheFolder, match="BATON_CACHE"):
        cache_folder()


def broken(*_: object) -> None:
    raise ZeroDivisionError("a bug\nof two lines")


@pytest.mark.usefixtures("plain_stderr")
@pytest.mark.parametrize("command", ["serve", "router"])
def test_what_nobody_expected_is_one_line_and_a_traceback_for_those_who_debug(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "serve", broken)
    monkeypatch.setattr(router_service, "route", broken)
    told = f"baton {command}: ZeroDivisionError: a bug (unexpected; --log-level debug shows where)"
    assert call(command, "--executor", "scripted") == (1, f"{told}\n")
    code, output = call(command, "--executor", "scripted", "--log-level", "debug")
    assert (code, output.splitlines()[-1]) == (1, told)
    assert "in broken" in output


def test_what_ends_a_command_on_purpose_passes(capsys: pytest.CaptureFixture[str]) -> None:
    for passing in (typer.Exit(3), typer.BadParameter("no"), KeyboardInterrupt()):
        with pytest.raises(type(passing)), serve_command.told_in_one_line("baton x", SETTINGS):
            raise passing
    assert not capsys.readouterr().err


def test_something_may_have_to_end_before_the_line() -> None:
    ended: list[str] = []
    with pytest.raises(typer.Exit), serve_command.told_in_one_line("baton x", SETTINGS, lambda: ended.append("stages")):
        raise BatonError("not now")
    assert ended == ["stages"]
