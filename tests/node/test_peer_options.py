"""Which options of instances with peers go together, and when a cluster key must be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.core.config import PrefillPath
from baton.node.peer_options import BadPairing, check_pairing, cluster_key
from baton.node.service import ServeSettings
from baton.node.settings import EngineSettings


def engine(**fields: Any) -> EngineSettings:
    return EngineSettings(endpoint="", model_folder=None, prefix_secret=b"", **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peers": ("127.0.0.1:8100",)}, ("--peer", "--role decode")),
        ({"role": "prefill", "peers": ("127.0.0.1:8100",)}, ("--peer", "--role decode")),
        ({"peer_port": 8100}, ("--peer-port", "--role prefill")),
        ({"role": "decode", "peer_port": 8100}, ("--peer-port", "--role prefill")),
        ({"prefill_path": PrefillPath.GENERAL}, ("--prefill-path", "--role prefill")),
        ({"peer_host": "10.0.0.5"}, ("--peer-host", "--role")),
        ({"transfer": "tcp"}, ("--transfer", "--role")),
        ({"role": "decode", "peers": ("8100",)}, ("8100", "HOST:PORT")),
        ({"role": "decode", "peers": ("host:http",)}, ("host:http", "HOST:PORT")),
        ({"role": "decode", "peers": ("host:70000",)}, ("host:70000", "HOST:PORT")),
        ({"role": "decode", "peers": ("localhost:1", "localhost:1")}, ("localhost:1", "twice")),
        ({"role": "decode", "peers": ("10.0.0.5:8100",)}, ("10.0.0.5:8100", "--peer-host")),
        ({"role": "decode", "peer_host": "0.0.0.0"}, ("--peer-host", "0.0.0.0")),  # noqa: S104
        ({"role": "prefill", "peer_host": "example.org"}, ("--peer-host", "numeric")),
        ({"name": "d1"}, ("--name", "--router")),
        ({"router": "127.0.0.1"}, ("--router", "HOST:PORT")),
        ({"router": "127.0.0.1:8200", "name": "x" * 65}, ("--name", "64")),
        ({"router": "127.0.0.1:8200", "name": "a\nb"}, ("--name", "printable")),
        ({"router": "127.0.0.1:8200", "role": "prefill", "peer_host": "0.0.0.0"}, ("--peer-host", "router")),  # noqa: S104
        ({"router": "10.0.0.5:8200", "role": "decode"}, ("--router", "--peer-host")),
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(BadPairing) as refusal:
        ServeSettings(engine=engine(**fields))
    assert all(word in str(refusal.value) for word in named)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"role": "decode"},
        {"role": "decode", "peers": ("127.0.0.1:8100", "[::1]:8100", "localhost:8101"), "transfer": "tcp"},
        {"role": "decode", "peers": ("10.0.0.5:8100",), "peer_host": "10.0.0.6"},
        {"role": "prefill", "peer_port": 0, "prefill_path": PrefillPath.GENERAL, "peer_host": "0.0.0.0"},  # noqa: S104
        {"router": "10.0.0.5:8200"},
        {"router": "[::1]:8200", "role": "decode", "name": "d1"},
        {"router": "10.0.0.5:8200", "role": "prefill", "peer_host": "10.0.0.6"},
    ],
)
def test_what_goes_together_is_taken(fields: dict[str, Any]) -> None:
    check_pairing(engine(**fields))


def test_on_one_machine_instances_find_the_same_key_without_being_given_one(tmp_path: Path) -> None:
    prefill, decode = engine(role="prefill"), engine(role="decode", peers=("localhost:8100",))
    keys = [cluster_key(one, None, None, tmp_path) for one in (prefill, decode, engine(router="localhost:8200"))]
    assert keys == [keys[0]] * 3
    assert (tmp_path / "cluster.key").stat().st_mode & 0o777 == 0o600


def test_without_peers_there_is_no_key(tmp_path: Path) -> None:
    assert cluster_key(engine(), None, None, tmp_path) == b""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "beyond",
    [
        engine(role="prefill", peer_host="10.0.0.5"),
        engine(role="prefill", peer_host="0.0.0.0"),  # noqa: S104
        engine(role="decode", peer_host="10.0.0.6", peers=("127.0.0.1:8100",)),
        engine(role="decode", peer_host="10.0.0.6", peers=("10.0.0.5:8100",)),
        engine(router="10.0.0.5:8200"),
    ],
)
def test_beyond_this_machine_a_key_must_be_given(tmp_path: Path, beyond: EngineSettings) -> None:
    with pytest.raises(BadPairing, match="cluster key"):
        cluster_key(beyond, None, None, tmp_path)
    assert len(cluster_key(beyond, "a key that is long enough", None, tmp_path)) == 32


def test_a_key_is_the_same_as_text_and_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a key that is long enough\n")
    prefill = engine(role="prefill")
    assert cluster_key(prefill, None, str(file), tmp_path) == cluster_key(
        prefill, "a key that is long enough", None, tmp_path
    )


def test_a_short_key_two_keys_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    prefill = engine(role="prefill")
    with pytest.raises(BadPairing, match="at least 16"):
        cluster_key(prefill, "short", None, tmp_path)
    with pytest.raises(BadPairing, match="both"):
        cluster_key(prefill, "a key that is long enough", str(tmp_path / "key"), tmp_path)
    with pytest.raises(BadPairing, match="cannot be read"):
        cluster_key(prefill, None, str(tmp_path / "key"), tmp_path)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    file = tmp_path / "key"
    file.write_text(secret := "k" * 20)
    file.chmod(mode)
    cluster_key(engine(role="decode"), None, str(file), tmp_path)
    assert ("chmod 600" in caplog.text) == warned
    assert secret not in caplog.text


def test_a_key_file_that_others_may_have_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.key"
    file.write_text("k" * 32)
    file.chmod(0o666)
    with pytest.raises(BadPairing, match="can be written by everybody"):
        cluster_key(engine(router="10.0.0.5:8200"), None, str(file), tmp_path)
