from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench import sim_run as simulated
from baton.bench.sim_options import SimOptions
from baton.bench.sim_run import COMPARE_SYNTAX, Simulation, parse_policies
from baton.cli.main import app
from baton.core.config import ReservePolicy, VictimPolicy
from baton.sim.cluster import RunSpec
from baton.sim.run_records import RequestOutcome, RunRecord, SimulatedRequest
from tests.sim.made_records import request_record

SMALL = ["--requests", "20", "--input-tokens", "64", "--output-tokens", "8", "--concurrency", "4"]


def sim_run(*more: str | Path) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["sim", "run", *map(str, more)], env={"COLUMNS": "200"})
    return ran.exit_code, " ".join(ran.output.split())


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    rows = (f"2023-11-16 18:15:{n // 2:02d}.{n % 2}00000,{100 + n},{5 + n}\n" for n in range(40))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows) + "2023-11-16 18:16:00.0,900000,5\n")
    return path


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Every request takes as long as its place says; what was asked of the simulator."""
    asked: list[RunSpec] = []

    def simulate(spec: RunSpec, progress: Callable[[int], None]) -> RunRecord:
        asked.append(spec)
        made = RunRecord(spec.label, spec.seed, spec.instances, spec.config.blocks, spec.config.block_size, wall_s=0.5)
        for index, call in enumerate(spec.calls):
            made.requests.append(
                request_record(index, call.at_us or 0, 1_000 * (index + 1), 500, call.output_tokens, call.input_tokens)
            )
            progress(1)
        made.end_us = 1_000_000
        return made

    monkeypatch.setattr(simulated, "simulate", simulate)
    return asked


def test_a_trace_is_played_at_its_speed(azure: Path, pretended: list[RunSpec]) -> None:
    code, said = sim_run("--trace", azure, "--speed", "6", "--instances", "3")
    assert code == 0, said
    assert "40 requests of azure.csv at 6 × its rate; 3 × h200-8b" in said
    assert "1 requests of the trace are left out: empty, or over 131,072 tokens." in said
    (spec,) = pretended
    assert spec.calls[2].at_us == round(1_000_000 / 6)
    assert (spec.instances, spec.concurrency, spec.config.waiting_max) == (3, None, 40)
    assert spec.config.blocks * 16 * 147_456 == pytest.approx(110e9, rel=0.02)


def test_policies_are_compared_over_seeds_with_everything_else_equal(azure: Path, pretended: list[RunSpec]) -> None:
    code, said = sim_run("--trace", azure, "--compare", "new-token-ratio/newest,none/cheapest", "--seeds", "2")
    assert code == 0, said
    assert [(spec.label, spec.seed) for spec in pretended] == [
        (label, seed) for label in ("new-token-ratio/newest", "none/cheapest") for seed in (0, 1)
    ]
    assert pretended[2].config.reserve is ReservePolicy.NONE
    assert pretended[2].config.victims is VictimPolicy.CHEAPEST
    assert pretended[1].calls == pretended[3].calls != pretended[0].calls
    assert "Median of 2 seeds" in said
    assert "Seed 0 keeps the trace's times" in said


def test_files_are_written(tmp_path: Path, pretended: list[RunSpec]) -> None:
    files = {name: tmp_path / name for name in ("o.json", "o.png", "t.json")}
    code, said = sim_run(*SMALL, "--json", files["o.json"], "--plot", files["o.png"], "--timeline", files["t.json"])
    assert code == 0, said
    report = json.loads(files["o.json"].read_text())
    assert (report["schema"], report["settings"]["concurrency"], report["runs"][0]["counts"]["finished"]) == (1, 4, 20)
    assert report["runs"][0]["ttft_s"]["p50"] == pytest.approx(0.0105)
    assert files["o.png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["t.json"].read_text())["traceEvents"]
    assert "Written" in said


def test_a_request_that_ends_as_none_should_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(spec: RunSpec, progress: Callable[[int], None]) -> RunRecord:
        lost = SimulatedRequest(0, 0, 64, ended_us=5, outcome=RequestOutcome.LOST)
        return RunRecord(spec.label, 0, 1, spec.config.blocks, 16, end_us=5, requests=[lost])

    monkeypatch.setattr(simulated, "simulate", simulate)
    code, said = sim_run(*SMALL)
    assert code == 1
    assert "1 requests did not end as they should" in said


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--compare", "none/oldest,none"], "'none/oldest' is no policy"),
        (["--compare", "none"], "nothing to compare with"),
        (["--compare", "none,none/newest"], "names a policy twice"),
        (["--compare", ""], "write RESERVE/VICTIMS"),
        (["--limit", "5"], "--limit and --speed are for a --trace"),
        (["--rate", "5", "--concurrency", "5"], "give one of them"),
        (["--rounds", "2"], "--rounds and --think-s are for --sessions"),
        (["--sessions", "2", "--requests", "4"], "leave out --requests"),
        (["--kv-blocks", "10", "--kv-memory", "1G"], "both size the pool"),
        (["--kv-memory", "a lot"], "is not a size"),
        (["--kv-memory", "1K"], "are 0 blocks"),
        (["--input-tokens", "200000"], "the longest request is 200,256 tokens"),
        (["--kv-blocks", "10"], "a sequence has at most 160"),
        (["--max-num-seqs", "4096"], "step_tokens (2048) must be at least slots"),
        (["--step-times", "abacus"], "abacus"),
        (["--seeds", "2"], "a closed loop has none of that"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--ttft-slo-s", "0"], "Invalid value for '--ttft-slo-s'"),
        (["--instances", "5000"], "Invalid value for '--instances'"),
        (["--trace", "nowhere.csv"], "does not exist"),
        (["--split", "3P"], "'3P' is no split: write how many prefill and how many decode, such as 3P5D"),
        (["--split", "0P8D"], "is no split"),
        (["--split", "1P1D", "--instances", "2"], "leave out --instances"),
        (["--link-gbytes", "10"], "are for a --split"),
        (["--prefill-path", "general"], "are for a --split"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_runs(
    more: list[str], complaint: str, pretended: list[RunSpec]
) -> None:
    code, said = sim_run(*more)
    assert code == 2, said
    assert complaint in said
    assert not pretended


def test_a_trace_brings_its_own_requests(azure: Path, tmp_path: Path, pretended: list[RunSpec]) -> None:
    code, said = sim_run("--trace", azure, "--requests", "5", "--rounds", "2")
    assert code == 2
    assert "leave out --requests, --rounds" in said
    code, said = sim_run("--trace", azure, "--speed", "2", "--rate", "5")
    assert code == 2
    assert "--speed plays the trace's own times" in said
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n10,5\n")
    code, said = sim_run("--trace", lengths)
    assert code == 2
    assert "--rate or --concurrency" in said
    assert sim_run("--trace", lengths, "--rate", "5")[0] == 0
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n10,many\n")
    code, said = sim_run("--trace", lengths, "--rate", "5")
    assert code == 2
    assert "line 2, column num_decode_tokens" in said


def test_the_syntax_of_policies() -> None:
    mixed = parse_policies(" none , fixed-blocks/newest", VictimPolicy.CHEAPEST)
    assert [(policy.reserve, policy.victims) for policy in mixed] == [
        (ReservePolicy.NONE, VictimPolicy.CHEAPEST),
        (ReservePolicy.FIXED_BLOCKS, VictimPolicy.NEWEST),
    ]
    assert len(parse_policies("all", VictimPolicy.NEWEST)) == 6
    assert all(choice in COMPARE_SYNTAX for choice in (*ReservePolicy, *VictimPolicy))


def test_long_runs_are_looked_at_less_often(azure: Path) -> None:
    def look_every_us(**options: object) -> int:
        simulation = Simulation(SimOptions(**options))  # type: ignore[arg-type]
        return simulation.spec(simulation.policies[0], 0).look_every_us

    assert look_every_us(trace=azure) == 100_000
    assert look_every_us(trace=azure, speed=0.01) == 1_000_000
    assert look_every_us(trace=azure, look_every_s=0.5) == 500_000


def test_a_real_run_ends_and_adds_up(tmp_path: Path) -> None:
    """Nothing pretended: the scheduler that serves, on a pool so small that requests must yield."""
    paths = tmp_path / "o.json", tmp_path / "t.json"
    code, said = sim_run(
        "--requests", "24", "--input-tokens", "96", "--output-tokens", "200", "--rate", "500",
        "--instances", "2", "--kv-blocks", "32",
        "--compare", "none,new-token-ratio", "--seeds", "2", "--json", paths[0], "--timeline", paths[1],
    )  # fmt: skip
    assert code == 0, said
    runs = json.loads(paths[0].read_text())["runs"]
    assert [run["counts"]["finished"] for run in runs] == [24] * 4
    assert all(run["tokens"]["output_tokens"] == 24 * 200 for run in runs)
    assert runs[0]["preemptions"] > 0
    assert all(0 < run["busy"]["most"] <= 1 for run in runs)
    assert {event["ph"] for event in json.loads(paths[1].read_text())["traceEvents"]} == set("MXCbe")


def test_a_real_conversation_finds_its_own_past_in_the_cache(tmp_path: Path) -> None:
    talk = ["--sessions", "3", "--rounds", "4", "--think-s", "0.5", "--input-tokens", "320", "--output-tokens", "32"]
    code, said = sim_run(*talk, "--concurrency", "3", "--json", tmp_path / "o.json")
    assert code == 0, said
    (run,) = json.loads((tmp_path / "o.json").read_text())["runs"]
    assert run["counts"]["finished"] == 12
    assert run["tokens"]["input_tokens"] == 3 * sum(320 * n + 32 * (n - 1) for n in range(1, 5))
    assert run["tokens"]["hit_rate"] > 0.5


def test_a_split_says_how_many_instances_there_are_and_is_told_by_role(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    code, said = sim_run(*SMALL, "--split", "1p2d", "--link-gbytes", "25", "--prefill-path", "general", "--json", out)
    assert code == 0, said
    assert "1p2d × h200-8b" in said
    assert "over 25 GB/s out of and into each instance" in said
    (run,) = json.loads(out.read_text())["runs"]
    decode, prefill = run["roles"]
    assert (decode["role"], decode["instances"], prefill["role"], prefill["instances"]) == ("decode", 2, "prefill", 1)
    assert decode["handovers"] == prefill["handovers"] == 20
    assert run["handover_s"]["count"] == 20
    assert decode["busy"]["least"] > 0 < prefill["busy"]["least"]
    assert decode["gigabytes"] == prefill["gigabytes"] > 0
