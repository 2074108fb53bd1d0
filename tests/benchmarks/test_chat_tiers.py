from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import chat_tiers as chat_module
from benchmarks import servers as servers_module
from benchmarks.__main__ import app
from benchmarks.chat_tiers import ChatOptions
from benchmarks.store_servers import valkey_why_not


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "IDLE_LOOK_S", 0.05)
    monkeypatch.setattr(chat_module, "versions_of", lambda _peer, _failures: {"Baton": "0"})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve conversations of four rounds, each 400 tokens of the client and 16 of the answer."""
    rows = [(400 * (turn + 1) + 16 * turn, 16) for _ in range(12) for turn in range(4)]
    path = tmp_path / "sharegpt.csv"
    lines = [f"{asked},{answered},{asked + answered},{asked / answered}" for asked, answered in rows]
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + "\n".join(lines) + "\n")
    return path


def test_no_instance_has_more_behind_its_pool_than_its_name_says() -> None:
    none, host, file, valkey = ChatOptions(None).sides
    assert (none.args, none.store) == ((), None)
    assert host.store is None
    assert file.args == valkey.args  # the same host memory in front of both stores


@pytest.mark.slow
def test_conversations_are_found_again_behind_the_pool(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "o.json"
    command = [
        "chat-tiers", "scripted", "--trace", str(trace), "--pairs", "1", "--sessions", "12", "--think", "0.01",
        "--kv-blocks", "24", "--our-args", "--step-ms 1 --bring-back always", "--json", str(out),
    ]  # fmt: skip
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    report = json.loads(out.read_text())
    assert report["requests"] == 48
    rows = {row["side"]: row for row in report["rows"]}
    assert list(rows) == ["none", "host", "file", "valkey"]
    found = {side: row["hit_rate"][0] for side, row in rows.items() if row["hit_rate"]}
    assert found["none"] < 0.5 < found["host"] < 1
    assert found["file"] > 0.5
    assert rows["file"]["counts"][0]["stored"] > 0
    assert ("valkey" in found) == (valkey_why_not() is None)


def test_too_few_conversations_are_refused(trace: Path) -> None:
    ran = CliRunner().invoke(app, ["chat-tiers", "scripted", "--trace", str(trace), "--sessions", "500"])
    assert ran.exit_code == 2
    assert "500 sessions were asked for" in ran.output
