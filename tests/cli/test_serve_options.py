"""`baton serve`: which settings come of flags, environment, file and defaults, and how a bad file is told."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli import serve as serve_module
from baton.cli.main import app
from baton.cli.serve import log_to_stderr
from baton.core.config import BringBack, ReservePolicy, VictimPolicy, WorkerConfig
from baton.node.settings import DeviceChoice, EngineSettings, LogFormat, LogLevel, SpeculateMethod

Settings = dict[str, Any]


class Serve:
    """Runs the command up to where a server would start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: Settings = {}
        monkeypatch.setattr(serve_module, "_run", self._keep)

    def _keep(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, *options: str, **environment: str) -> Settings:
        result = CliRunner().invoke(app, ["serve", *options], env=environment, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return self.settings

    def error(self, *options: str, **environment: str) -> str:
        result = CliRunner().invoke(app, ["serve", *options], env={"COLUMNS": "400", **environment})
        assert result.exit_code == 2, result.output
        assert not self.settings
        return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    return Serve(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "baton.toml"
        path.write_text(text)
        return str(path)

    return write


Write = Callable[[str], str]


def test_the_defaults_are_those_of_the_engine(serve: Serve) -> None:
    engine: EngineSettings = serve()["engine"]
    assert engine == EngineSettings(endpoint="", model_folder=None, prefix_secret=b"")
    core = WorkerConfig(slots=64, blocks=1)
    for name in ("reserve", "ratio_initial", "ratio_decay", "ratio_floor", "ratio_clip_tokens", "fixed_blocks",
                 "fixed_blocks_decay", "victims", "max_preemptions"):  # fmt: skip
        assert getattr(engine, name) == getattr(core, name)


def test_every_constant_of_the_policies_is_a_flag(serve: Serve) -> None:
    engine = serve(
        "--reserve", "fixed-blocks", "--ratio-initial", "0.5", "--ratio-decay", "0.01", "--ratio-floor", "0.2",
        "--ratio-clip-tokens", "100", "--fixed-blocks", "4", "--fixed-blocks-decay", "0.5", "--victims", "cheapest",
        "--max-preemptions", "3",
    )["engine"]  # fmt: skip
    assert (engine.reserve, engine.victims) == (ReservePolicy.FIXED_BLOCKS, VictimPolicy.CHEAPEST)
    assert (engine.ratio_initial, engine.ratio_decay, engine.ratio_floor) == (0.5, 0.01, 0.2)
    assert (engine.ratio_clip_tokens, engine.fixed_blocks, engine.fixed_blocks_decay) == (100, 4, 0.5)
    assert engine.max_preemptions == 3


def test_every_option_of_an_instance_with_peers_is_a_flag_and_a_key_of_the_file(serve: Serve, file: Write) -> None:
    flags = serve(
        "--role", "decode", "--peer", "127.0.0.1:1", "--peer", "127.0.0.1:2", "--peer-host", "127.0.0.2",
        "--transfer", "tcp", "--on-preempt", "reschedule", "--prefill-timeout", "5", "--lease", "1.5",
        "--cluster-key-file", "key",
    )  # fmt: skip
    path = file(
        """
        role = "decode"
        peer = ["127.0.0.1:1", "127.0.0.1:2"]
        peer-host = "127.0.0.2"
        transfer = "tcp"
        on-preempt = "reschedule"
        prefill-timeout = 5
        lease = 1.5
        cluster-key-file = "key"
        """
    )
    engine: EngineSettings = flags["engine"]
    assert (engine.role, engine.peers, engine.peer_host) == ("decode", ("127.0.0.1:1", "127.0.0.1:2"), "127.0.0.2")
    assert (engine.transfer, engine.on_preempt) == ("tcp", "reschedule")
    assert (engine.deadline_us, engine.lease_us, flags["cluster_key_file"]) == (5_000_000, 1_500_000, "key")
    assert serve("--config", path) == flags


def test_every_option_of_drafts_is_a_flag_and_a_key_of_the_file(serve: Serve, file: Write) -> None:
    flags = serve("--speculate", "ngram", "--draft-tokens", "6", "--ngram-min", "3", "--ngram-max", "7")
    engine: EngineSettings = flags["engine"]
    assert (engine.speculate, engine.draft_tokens, engine.ngram_min, engine.ngram_max) == (SpeculateMethod.NGRAM, 6, 3, 7)
    assert engine.burst == 7
    path = file('speculate = "ngram"\ndraft-tokens = 6\nngram-min = 3\nngram-max = 7')
    assert serve("--config", path) == flags


def test_no_drafts_are_said_by_speculate_alone(serve: Serve) -> None:
    assert "draft-tokens" in serve.error("--speculate", "ngram", "--draft-tokens", "0")


def test_every_option_of_a_device_is_a_flag_and_a_key_of_the_file(serve: Serve, file: Write) -> None:
    flags = serve(
        "--device", "cuda", "--dtype", "float16", "--attention", "triton", "--batch-invariant", "--kv-memory", "40G"
    )  # fmt: skip
    engine: EngineSettings = flags["engine"]
    assert (engine.device, engine.dtype, engine.attention) == (DeviceChoice.CUDA, "float16", "triton")
    assert (engine.batch_invariant, engine.kv_memory_bytes) == (True, 40 << 30)
    path = file('device = "cuda"\ndtype = "float16"\nattention = "triton"\nbatch-invariant = true\nkv-memory = "40G"')
    assert serve("--config", path) == flags


def test_a_decode_yields_one_token_unless_somebody_may_guess(serve: Serve) -> None:
    bursts = {name: serve("--speculate", name, "--draft-tokens", "3")["engine"].burst for name in ("off", "naive", "ngram")}
    assert bursts == {"off": 1, "naive": 4, "ngram": 4}


def test_every_option_of_kv_beyond_the_pool_is_a_flag_and_a_key_of_the_file(serve: Serve, file: Write) -> None:
    flags = serve(
        "--host-memory", "1G", "--kv-store", "file:/kv", "--kv-store-limit", "20G", "--no-save-preempted",
        "--no-save-finished", "--no-cache-outputs", "--bring-back", "always",
    )  # fmt: skip
    path = file(
        """
        host-memory = "1G"
        kv-store = "file:/kv"
        kv-store-limit = "20G"
        save-preempted = false
        save-finished = false
        cache-outputs = false
        bring-back = "always"
        """
    )
    engine: EngineSettings = flags["engine"]
    assert (engine.host_memory_bytes, engine.kv_store, engine.kv_store_limit_bytes) == (1 << 30, "file:/kv", 20 << 30)
    assert (engine.save_preempted, engine.save_finished, engine.cache_outputs) == (False, False, False)
    assert engine.bring_back is BringBack.ALWAYS
    assert serve("--config", path) == flags


def test_a_store_has_host_memory_to_pass_through_unless_told_otherwise(serve: Serve) -> None:
    assert serve()["engine"].host_bytes == 0
    assert serve("--kv-store", "file:/kv")["engine"].host_bytes == 1 << 30
    assert serve("--kv-store", "file:/kv", "--host-memory", "1M")["engine"].host_bytes == 1 << 20


def test_an_empty_address_is_no_store(serve: Serve, file: Write) -> None:
    plain = serve()
    assert serve("--kv-store", "") == serve(BATON_KV_STORE="") == serve("--config", file('kv-store = ""')) == plain
    assert plain["engine"].kv_store is None
    assert serve("--kv-store", "", BATON_KV_STORE="file:/kv") == plain, "which goes before what the environment names"


@pytest.mark.parametrize("option", ["--kv-memory", "--host-memory", "--kv-store-limit"])
def test_what_is_no_size_is_told_by_the_name_of_its_option(serve: Serve, option: str) -> None:
    assert f"Invalid value for {option}: 'lots' is not a size" in serve.error(option, "lots")


def test_the_cluster_key_comes_from_the_environment_too(serve: Serve) -> None:
    settings = serve("--role", "prefill", "--peer-port", "0", "--prefill-path", "general", BATON_CLUSTER_KEY="from outside")
    assert settings["cluster_key"] == "from outside"
    assert (settings["engine"].peer_port, settings["engine"].prefill_path) == (0, "general")


@pytest.mark.parametrize(
    "options", [("--ratio-initial", "1.1"), ("--victims", "oldest"), ("--max-preemptions", "-1"), ("--draft-tokens", "0")]
)
def test_a_constant_out_of_its_range_is_named(serve: Serve, options: tuple[str, str]) -> None:
    assert options[0] in serve.error(*options)


def test_a_flag_goes_before_the_environment_that_before_the_file_that_before_the_default(serve: Serve, file: Write) -> None:
    path = file("max-num-seqs = 3\nblock-size = 4\nport = 5\n")
    settings = serve("--config", path, "--max-num-seqs", "1", BATON_MAX_NUM_SEQS="2", BATON_BLOCK_SIZE="8")
    engine = settings["engine"]
    assert (engine.slots, engine.block_size, settings["port"], engine.depth) == (1, 8, 5, 2)


def test_a_file_sets_options_of_every_type(serve: Serve, file: Write) -> None:
    path = file(
        """
        model = "./folder"
        host = "localhost"
        api-key = ["one", "two"]
        dtype = "float32"
        prefix-cache = false
        access-log = false
        log-level = "warning"
        kv-blocks = 7
        drain-timeout = 5
        ratio-floor = 0.25
        reserve = "none"
        """
    )
    settings = serve("--config", path)
    engine = settings["engine"]
    assert (settings["model"], settings["host"], settings["api_keys"]) == ("./folder", "localhost", ("one", "two"))
    assert (settings["access_log"], settings["log_level"]) == (False, LogLevel.WARNING)
    assert (engine.dtype, engine.prefix_cache, engine.blocks) == ("float32", False, 7)
    assert settings["drain_timeout_s"] == 5.0
    assert (engine.ratio_floor, engine.reserve) == (0.25, ReservePolicy.NONE)


def test_a_flag_turns_on_what_the_file_turns_off(serve: Serve, file: Write) -> None:
    path = file("prefix-cache = false\naccess-log = false\n")
    settings = serve("--config", path, "--prefix-cache", BATON_ACCESS_LOG="1")
    assert (settings["engine"].prefix_cache, settings["access_log"]) == (True, True)


def test_the_model_of_the_command_line_goes_before_that_of_the_file(serve: Serve, file: Write) -> None:
    assert serve("mine", "--config", file('model = "theirs"'))["model"] == "mine"


def test_the_environment_can_name_the_file(serve: Serve, file: Write) -> None:
    assert serve(BATON_CONFIG=file("port = 77"))["port"] == 77


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-num-seq = 64", "'max-num-seq' is not an option; did you mean 'max-num-seqs'?"),
        ("max_num_seqs = 64", "'max_num_seqs' is not an option; did you mean 'max-num-seqs'?"),
        ("zzz = 1", "'zzz' is not an option"),
        ('config = "other.toml"', "'config' is not an option"),
        ("help = true", "'help' is not an option"),
        ("[server]\nport = 1", "'server' is not an option"),
        ('port = "8000"', "'port' is wrong: Expected `int`, got `str`"),
        ("port = 80.5", "'port' is wrong: Expected `int`, got `float`"),
        ("port = true", "'port' is wrong: Expected `int`, got `bool`"),
        ("port = 65536", "'port' is 65536; the most is 65535"),
        ("block-size = 0", "'block-size' is 0; the least is 1"),
        ("ratio-decay = nan", "'ratio-decay' is nan"),
        ("ratio-floor = -0.1", "'ratio-floor' is -0.1; the least is 0"),
        ("prefix-cache = 1", "'prefix-cache' is wrong: Expected `bool`, got `int`"),
        ('prefix-cache = "no"', "'prefix-cache' is wrong: Expected `bool`, got `str`"),
        ('api-key = "one"', "'api-key' is wrong: Expected `array | null`, got `str`"),
        ("api-key = [1]", "'api-key' is wrong: Expected `str`, got `int`"),
        ("host = 1979-05-27", "'host' is wrong"),
        ("kv-memory = {a = 1}", "'kv-memory' is wrong"),
        ('dtype = "int4"', "'dtype' is wrong: Invalid enum value 'int4'"),
        ("port = \nhost = 1", "at line 1"),
        ("port = 1\nport = 2", "Cannot overwrite a value"),
    ],
)
def test_a_bad_file_is_told_with_the_key_and_the_file(serve: Serve, file: Write, text: str, named: str) -> None:
    path = file(text)
    for told in (serve.error("--config", path), serve.error(BATON_CONFIG=path)):
        assert named in told
        assert "baton.toml" in told


def test_a_bad_key_is_told_even_where_a_flag_goes_before_it(serve: Serve, file: Write) -> None:
    assert "'port' is wrong" in serve.error("--config", file('port = "x"'), "--port", "1")


def test_a_file_that_cannot_be_read_is_told(serve: Serve, tmp_path: Path) -> None:
    assert "nowhere.toml: No such file" in serve.error("--config", str(tmp_path / "nowhere.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"host = '\xff'")
    assert "bytes.toml" in serve.error("--config", str(tmp_path / "bytes.toml"))


@pytest.mark.parametrize(
    ("level", "access_log", "shown"),
    [
        (LogLevel.INFO, True, ["baton.access", "baton.engine"]),
        (LogLevel.INFO, False, ["baton.engine"]),
        (LogLevel.WARNING, True, []),
    ],
)
def test_the_log_goes_to_stderr_as_asked(
    capsys: pytest.CaptureFixture[str], level: LogLevel, access_log: bool, shown: list[str]
) -> None:
    log_to_stderr({"log_level": level, "access_log": access_log, "log_format": LogFormat.TEXT})
    for name in ("baton.access", "baton.engine"):
        logging.getLogger(name).info("a line")
    captured = capsys.readouterr()
    assert re.findall(r"INFO (\S+) a line", captured.err) == shown
    assert captured.out == ""


def test_failures_of_the_http_server_are_lines_of_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr({"log_level": LogLevel.INFO, "access_log": True, "log_format": LogFormat.JSON})
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).error("it failed", exc_info=ValueError("oh"))
    shown = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["level"], line["exception"]) for line in shown] == [
        ("uvicorn.error", "ERROR", "ValueError: oh"),
        ("asyncio", "ERROR", "ValueError: oh"),
    ]


def test_under_a_router_what_cannot_be_held_goes_on_elsewhere_unless_told_otherwise(serve: Serve) -> None:
    assert (serve()["engine"].router, serve()["engine"].on_preempt) == (None, "resume")
    engine = serve("--router", "127.0.0.1:8200", "--name", "d1")["engine"]
    assert (engine.router, engine.name, engine.on_preempt) == ("127.0.0.1:8200", "d1", "reschedule")
    assert serve("--on-preempt", "resume", BATON_ROUTER="127.0.0.1:8200")["engine"].on_preempt == "resume"
