"""What a fleet's processes are given in their environments: the keys, and of ours what is meant for each."""

from __future__ import annotations

import pytest

from baton.cli.declared_options import declared, variable
from baton.core.routing.config import RouterConfig
from baton.node.settings import EngineSettings, InstanceSettings
from baton.router.settings import RouterProcessSettings
from baton.up.fleet_plan import FleetPlan
from baton.up.process_environment import DECIDED, OF_ONE_INSTANCE, OF_THE_ROUTER, OWN, process_environments

PLAN = FleetPlan("m", mixed=1)


@pytest.mark.parametrize(
    "name",
    [
        "BATON_HOST",
        "BATON_SSL_CERTFILE",
        "BATON_SSL_KEYFILE",
        "BATON_OTLP_ENDPOINT",
        "BATON_MAX_WAITING",
        "BATON_ALLOWED_HOSTS",
    ],
)
def test_what_is_the_router_s_reaches_no_instance(name: str) -> None:
    environments = process_environments(PLAN, {name: "x"})
    assert environments.router[name] == "x"
    assert name not in environments.instance


@pytest.mark.parametrize(
    "name", ["BATON_PORT", "BATON_PEER", "BATON_JOIN_HOST", "BATON_CLUSTER_KEY_FILE", "BATON_CONFIG", "BATON_KV_EVENTS_HWM"]
)
def test_what_the_fleet_decides_or_cannot_share_reaches_nobody(name: str) -> None:
    environments = process_environments(PLAN, {name: "x"})
    assert name not in environments.router
    assert name not in environments.instance


def test_all_else_reaches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    environments = process_environments(PLAN)
    for environment in (environments.router, environments.instance):
        assert (environment["BATON_MAX_NUM_SEQS"], environment["OTEL_SERVICE_NAME"]) == ("9", "ours")


def test_all_have_the_same_cluster_key_and_another_fleet_another() -> None:
    one, other = process_environments(PLAN, {}), process_environments(PLAN, {})
    assert one.router["BATON_CLUSTER_KEY"] == one.instance["BATON_CLUSTER_KEY"] != other.router["BATON_CLUSTER_KEY"]


def test_the_lists_name_options_that_there_are() -> None:
    owners = (InstanceSettings, EngineSettings, RouterProcessSettings, RouterConfig)
    options = {option.parameter: option.setting for owner in owners for option in declared(owner)}
    listed = DECIDED | OF_ONE_INSTANCE | OF_THE_ROUTER
    assert listed <= options.keys()
    assert {variable(options[name].name) for name in listed} == {f"BATON_{name.upper()}" for name in listed}
    assert not OWN & options.keys()
