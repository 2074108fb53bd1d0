"""`baton router`: what its options become, and what is told where they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.core.routing.config import RoutingPolicy
from baton.router import service

KEY = ("--cluster-key", "a cluster key of the tests")


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[service.RouterSettings]:
    """Settings that would have been routed with."""
    made: list[service.RouterSettings] = []
    monkeypatch.setattr(service, "route", lambda settings, say, stages: made.append(settings))
    return made


def call(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["router", *options], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_options_become_settings(routed: list[service.RouterSettings]) -> None:
    options = (
        "--executor", "scripted", "--policy", "round-robin", "--preempt-retry-count", "5",
        "--no-preempt-retry-exclude-decode", "--request-timeout", "30", "--orphan-grace", "2.5", "--key-concurrency", "7",
        "--key-tokens-per-minute", "1000", "--max-waiting", "9", "--join-port", "0", "--fruitless-loss-count", "6",
        "--served-model-name", "m", "--admin-key", "operator", *KEY,
    )  # fmt: skip
    assert call(*options)[0] == 0
    (settings,) = routed
    config = settings.config
    assert (settings.scripted, settings.names, settings.join_port) == (True, ("m",), 0)
    assert settings.admin_key == "operator"
    assert "operator" not in repr(settings)
    assert (config.policy, config.preempt_retry_count, config.preempt_retry_exclude_decode) == (
        RoutingPolicy.ROUND_ROBIN,
        5,
        False,
    )
    assert (config.deadline_us, config.orphan_grace_us, config.waiting_max) == (30_000_000, 2_500_000, 9)
    assert (config.key_concurrency, config.key_tokens_per_minute, config.fruitless_loss_count) == (7, 1000, 6)


@pytest.mark.parametrize(("timeout", "limit_us"), [("30", 28_000_000), ("3", 1_500_000), ("0", 1_000)])
def test_requests_are_moved_before_a_draining_instance_stops_by_itself(
    routed: list[service.RouterSettings], timeout: str, limit_us: int
) -> None:
    assert call("--executor", "scripted", "--drain-timeout", timeout, *KEY)[0] == 0
    assert (routed[0].drain_timeout_s, routed[0].config.drain_us) == (float(timeout), limit_us)


def test_a_file_gives_defaults(routed: list[service.RouterSettings], tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('policy = "random"\npreempt-retry-count = 1\n')
    assert call("--config", str(file), "--preempt-retry-count", "2")[0] == 0
    assert (routed[0].config.policy, routed[0].config.preempt_retry_count) == (RoutingPolicy.RANDOM, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "0.0.0.0"), "--api-key"),  # noqa: S104
        (("--join-host", "0.0.0.0", "--executor", "scripted"), "cluster key"),  # noqa: S104
        (("--host", "0.0.0.0", "--admin-key", "operator"), "--api-key"),  # noqa: S104
        (("--admin-key", ""), "--admin-key is empty"),
        (("--policy", "whim"), "whim"),
        (("--preempt-retry-count", "-1"), "preempt-retry-count"),
        (("--suspect-after", "0.1"), "suspect-after"),
    ],
)
def test_a_bad_option_is_told_by_its_name(options: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CLUSTER_KEY", raising=False)
    code, output = call(*options)
    assert code != 0
    assert named in output
    assert "Traceback" not in output


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", ["router", "serve", "up", "drain", "chat"])
def test_help_shows_the_names_of_all_options_whole(command: str, columns: int) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": str(columns)}).output
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= columns
    assert command not in ("router", "up") or "--no-preempt-retry-exclude-decode" in shown
