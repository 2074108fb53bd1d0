"""The options of `baton sim run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from baton.core.config import PrefillPath, ReservePolicy, VictimPolicy
from baton.core.routing.config import RoutingPolicy as RoutePolicy
from baton.core.setting import Panel, Setting, Unit

BLOCKS_MAX = 100_000_000


def _option(
    name: str,
    panel: Panel,
    text: str,
    least: float | None = None,
    most: float | None = None,
    *,
    metavar: str | None = None,
    unit: Unit = Unit.AS_IS,
) -> Setting:
    return Setting(name, panel, text, least, most, metavar, unit, has_variable=False)


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of a simulation; None: not given. Defaults are resolved here, not on the command line."""

    trace: Path | None = None
    limit: Annotated[int | None, _option("limit", Panel.TRACED, "First requests that fit. Default: all.", 1, 1_000_000)] = (
        None
    )
    speed: Annotated[
        float | None, _option("speed", Panel.TRACED, "The trace's times, × this fast. Default: 1.", 0.001, 10_000)
    ] = None
    requests: Annotated[int | None, _option("requests", Panel.MADE_UP, "How many. Default: 1000.", 1, 1_000_000)] = None
    input_tokens: Annotated[
        int | None, _option("input-tokens", Panel.MADE_UP, "Prompt; in a session, new each round. Default: 1024.", 1)
    ] = None
    output_tokens: Annotated[int | None, _option("output-tokens", Panel.MADE_UP, "Answer. Default: 256.", 1)] = None
    sessions: Annotated[
        int | None, _option("sessions", Panel.MADE_UP, "Conversations, instead of --requests.", 1, 1_000_000)
    ] = None
    rounds: Annotated[
        int | None, _option("rounds", Panel.MADE_UP, "Of each session; history is sent along. Default: 1.", 1, 1000)
    ] = None
    think_s: Annotated[
        float | None, _option("think-s", Panel.MADE_UP, "Pause before each further round. Default: 0.", 0, 86_400)
    ] = None
    rate: Annotated[
        float | None,
        _option("rate", Panel.ARRIVING, "Open loop: requests (or sessions) a second, Poisson.", 0.001, 1_000_000),
    ] = None
    concurrency: Annotated[
        int | None,
        _option("concurrency", Panel.ARRIVING, "Closed loop: clients. Made-up load: 64 an instance.", 1, 1_000_000),
    ] = None
    max_tokens: Annotated[
        int | None, _option("max-tokens", Panel.ARRIVING, "What clients declare. Default: just what the answer needs.", 1)
    ] = None
    instances: Annotated[int, _option("instances", Panel.CLUSTER, "Machines, each a whole copy of the model.", 1, 1024)] = 1
    split: Annotated[
        str | None,
        _option("split", Panel.CLUSTER, "Instead: so many prefill for so many that decode, such as 3P5D."),
    ] = None
    lane_gbytes_per_s: Annotated[
        float | None,
        _option("link-gbytes", Panel.CLUSTER, "With --split: KV between instances, GB/s each way. Default: 50.", 0.001, 1e6),
    ] = None
    prefill_path: Annotated[
        PrefillPath | None,
        _option("prefill-path", Panel.CLUSTER, "With --split: how those that prefill plan. Default: short."),
    ] = None
    route: Annotated[
        RoutePolicy | None,
        _option("route", Panel.CLUSTER, "A router in front, and how it chooses. Default: none; in turn."),
    ] = None
    step_times: Annotated[
        str, _option("step-times", Panel.CLUSTER, "Machine and model: h200-8b, glm-4.5-air-tp8, cpu, or a file.")
    ] = "h200-8b"
    kv_blocks: Annotated[
        int | None, _option("kv-blocks", Panel.CLUSTER, "KV pool of each instance, in blocks.", 1, BLOCKS_MAX)
    ] = None
    kv_memory_bytes: Annotated[
        int | None,
        _option(
            "kv-memory", Panel.CLUSTER, "Or in bytes, such as 40G. Default: what that machine has room for.",
            unit=Unit.BYTES,
        ),
    ] = None  # fmt: skip
    block_size: Annotated[int, _option("block-size", Panel.CLUSTER, "Token positions a KV block.", 1, 4096)] = 16
    max_num_seqs: Annotated[
        int, _option("max-num-seqs", Panel.CLUSTER, "Most requests that an instance runs at once.", 1, 100_000)
    ] = 256
    max_num_batched_tokens: Annotated[
        int,
        _option("max-num-batched-tokens", Panel.CLUSTER, "Most tokens one step may feed; prompts are cut.", 1, 1_000_000),
    ] = 2048
    max_model_len: Annotated[
        int,
        _option("max-model-len", Panel.CLUSTER, "Longest sequence; traced requests beyond it are left out.", 1, 10_000_000),
    ] = 131_072
    max_waiting: Annotated[
        int | None,
        _option("max-waiting", Panel.CLUSTER, "Longest queue; beyond it requests are refused. Default: none.", 1),
    ] = None
    prefix_cache: Annotated[bool, _option("prefix-cache", Panel.CLUSTER, "Reuse KV of prompts that begin alike.")] = True
    network_us: Annotated[int, _option("network-us", Panel.CLUSTER, "Front end to instance, one way.", 0, 10_000_000)] = 100
    host_us: Annotated[int, _option("host-us", Panel.CLUSTER, "Front end's work on each request.", 0, 10_000_000)] = 0
    reserve: Annotated[
        ReservePolicy, _option("reserve", Panel.PRESSURE, "What running requests keep free to grow into.")
    ] = ReservePolicy.NEW_TOKEN_RATIO
    victims: Annotated[
        VictimPolicy, _option("victims", Panel.PRESSURE, "Who yields: the newest, or the cheapest to compute again.")
    ] = VictimPolicy.NEWEST
    max_preemptions: Annotated[
        int,
        _option("max-preemptions", Panel.PRESSURE, "A request that yielded this often is no longer a victim.", 0, 1000),
    ] = 8
    compare: Annotated[
        str | None,
        _option(
            "compare", Panel.PRESSURE,
            "Policies side by side, such as new-token-ratio/newest,none/cheapest; 'all' is every pair.",
            metavar="RESERVE/VICTIMS,…",
        ),
    ] = None  # fmt: skip
    seeds: Annotated[
        int, _option("seeds", Panel.RESULTS, "Runs of each policy; each seed has arrival times of its own.", 1, 100)
    ] = 1
    ttft_slo_s: Annotated[float, _option("ttft-slo-s", Panel.RESULTS, "Goodput: first token within.", 0.001, 86_400)] = 10.0
    tpot_slo_ms: Annotated[
        float,
        _option("tpot-slo-ms", Panel.RESULTS, "Goodput: and then a token within, on the mean.", 0.001, 86_400_000),
    ] = 100.0
    look_every_s: Annotated[
        float | None,
        _option(
            "look-every-s", Panel.RESULTS, "When pool and queues are looked at. Default: 0.1, in long runs 1.", 0.001, 3600
        ),
    ] = None
