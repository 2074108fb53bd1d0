"""Worlds with faults: one seed is one world anywhere, many of them are clean, and a failure is told well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cli.sim_fuzz import replay_command
from baton.core.config import BringBack, OnPreempt, PrefillPath
from baton.core.routing.config import RouterConfig, RoutingPolicy
from baton.sim import fuzz
from baton.sim.faults import CLASSES, OF_ROUTERS, OF_STORAGE, OF_STORES, Fault
from baton.sim.fuzz import EVERY_FAULT, FuzzTotals, NothingBroken, ShardDied, run_many, shrink
from baton.sim.fuzzed_run import WorldVerdict, run_seed
from baton.sim.scenario import ScenarioTrim, draw_scenario
from baton.sim.shard import SeedReport
from tests.sim.planted import BUGS, read_catches
from tests.support.quick_sample import one_in

SEEDS = int(os.environ.get("BATON_TEST_SEEDS", "12"))
"""`make test-long` runs 2,000 of them."""
SAMPLE = range(0, 2000, 246)


def in_another_process(hash_seed: str, seeds: range) -> dict[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "baton.sim.shard"],
        input="".join(f"{seed}\n" for seed in seeds).encode(),
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    reports = [msgspec.json.decode(line, type=SeedReport) for line in done.stdout.splitlines()]
    return {report.seed: report.digest for report in reports}


@pytest.mark.parametrize("sample", [SAMPLE[:2], pytest.param(SAMPLE[2:], marks=pytest.mark.slow)], ids=["some", "others"])
def test_one_seed_is_one_world_in_any_process(sample: range) -> None:
    one = in_another_process("1", sample)
    assert one == in_another_process("4242", sample)
    assert list(one) == list(sample)
    assert len(set(one.values())) == len(sample)
    assert run_seed(sample[1]).digest == one[sample[1]]


@pytest.mark.parametrize("seed", one_in(3, (1, 2, 3)))
def test_telling_the_story_and_auditing_more_changes_nothing(seed: int) -> None:
    assert run_seed(seed).digest == run_seed(seed, tell_story=True, always_audit=True).digest


def test_worlds_with_faults_break_no_law(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how often each fault fired and each transition was taken; from 1,000 seeds on a zero fails."""
    with capsys.disabled():
        print()
        done = subprocess.run(
            [sys.executable, "-m", "baton", "sim", "fuzz", "--seeds", str(SEEDS)], check=False, timeout=800
        )
    assert done.returncode == 0


def test_every_world_is_large_enough() -> None:
    for seed in range(200):
        scenario = draw_scenario(seed)
        assert scenario.instances >= 3
        assert len(scenario.asks) >= 40
        assert len(scenario.classes) >= 3
        assert scenario.rates.network.reset <= 0.02
        assert scenario.rates.network.connect_fails <= 0.5
        assert scenario.rates.overload <= 4


def test_some_worlds_have_instances_that_prefill_for_others_and_some_have_none() -> None:
    worlds = [[role.name for role in draw_scenario(seed).roles] for seed in range(200)]
    split = [world for world in worlds if "prefill" in world]
    assert 60 <= len(split) <= 160
    for world in split:
        assert world[:2] == ["decode", "prefill"]
        assert 1 <= world.count("prefill") <= 2
        assert 1 <= world.count("decode") <= 3
    assert {"mixed"} in [set(world) for world in worlds]
    drawn = [draw_scenario(seed) for seed in range(200)]
    assert {scenario.giver.prefill_path for scenario in drawn} == set(PrefillPath)
    assert {scenario.config.on_preempt for scenario in drawn} == set(OnPreempt)
    assert {scenario.kv.pulls for scenario in drawn} == {False, True}
    assert max(scenario.rates.kv.broken for scenario in drawn) <= 0.12


def test_two_instances_of_a_split_world_are_one_of_each_kind() -> None:
    split = next(seed for seed in range(20) if len({role.name for role in draw_scenario(seed).roles}) > 1)
    small = draw_scenario(split, ScenarioTrim(instances=2))
    assert [role.name for role in small.roles] == ["decode", "prefill"]
    assert (small.peers_of(0), small.peers_of(1)) == (("instance 1",), ("instance 0",))


def test_every_fault_belongs_to_a_class_that_a_seed_can_draw() -> None:
    assert sorted(fault for faults in CLASSES.values() for fault in faults) == sorted(Fault)
    drawn = {name for seed in range(100) for name in draw_scenario(seed).classes}
    assert drawn == set(CLASSES)


def test_leaving_things_out_leaves_the_rest_as_it_was() -> None:
    whole = draw_scenario(9)
    part = draw_scenario(9, ScenarioTrim(classes=whole.classes[1:], asks=whole.asks[::3]))
    kept = {ask.index: ask for user in part.users for ask in user.asks}
    assert tuple(kept) == whole.asks[::3]
    for user in whole.users:
        for ask in user.asks:
            assert ask.index not in kept or kept[ask.index].prompt == ask.prompt


def test_leaving_a_class_of_faults_out_leaves_requests_and_the_other_rates_as_they_were() -> None:
    for seed in range(40):
        whole = draw_scenario(seed)
        for name in whole.classes:
            part = draw_scenario(seed, ScenarioTrim(classes=tuple(kept for kept in whole.classes if kept != name)))
            assert part.config == whole.config
            assert name == "narrow-line" or part.line == whole.line
            assert name == "crowding" or part.router == whole.router
            assert (part.line.retry_us, part.line.silent_us) == (whole.line.retry_us, whole.line.silent_us)
            for one, other in zip(whole.users, part.users, strict=True):
                if name not in ("overload", "nonsense", "disconnect", "slow-reader"):
                    assert one == other
                for before, after in zip(one.asks, other.asks, strict=True):
                    assert before.impossible or (before.prompt, before.stop_after) == (after.prompt, after.stop_after)


SHORT_LIMITS = {Fault.COPY_WHILE_FENCING, Fault.STORE_TOO_LATE, Fault.STORE_LEFT_ALONE}
"""What a time limit brings about that is too short even on a good day."""


@pytest.mark.parametrize("seed", one_in(4, range(20)))
def test_a_world_without_faults_answers_everybody_in_full(seed: int) -> None:
    verdict = run_seed(seed, ScenarioTrim(classes=()))
    assert verdict.broken is None
    ends = {"stop", "length", "refused: queue_full"}
    router = verdict.scenario.router
    if router is not None:
        check_undisturbed(verdict, router)
        return
    if verdict.scenario.config.on_preempt is OnPreempt.RESCHEDULE:  # a small pool and a short limit are no faults
        ends |= {"pd_reschedule: 500", "pd_reschedule: 502", "pd_reschedule: 408"}
    assert set(map(str, verdict.ends)) <= ends
    assert set(verdict.fired) <= SHORT_LIMITS


def check_undisturbed(verdict: WorldVerdict, router: RouterConfig) -> None:
    """Limits, small queues and small pools are no faults; a router's limits are others."""
    ends = {"stop", "length", "refused: queue_full"}
    if router.key_concurrency is not None or router.key_tokens_per_minute is not None:
        ends |= {"refused: rate_limited"}
    if router.deadline_us < 1_000_000:
        ends |= {"refused: no_instance"}
    assert set(map(str, verdict.ends)) <= ends
    usual = {Fault.LEG_REFUSED, Fault.LEG_YIELDED, Fault.KV_WHILE_FENCING, Fault.KV_TOO_LATE}
    assert set(verdict.fired) <= usual | SHORT_LIMITS


def test_most_worlds_have_a_router_and_all_of_its_policies_are_drawn() -> None:
    drawn = [draw_scenario(seed) for seed in range(200)]
    routers = [scenario.router for scenario in drawn if scenario.router is not None]
    assert 120 <= len(routers) <= 160
    assert {router.policy for router in routers} == set(RoutingPolicy)
    assert {router.preempt_retry_exclude_decode for router in routers} == {False, True}
    for scenario in drawn:
        assert scenario.router is not None or not set(scenario.classes) & set(OF_ROUTERS)


def test_half_of_the_worlds_have_host_memory_and_most_of_those_a_store() -> None:
    drawn = [draw_scenario(seed) for seed in range(400)]
    with_host = [scenario for scenario in drawn if scenario.config.tiers.host_rows]
    with_store = [scenario for scenario in drawn if scenario.has_store]
    assert 150 <= len(with_host) <= 230
    assert 80 <= len(with_store) <= 150
    assert {scenario.config.tiers.bring_back for scenario in with_host} == set(BringBack)
    shares = [scenario.config.tiers.host_rows / scenario.config.blocks for scenario in with_host]
    assert min(shares) < 0.2
    assert max(shares) > 3
    for scenario in drawn:
        of_storage = set(scenario.classes) & set(OF_STORAGE)
        assert scenario.has_store or not of_storage & set(OF_STORES)
        assert scenario.config.tiers.host_rows or scenario.giver.tiers.host_rows or not of_storage


@pytest.fixture
def failing_seed() -> Iterator[int]:
    """Of a world in which a preempted request forgets its last token."""
    bug = BUGS["forget_a_token_at_a_restart"]
    with bug.planted():
        yield read_catches()[bug.name].seed


@pytest.mark.slow
def test_a_failure_shrinks_to_a_smaller_world_with_the_same_broken_law(
    monkeypatch: pytest.MonkeyPatch, failing_seed: int
) -> None:
    monkeypatch.setattr(fuzz, "SHRINK_RUNS_MAX", 60)
    seed = failing_seed
    broken = run_seed(seed, always_audit=True).broken
    assert broken is not None
    shrunk = shrink(seed)
    assert shrunk.verdict.broken is not None
    assert shrunk.verdict.broken.law == broken.law
    assert len(shrunk.verdict.scenario.asks) < len(draw_scenario(seed).asks) // 2
    assert shrunk.runs <= 60


def test_a_sound_seed_cannot_be_shrunk() -> None:
    with pytest.raises(NothingBroken):
        shrink(0)


def test_a_process_that_dies_names_the_seed_it_was_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ShardDied, match="seed 5 ended with status 1"):
        run_many(5, 3, 1)


def test_the_printed_command_replays_the_failure(failing_seed: int) -> None:
    seed = failing_seed
    command = replay_command(
        seed, ScenarioTrim(draw_scenario(seed).classes, draw_scenario(seed).asks, draw_scenario(seed).instances)
    )
    assert command.startswith(f"baton sim replay {seed} --faults ")
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 1
    assert "broken" in result.output
    assert " ms  client " in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["3", "--faults", "gravity"], "'gravity' is none of"),
        (["3", "--requests", "1,x"], "'x' is neither a number nor a range"),
        (["3", "--requests", "9999"], "names none of the requests 0-"),
        (["3", "--requests", "5-2"], "names none of the requests 0-"),
        (["3", "--story", "/nowhere/story"], "No such file or directory"),
    ],
)
def test_nonsense_on_the_command_line_is_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["sim", "replay", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_range_without_a_failure_ends_with_a_verdict() -> None:
    result = CliRunner().invoke(app, ["sim", "fuzz", "--seeds", "2", "--first-seed", "3", "--jobs", "1"])
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "no law is broken in 2 seeds"


def test_the_first_failure_is_the_lowest_seed_and_what_never_happened_is_said() -> None:
    totals = FuzzTotals()
    clean = msgspec.json.decode(
        b'{"seed":1,"digest":"","law":null,"what":"","events":1,"virtual_us":1,"requests":40,"instances":3,"classes":["loss"],"fired":{},"moves":{},"ends":{}}',
        type=SeedReport,
    )
    totals.add(clean)
    totals.add(msgspec.structs.replace(clean, seed=9, law="a law", what="x"))
    totals.add(msgspec.structs.replace(clean, seed=4, law="a law", what="x"))
    assert totals.first_failure is not None
    assert totals.first_failure.seed == 4
    assert set(EVERY_FAULT) <= set(totals.never())


def test_seeds_are_spread_over_processes_and_none_is_left_out() -> None:
    seen: list[int] = []
    totals = run_many(50, 7, 3, lambda report: seen.append(report.seed))
    assert sorted(seen) == list(range(50, 57))
    assert totals.seeds == 7
