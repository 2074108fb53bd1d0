"""`baton up` with TLS: clients speak it to the router, which is watched through it, and an answer survives a kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.core.engine.request import Sampling
from baton.core.errors import EXIT_SETUP
from baton.executor.scripted import undisturbed
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.certificates import Authority, needs_openssl
from tests.support.fleet import baton_up

pytestmark = needs_openssl

PROMPT = [104, 101, 108, 108, 111]
TOKENS = 400
FLEET = ("--executor", "scripted", "--step-ms", "5", "--mixed", "2")


def test_a_stream_through_tls_survives_the_kill_of_its_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    with baton_up(*FLEET, *pair.options, "--api-key", "k", "--admin-key", "admin") as fleet:
        assert fleet.url.startswith("https://")
        assert f"Chat       baton chat --url {fleet.url}" in fleet.output()
        for words in fleet.commands().values():
            has_certificate = "--ssl-certfile" in words
            assert has_certificate == ("router" in words or "up" in words), "instances stay on loopback, in plain"

        verifying = httpx.Client(verify=authority.trusted())
        with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="k", http_client=verifying) as client:
            stream = client.completions.create(
                model="scripted", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            tokens: list[int] = []
            killed = ""
            for chunk in stream:
                tokens += [token for choice in chunk.choices for token in (choice.model_extra or {})["token_ids"]]
                if len(tokens) > 40 and not killed:
                    killed = _kill_the_one_that_serves(fleet.url, verifying)
        assert tokens == undisturbed(PROMPT, Sampling(seed=0, temperature=0.0), TOKENS, BYTE_VOCABULARY)
        assert "was ended by SIGKILL" in fleet.output()

        shutil.copyfile(authority.sign("renewed").certificate, pair.certificate)  # of another key
        fleet.until(lambda: "the one before stays" in fleet.output(), "a warning of the router")
        other = "mixed-2" if killed == "mixed-1" else "mixed-1"
        trusting = ("--cacert", str(authority.certificate))
        drained = CliRunner().invoke(app, ["drain", other, "--url", fleet.url, "--api-key", "admin", "--no-wait", *trusting])
        assert drained.exit_code == 0, drained.output
        assert "hangs" not in fleet.output(), "the watch of the router's health speaks TLS"
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(60) == 0, fleet.output()
        assert "Traceback" not in fleet.output()


def _kill_the_one_that_serves(url: str, http: httpx.Client) -> str:
    """Its name."""
    listed = http.get(f"{url}/v1/instances", headers={"Authorization": "Bearer admin"}).json()["data"]
    (victim,) = [one for one in listed if one["open"]]
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["name"])


def test_bad_files_end_baton_up_before_anything_starts(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["up", *FLEET, "--router-port", "0", "--ssl-certfile", str(tmp_path / "nowhere.pem")])
    assert result.exit_code == EXIT_SETUP
    assert "cannot read --ssl-certfile" in result.output


@pytest.mark.slow
def test_a_chaos_run_is_carried_through_tls_where_the_environment_has_the_certificate(tmp_path: Path) -> None:
    """The router takes the certificate out of the environment of the whole run."""
    pair = Authority(tmp_path).sign("localhost")
    command = (
        sys.executable, "-m", "baton", "chaos", "--executor", "scripted", "--step-ms", "10", "--mixed", "2",
        "--suspect-after", "2", "--faults", "2", "--requests", "20", "--cases", "8", "--concurrency", "4", "--seed", "1",
        "--minutes-max", "5", "--fleet-log", str(tmp_path / "log"),
    )  # fmt: skip
    own = {**os.environ, "BATON_SSL_CERTFILE": str(pair.certificate), "BATON_SSL_KEYFILE": str(pair.key)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=own)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "chaos: 2 faults" in run.stdout
    assert "API        https://" in (tmp_path / "log").read_text()
    assert "hangs" not in (tmp_path / "log").read_text()
