"""The environments of a fleet's processes: the keys, which command lines must not show, and of ours what is meant for each.

Owns which options reach whom. An option that was set in the environment goes no further than one that was given as a flag.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from baton.up.fleet_plan import FleetPlan

KEY_VARIABLE, API_KEYS_VARIABLE, ADMIN_KEY_VARIABLE = "BATON_CLUSTER_KEY", "BATON_API_KEY", "BATON_ADMIN_KEY"
METRICS_KEY_VARIABLE = "BATON_METRICS_KEY"
STORE_VARIABLE = "BATON_KV_STORE"
DECIDED = frozenset(
    ["model", "port", "role", "name", "router", "peer", "peer_port", "join_host", "join_port", "cluster_key",
     "cluster_key_file", "expect_instances"]
)  # fmt: skip
"""Options of `serve` and `router` that `baton up` sets itself."""
OF_ONE_INSTANCE = frozenset(
    ["kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic", "kv_events_format", "kv_events_connect",
     "kv_events_buffer_steps", "kv_events_hwm"]
)  # fmt: skip
"""Options of `serve` that instances on one machine cannot share."""
TLS_OPTIONS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password_file")
OF_THE_ROUTER = frozenset(
    [*TLS_OPTIONS, "host", "max_waiting", "chat_template", "tool_parser", "reasoning_parser", "generation_config",
     "override_generation_config", "max_connections", "max_connections_per_address", "trusted_proxies", "allowed_hosts",
     "allowed_origins", "otlp_endpoint", "otlp_sample_ratio"]
)  # fmt: skip
"""Options for the router only: clients come to it, instances stay on loopback, and queueing is the router's."""
OWN = frozenset(["config"])
"""The file has options that are not theirs, and theirs are in their command lines."""


@dataclass(frozen=True, slots=True)
class ProcessEnvironments:
    router: Mapping[str, str]
    instance: Mapping[str, str]


def process_environments(plan: FleetPlan, ours: Mapping[str, str] = os.environ) -> ProcessEnvironments:
    """Both hold the same keys; without one in the plan, a cluster key is made."""
    keys = _keys(plan)
    of_nobody = DECIDED | OF_ONE_INSTANCE | OWN
    return ProcessEnvironments({**_without(ours, of_nobody), **keys}, {**_without(ours, of_nobody | OF_THE_ROUTER), **keys})


def _keys(plan: FleetPlan) -> dict[str, str]:
    found = {KEY_VARIABLE: plan.cluster_key or secrets.token_hex(32), "COLUMNS": "500"}
    if plan.api_keys:
        found[API_KEYS_VARIABLE] = " ".join(plan.api_keys)
    if plan.admin_key is not None:
        found[ADMIN_KEY_VARIABLE] = plan.admin_key
    metrics_key = plan.admin_key if plan.metrics_key is None else plan.metrics_key
    if metrics_key is not None:
        found[METRICS_KEY_VARIABLE] = metrics_key
    found[STORE_VARIABLE] = plan.kv_store or ""  # empty means none, also where our own environment names one
    return found


def _without(ours: Mapping[str, str], options: Collection[str]) -> dict[str, str]:
    left_out = {f"BATON_{name.upper()}" for name in options}
    return {name: value for name, value in ours.items() if name not in left_out}
