"""`baton up`: which options it takes, to whom they go, and what it says of those that make no sense."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import up as command
from baton.cli.main import app
from baton.up.fleet import FleetPlan, Member, Ports

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[FleetPlan]:
    """What would be run."""
    made: list[FleetPlan] = []

    def run(plan: FleetPlan, needs_model: bool) -> int:
        made.append(plan)
        return 0

    monkeypatch.setattr(command, "_run", run)
    monkeypatch.setattr(command, "check_port", lambda host, port: None)
    return made


def up(*options: str) -> str:
    result = CliRunner().invoke(app, ["up", *options], env=WIDE)
    return f"{result.exit_code}: {result.output}"


def test_alone_it_is_one_instance_that_does_everything(plans: list[FleetPlan]) -> None:
    assert up().startswith("0")
    assert plans[0].members == (Member("mixed-1", "mixed"),)


def test_the_demo_is_one_that_prefills_and_two_that_decode(plans: list[FleetPlan]) -> None:
    up("--demo")
    assert [member.name for member in plans[0].members] == ["prefill-1", "decode-1", "decode-2"]
    assert "--demo" in plans[0].router_command(Ports(8000))
    up("--demo", "--kv-blocks", "64")
    small, given = (" ".join(plan.member_command(plan.members[0], "h:1", 2)) for plan in plans)
    assert "--kv-memory 128M" in small
    assert "--kv-memory" not in given


def test_options_go_to_whom_they_concern(plans: list[FleetPlan]) -> None:
    up(
        "m",
        "--decode",
        "2",
        "--dtype",
        "float32",
        "--policy",
        "random",
        "--api-key",
        "k",
        "--host",
        "10.0.0.5",
        "--kv-blocks=64",
    )
    instance = plans[0].member_command(Member("decode-1", "decode"), "127.0.0.1:9", cores=8)
    router = plans[0].router_command(Ports(8000, 9))
    text = " ".join(instance[3:])
    assert text.startswith("serve m --role decode --name decode-1 --router 127.0.0.1:9 --port 0 --threads 4")
    assert "--dtype float32" in text
    assert "--kv-blocks 64" in text
    assert plans[0].api_keys == ("k",)
    assert "--api-key" not in (*instance, *router), "command lines can be read by everybody"
    assert "--host" not in instance
    assert "--policy" not in instance
    assert " ".join(router[3:]).startswith("router m --port 8000 --join-port 9")
    assert "--host 10.0.0.5" in " ".join(router)
    assert "--policy random" in " ".join(router)
    assert "--dtype" not in router


def test_threads_that_were_given_are_not_shared_out(plans: list[FleetPlan]) -> None:
    up("--mixed", "4", "--threads", "3")
    assert "--threads 3" in " ".join(plans[0].member_command(Member("mixed-1", "mixed"), "h:1", cores=2))


def test_instances_are_quiet_unless_asked(plans: list[FleetPlan]) -> None:
    up()
    up("--log-level", "debug")
    quiet, loud = (" ".join(plan.member_command(plan.members[0], "h:1", 2)) for plan in plans)
    assert "--log-level warning" in quiet
    assert "--log-level debug" in loud


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill", "1"), "nobody would answer"),
        (("--mixed", "0"), "nobody would answer"),
        (("--prefill", "1", "--mixed", "1"), "there are none"),
        (("--mixed", "65"), "more than 64 instances"),
        (("--decode", "-1"), "Invalid value for '--decode'"),
        (("--kv-blocks", "none"), "Invalid value for '--kv-blocks'"),
        (("--role", "decode"), "No such option: --role"),
        (("--cluster-key", "secret"), "No such option: --cluster-key"),
        (("--kv-block", "5"), "--kv-blocks"),
    ],
)
def test_what_makes_no_sense_is_told(plans: list[FleetPlan], options: tuple[str, ...], said: str) -> None:
    output = up(*options)
    assert said in output.replace("\n", " ")
    assert not output.startswith("0")
    assert plans == []


def test_a_model_that_is_not_there_is_told_before_anything_starts() -> None:
    assert "there is no folder or file 'nowhere'" in up("nowhere").replace("\n", " ")


def test_a_port_in_use_is_told_with_the_option_that_this_command_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = up("--executor", "scripted", "--router-port", str(port)).replace("\n", " ")
    assert output.startswith(f"1: baton up: cannot listen on 127.0.0.1:{port}")
    assert "--router-port" in output


def test_a_file_may_have_the_options_of_all_of_them(plans: list[FleetPlan], tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        'decode = 2\nrouter-port = 9799\nkv-blocks = 64\napi-key = ["one", "two"]\npolicy = "random"\nprefix-cache = false\n'
    )
    assert up("--config", str(file), "--kv-blocks", "32").startswith("0")
    (plan,) = plans
    assert ([member.name for member in plan.members], plan.router_port) == (["decode-1", "decode-2"], 9799)
    instance = " ".join(plan.member_command(plan.members[0], "h:1", 2))
    assert "--kv-blocks 32" in instance
    assert "--no-prefix-cache" in instance
    assert plan.api_keys == ("one", "two")
    assert "--config" not in instance
    assert "--policy random" in " ".join(plan.router_command(Ports(9799)))
    file.write_text('name = "x"\n')
    assert "'name' is not an option" in up("--config", str(file)).replace("\n", " ")
