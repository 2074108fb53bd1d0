"""`baton up`: which options it takes, to whom they go, and what it says of those that make no sense."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import up as command
from baton.cli.main import app
from baton.node.baton_command import baton_command
from baton.node.settings import LogFormat
from baton.up.fleet_plan import FleetPlan, PlannedProcess, RouterPorts

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[FleetPlan]:
    """What would be run."""
    made: list[FleetPlan] = []

    def run(plan: FleetPlan, log_format: LogFormat, needs_model: bool) -> int:
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
    assert plans[0].members == (PlannedProcess("mixed-1", "mixed"),)


def test_the_demo_is_one_that_prefills_and_two_that_decode(plans: list[FleetPlan]) -> None:
    up("--demo")
    assert [member.name for member in plans[0].members] == ["prefill-1", "decode-1", "decode-2"]
    assert "--demo" in plans[0].router_command(RouterPorts(8000))
    up("--demo", "--kv-blocks", "64")
    small, given = (" ".join(plan.member_command(plan.members[0], "h:1", 2)) for plan in plans)
    assert f"--kv-memory {command.DEMO_KV}" in small
    assert "--kv-memory" not in given


def test_answers_of_the_demo_have_a_length_unless_another_is_given(plans: list[FleetPlan]) -> None:
    up("--demo")
    up("--demo", "--override-generation-config", '{"temperature": 0}')
    up()
    demo, given, plain = (plan.router_command(RouterPorts(8000)) for plan in plans)
    assert demo[demo.index("--override-generation-config") + 1] == '{"max_new_tokens": 256}'
    assert given[given.index("--override-generation-config") + 1] == '{"temperature": 0}'
    assert "--override-generation-config" not in plain
    assert up("--override-generation-config", "{").startswith("2: baton up: --override-generation-config is not JSON")
    assert len(plans) == 3


def test_the_device_is_every_instance_s_and_what_it_cannot_do_is_told_once(plans: list[FleetPlan]) -> None:
    assert up("m", "--mixed", "2", "--device", "cuda", "--batch-invariant", "--kv-memory", "20G").startswith("0")
    text = " ".join(plans[0].member_command(plans[0].members[1], "h:1", 2))
    assert "--device cuda" in text
    assert "--batch-invariant" in text
    assert "--kv-memory 20G" in text
    told = up("m", "--device", "cpu", "--batch-invariant", "--attention", "gather")
    assert told.startswith("2: baton up: --batch-invariant on a CPU needs the native kernels")
    assert "'flashinfer' is not one of 'auto', 'native', 'gather', 'triton'" in up("m", "--attention", "flashinfer")
    assert len(plans) == 1


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
    instance = plans[0].member_command(PlannedProcess("decode-1", "decode"), "127.0.0.1:9", cores=8)
    router = plans[0].router_command(RouterPorts(8000, 9))
    text = " ".join(instance[len(baton_command()) :])
    assert text.startswith(
        "serve m --role decode --name decode-1 --router 127.0.0.1:9 --host 127.0.0.1 --port 0 --threads 4"
    )
    assert "--dtype float32" in text
    assert "--kv-blocks 64" in text
    assert plans[0].api_keys == ("k",)
    assert "--api-key" not in (*instance, *router), "command lines can be read by everybody"
    assert "10.0.0.5" not in instance, "instances stay on loopback"
    assert "--policy" not in instance
    assert " ".join(router[len(baton_command()) :]).startswith("router m --port 8000 --join-port 9")
    assert "--host 10.0.0.5" in " ".join(router)
    assert "--policy random" in " ".join(router)
    assert "--dtype" not in router


def test_a_store_is_told_to_all_and_its_address_stands_in_no_command_line(
    plans: list[FleetPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = f"file:{tmp_path}/kv"
    up("--kv-store", store, "--host-memory", "1G", "--no-save-finished")
    up("--kv-store", store, "--mixed", "3")
    up("--kv-store", "valkey://me:secret@localhost:6379/0")
    up("--kv-store", "")
    line = " ".join(plans[0].member_command(PlannedProcess("mixed-1", "mixed"), "h:1", cores=2))
    assert "--host-memory 1G" in line
    assert "--no-save-finished" in line
    assert [plan.kv_store for plan in plans] == [store, store, "valkey://me:secret@localhost:6379/0", None]
    assert not any("secret" in word for word in plans[2].member_command(PlannedProcess("mixed-1", "mixed"), "h:1", cores=2))
    first, second, other, none = (plan.cluster_key for plan in plans)
    assert first == second != other, "what was stored is found after the fleet was started again"
    assert none is None
    assert not any(key in repr(plan) for plan in plans for key in (first, other, "secret") if key is not None)


def test_threads_that_were_given_are_not_shared_out(plans: list[FleetPlan]) -> None:
    up("--mixed", "4", "--threads", "3")
    assert "--threads 3" in " ".join(plans[0].member_command(PlannedProcess("mixed-1", "mixed"), "h:1", cores=2))


def test_trust_in_the_network_is_told_to_every_instance(plans: list[FleetPlan]) -> None:
    up("--decode", "1", "--transfer", "mooncake", "--trust-network")
    line = " ".join(plans[0].member_command(PlannedProcess("decode-1", "decode"), "h:1", cores=2))
    assert "--transfer mooncake" in line
    assert "--trust-network" in line


def test_instances_are_quiet_unless_asked(plans: list[FleetPlan]) -> None:
    up()
    up("--log-level", "debug")
    CliRunner().invoke(app, ["up"], env=WIDE | {"BATON_LOG_LEVEL": "debug"})
    quiet, loud, inherited = (" ".join(plan.member_command(plan.members[0], "h:1", 2)) for plan in plans)
    assert "--log-level warning" in quiet
    assert "--log-level debug" in loud
    assert "--log-level" not in inherited


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
        (("--kv-store", "somewhere"), "is not the address of a store"),
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


def test_keys_are_in_no_command_line_which_others_could_read(plans: list[FleetPlan]) -> None:
    up("--api-key", "alpha", "--api-key", "beta", "--admin-key", "gamma", "--metrics-key", "delta")
    (plan,) = plans
    assert (plan.api_keys, plan.admin_key, plan.metrics_key) == (("alpha", "beta"), "gamma", "delta")
    lines = [*plan.router_command(RouterPorts(8000)), *plan.member_command(plan.members[0], "h:1", 2)]
    assert not {"alpha", "beta", "gamma", "delta"} & set(lines)
    assert "alpha" not in repr(plan)
    assert "delta" not in repr(plan)


FILE = """
model = "m"
decode = 2
prefill = 1
router-port = 9799
executor = "scripted"
api-key = ["file-key-1", "file-key-2"]
admin-key = "file-admin"
policy = "random"
key-concurrency = 7
preempt-retry-exclude-decode = false
kv-blocks = 64
prefix-cache = false
served-model-name = ["x", "y"]
threads = 3
"""


def from_file(folder: Path, text: str, *options: str, **environment: str) -> str:
    file = folder / "fleet.toml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["up", "--config", str(file), *options], env=WIDE | environment)
    return f"{result.exit_code}: {result.output}"


def test_a_file_has_options_of_all_and_each_process_gets_its_own(plans: list[FleetPlan], tmp_path: Path) -> None:
    assert from_file(tmp_path, FILE).startswith("0")
    (plan,) = plans
    assert (plan.model, plan.router_port, len(plan.members)) == ("m", 9799, 3)
    assert (plan.api_keys, plan.admin_key) == (("file-key-1", "file-key-2"), "file-admin")
    router = " ".join(plan.router_command(RouterPorts(9799)))
    instance = " ".join(plan.member_command(plan.members[1], "h:1", 8))
    both = ("--executor scripted", "--served-model-name x --served-model-name y")
    of_router = ("--policy random", "--key-concurrency 7", "--no-preempt-retry-exclude-decode")
    of_instance = ("--kv-blocks 64", "--no-prefix-cache", "--threads 3")
    for option in (*both, *of_router):
        assert option in router
    for option in (*both, *of_instance):
        assert option in instance
    assert not any(option in instance for option in of_router)
    assert not any(option in router for option in of_instance)
    assert "--config" not in router + instance


def test_traces_are_made_by_the_router_and_an_address_that_is_none_is_refused(
    plans: list[FleetPlan], tmp_path: Path
) -> None:
    from_file(tmp_path, "", "--otlp-sample-ratio", "0.5")
    (plan,) = plans
    assert "--otlp-sample-ratio 0.5" in " ".join(plan.router_options)
    assert "--otlp-sample-ratio" not in plan.serve_options
    assert "--otlp-endpoint must be an address" in from_file(tmp_path, "", "--otlp-endpoint", "collector")


def test_flags_and_the_environment_go_before_the_file(plans: list[FleetPlan], tmp_path: Path) -> None:
    from_file(
        tmp_path, FILE, "--decode", "4", "--policy", "round-robin", BATON_API_KEY="of-the-environment", BATON_KV_BLOCKS="9"
    )
    (plan,) = plans
    assert plan.decode == 4
    assert "--policy round-robin" in " ".join(plan.router_options)
    assert "--kv-blocks" not in plan.serve_options, "they inherit it"
    assert plan.api_keys == ("of-the-environment",)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("decod = 1", "'decod' is not an option; did you mean 'decode'?"),
        ("router_port = 1", "did you mean 'router-port'?"),
        ("key-concurency = 1", "did you mean 'key-concurrency'?"),
        ("context = 1", "'context' is not an option"),
        ("config = 'x'", "'config' is not an option"),
        ("decode = 'two'", "'decode' is wrong"),
        ("decode = -1", "'decode' is -1; the least is 0"),
        ("port = 8000", "'port' is not an option of baton up, which settles it for each process; the port of the API is"),
        ("cluster-key = 'secret'", "'cluster-key' is not an option of baton up"),
        ("api-key = ['']", "must not be empty"),
        ("api-key = ['two words']", "must not be empty or have spaces"),
        ("admin-key = ''", "must not be empty"),
        ("metrics-key = 'two words'", "must not be empty or have spaces"),
    ],
)
def test_what_a_file_cannot_say_is_told(plans: list[FleetPlan], tmp_path: Path, line: str, said: str) -> None:
    output = from_file(tmp_path, line)
    assert said in " ".join(output.replace("│", " ").split())
    assert not output.startswith("0")
    assert plans == []
