"""The simulator drives the objects that serve, and decides nothing about scheduling, hand-over, routing or connections."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.engine.scheduler import Scheduler
from baton.core.engine.worker import Worker
from baton.core.routing.placement import Placement
from baton.core.routing.router import Router
from baton.sim.fuzzed_run import run_seed
from baton.sim.law_names import OWN_CHECKS
from baton.sim.scenario import draw_scenario
from baton.wire import engine_messages as messages
from baton.wire.instance_sessions import InstanceSessions
from baton.wire.peer_session import KnownSessions, PeerSession
from baton.wire.retry_pauses import RetryPauses
from baton.wire.router_sessions import RouterSessions
from baton.wire.seal import Seal
from baton.wire.sealed_stream import AcceptedStreams, SealedStream

NODE = Path(__file__).parents[2] / "src" / "baton" / "node"
SPLIT_SEED = next(seed for seed in range(50) if any(role.takes for role in draw_scenario(seed).roles))
SIM = Path(__file__).parents[2] / "src" / "baton" / "sim"

MAY_SEE_OF_CORE = {
    "config", "content_hashes", "errors", "engine.change_journal", "engine.driver", "engine.ended", "engine.gauges",
    "engine.laws", "engine.orders", "engine.plan", "engine.prefix", "engine.progress_watch", "engine.records",
    "engine.request", "engine.worker", "handover.faults", "handover.messages", "routing.config", "routing.events",
    "routing.identity", "routing.router", "tiers.transfers",
}  # fmt: skip
"""The doors of the deciding code and the values that pass them; what decides behind a door is not for the simulator."""
TABLES = {"routing.fleet_members", "routing.routed_request"}
"""Whose transitions are counted."""

MAY_SEE_OF_EXECUTORS = {
    "constraints.compiled_cache", "constraints.scripted_backend", "constraints.version_skew", "contract", "counting",
    "python_command", "scripted",
}  # fmt: skip

DECIDING_WORDS = (
    "admit", "adopt", "evict", "grant", "migrate", "offer", "placement", "preempt", "requeue", "reserve", "route", "routing",
    "schedule", "score", "settle", "victim",
)  # fmt: skip
"""What a copy of the deciding code would call its functions and classes."""


def modules() -> list[tuple[str, ast.Module]]:
    return [(path.name, ast.parse(path.read_text())) for path in sorted(SIM.glob("*.py"))]


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def test_it_comes_in_through_the_door_of_the_core() -> None:
    for name, tree in modules():
        for module, what in imports(tree):
            parts = module.split(".")
            if parts[:2] == ["baton", "core"]:
                names = ".".join(parts[2:]), ".".join([*parts[2:], what])
                is_table = what == "TRANSITIONS" and names[0] in TABLES
                assert is_table or not MAY_SEE_OF_CORE.isdisjoint(names), f"{name} imports {module}"
            if parts[:2] == ["baton", "executor"]:
                assert ".".join(parts[2:]) in MAY_SEE_OF_EXECUTORS, f"{name} imports {module}"


def test_nothing_in_it_is_named_like_a_decision() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for word in DECIDING_WORDS:
                    assert word not in node.name.lower().replace("router", ""), f"{name} defines {node.name}"


def test_it_neither_derives_from_nor_patches_production_classes() -> None:
    for name, tree in modules():
        ours = {what for module, what in imports(tree) if module.startswith(("baton.core", "baton.wire", "baton.executor"))}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)} & ours
                assert bases <= {"BatonError"}, f"{name}: {node.name} derives from {bases}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "setattr", name
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    patched = (
                        isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in ours
                    )
                    assert not patched, f"{name} patches a production class"


def test_connections_of_worlds_and_of_processes_are_made_of_the_same_machines() -> None:
    """Both drivers import the machines, and neither has rules of a connection of its own: seals are not made elsewhere."""
    for machine, drivers in {
        "SealedStream": (SIM / "lines.py", NODE / "sealed_connection.py"),
        "AcceptedStreams": (SIM / "lines.py", NODE / "sealed_connection.py"),
        "PeerSession": (SIM / "simulated_peers.py", NODE / "peer_connection.py"),
        "KnownSessions": (SIM / "simulated_peers.py", NODE / "peers.py"),
        "RetryPauses": (SIM / "lines.py", NODE / "router_membership.py", NODE / "peers.py"),
    }.items():
        for path in drivers:
            assert machine in {what for _, what in imports(ast.parse(path.read_text()))}, f"{path.name} has no {machine}"
    for name, tree in modules():
        assert name == "strangers.py" or "Seal" not in {what for _, what in imports(tree)}, f"{name} seals by itself"


def test_only_the_judge_looks_behind_the_door() -> None:
    for name, tree in modules():
        if name != "law_checker.py":
            behind = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "scheduler"]
            assert not behind, f"{name} reaches into a worker's scheduler"


@pytest.mark.parametrize(
    ("owner", "method", "seed"),
    [
        (Worker, "handle", 0),
        (Scheduler, "plan", 0),
        (Scheduler, "settle", 0),
        (messages, "without_shared_prompts", 0),
        (Router, "handle", 2),
        (Placement, "choose", 2),
        (RouterSessions, "receive", 2),
        (InstanceSessions, "take", 2),
        (Seal, "seal", 0),
        (Seal, "take_into", 2),
        (SealedStream, "receive", 0),
        (SealedStream, "send", 2),
        (SealedStream, "tick", 0),
        (AcceptedStreams, "opened", 2),
        (RetryPauses, "after", 2),
        (PeerSession, "receive", SPLIT_SEED),
        (KnownSessions, "of", SPLIT_SEED),
    ],
)
def test_a_world_stands_still_without_the_production_code(
    owner: object, method: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(owner, method, gone)
    broken = run_seed(seed).broken
    assert broken is not None
    assert broken.law == OWN_CHECKS
