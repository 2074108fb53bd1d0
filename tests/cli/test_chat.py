"""`baton chat`: what is said where it cannot begin."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

from baton.cli.main import app


class WantsKey(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), WantsKey) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_who_has_no_key_is_told_how_to_give_one(port: int) -> None:
    result = CliRunner().invoke(app, ["chat", "--url", f"http://127.0.0.1:{port}"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "wants an API key" in result.output
    assert "--api-key" in result.output
    assert "baton serve" not in result.output
