"""Ports without a key are opened only where the operator trusts the network."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.core.errors import EXIT_SETUP
from baton.kv.listening_ports import address_of_row, listening_addresses
from baton.kv.mooncake_engine import TransferEngine
from baton.kv.transfer_contract import available
from baton.node.network_trust import UntrustedNetwork
from baton.node.service import ServeSettings
from baton.node.settings import EngineSettings
from tests.support.server import refused_by_serve

MOONCAKE_URL = "mooncake://10.0.0.9:50051"


def _made(**fields: Any) -> ServeSettings:
    return ServeSettings(engine=EngineSettings(endpoint="", model_folder=None, prefix_secret=b"", **fields))


@pytest.mark.parametrize("fields", [{"role": "prefill", "transfer": "mooncake"}, {"kv_store": MOONCAKE_URL}])
def test_mooncake_is_refused_unless_the_network_is_trusted(fields: dict[str, Any]) -> None:
    with pytest.raises(UntrustedNetwork, match=r"without authentication.*read and write.*--trust-network"):
        _made(**fields)
    _made(**fields, trust_network=True)


@pytest.mark.parametrize("store", ["file:kv", "valkey://10.0.0.9:6379/0", None])
def test_nothing_else_needs_it(store: str | None) -> None:
    _made(kv_store=store)
    _made(role="decode", transfer="tcp")


@pytest.mark.parametrize("options", [("--role", "decode", "--transfer", "mooncake"), ("--kv-store", MOONCAKE_URL)])
def test_serve_says_so_before_anything_starts(options: tuple[str, ...]) -> None:
    code, output = refused_by_serve("--executor", "scripted", *options)
    assert code == EXIT_SETUP
    assert "--trust-network" in output


@pytest.mark.parametrize("options", [("--decode", "1", "--transfer", "mooncake"), ("--kv-store", MOONCAKE_URL)])
def test_a_fleet_is_refused_as_a_whole(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["up", "--executor", "scripted", *options], env={"COLUMNS": "300"})
    assert result.exit_code == EXIT_SETUP
    assert "--trust-network" in result.output


def test_the_addresses_that_a_process_listens_at_are_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"127.0.0.1:{port}" in listening_addresses()
    assert f"127.0.0.1:{port}" not in listening_addresses()
    assert address_of_row("00000000:1F40") == "0.0.0.0:8000"


@pytest.mark.skipif(available("mooncake") is not None, reason=f"mooncake: {available('mooncake')}")
def test_the_ports_of_the_transfer_engine_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "baton.mooncake"):
        engine = TransferEngine.take("127.0.0.1")
    try:
        opened = {address for address in listening_addresses() if address.startswith(("0.0.0.0:", "[::]:"))}
        (record,) = caplog.records
        assert opened
        assert all(address in record.getMessage() for address in opened)
        assert engine.name.rpartition(":")[2] in record.getMessage()
    finally:
        engine.give_back()
