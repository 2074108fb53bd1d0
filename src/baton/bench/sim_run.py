"""`baton sim run`: from options to a report.

Owns what the options mean together, which are refused, and the runs: every policy meets the same requests with every seed. A
run is summed up as soon as it is over; only what a picture or a timeline needs is kept, so memory does not grow with seeds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from baton import __version__
from baton.bench.sim_options import BLOCKS_MAX, SimOptions
from baton.bench.trace_calls import JITTER_GAPS, TraceLoad, read_load
from baton.core.config import PrefillPath, ReservePolicy, VictimPolicy, WorkerConfig
from baton.core.errors import BatonError
from baton.sim.cluster import PlannedRequest, PrefillDecodeSplit, RunSpec, simulate
from baton.sim.report import SCHEMA, LatencyTargets, RunSummary, Setting, SimReport, summarise
from baton.sim.run_records import RunRecord
from baton.sim.step_times import StepTimes, load_step_times
from baton.sim.timed_transfers import KvLinkModel
from baton.sim.workload import BadWorkload, SyntheticLoad

CLIENTS_AN_INSTANCE = 64
DEFAULT_REQUESTS, DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 1000, 1024, 256
KV_MEMORY_BYTES = {"h200-8b": 102 << 30, "glm-4.5-air-tp8": 330 << 30}
"""KV pool of the built-in machine: its memory without the weights."""
KV_MEMORY_BYTES_OTHERS = 2 << 30
"""Default KV pool for other step-time models, as in `baton serve`."""
LANE_GBYTES_PER_S = 50.0
"""Bandwidth between instances, each way: one 400 Gbit/s RDMA card per GPU."""
PEER_DELAY_US = 100
"""One-way latency between instances."""
SPLIT_SYNTAX = "write how many prefill and how many decode, such as 3P5D"
LONG_RUN_S = 1200.0
LOOK_EVERY_S, LOOK_EVERY_S_LONG = 0.1, 1.0
COMPARE_SYNTAX = (
    "write RESERVE/VICTIMS, or RESERVE alone, with commas between, such as new-token-ratio/newest,none/cheapest; "
    f"RESERVE is {', '.join(ReservePolicy)}; VICTIMS is {', '.join(VictimPolicy)}; 'all' is every pair"
)


class BadSimOptions(BatonError):
    """Contradictory or meaningless options; the message names them."""


def parse_policies(text: str, victims: VictimPolicy) -> tuple[ReserveAndVictims, ...]:
    """The policies of `--compare`; one that names no victims takes `victims`."""
    if text.strip() == "all":
        return POLICIES
    policies = tuple(_parse_policy(item.strip(), victims) for item in text.split(","))
    if len(set(policies)) < len(policies):
        raise BadSimOptions(f"--compare {text!r} names a policy twice")
    if len(policies) < 2:
        raise BadSimOptions(f"--compare {text!r} has nothing to compare with: {COMPARE_SYNTAX}")
    return policies


def _parse_policy(item: str, victims: VictimPolicy) -> ReserveAndVictims:
    reserve, slash, chosen = item.partition("/")
    try:
        return ReserveAndVictims(ReservePolicy(reserve), VictimPolicy(chosen) if slash else victims)
    except ValueError:
        raise BadSimOptions(f"--compare: {item!r} is no policy: {COMPARE_SYNTAX}") from None


def parse_split(text: str) -> tuple[int, int]:
    """(prefill instances, decode instances)."""
    found = re.fullmatch(r"(\d{1,4})P(\d{1,4})D", text.strip(), re.IGNORECASE)
    prefill, decode = (int(found[1]), int(found[2])) if found else (0, 0)
    if not prefill or not decode:
        raise BadSimOptions(f"--split {text!r} is no split: {SPLIT_SYNTAX}")
    return prefill, decode


@dataclass(frozen=True, slots=True)
class ReserveAndVictims:
    """How much of the pool is reserved for growth, and which request yields when it is full."""

    reserve: ReservePolicy
    victims: VictimPolicy

    @property
    def name(self) -> str:
        return f"{self.reserve.value}, {self.victims.value}"


POLICIES = tuple(ReserveAndVictims(reserve, victims) for reserve in ReservePolicy for victims in VictimPolicy)


def label_of(policy: ReserveAndVictims) -> str:
    return f"{policy.reserve}/{policy.victims}"


def refuse_contradictions(options: SimOptions) -> None:
    """Raise when an option would have no effect."""
    made_up = {
        "--requests": options.requests, "--input-tokens": options.input_tokens, "--output-tokens": options.output_tokens,
        "--sessions": options.sessions, "--rounds": options.rounds, "--think-s": options.think_s,
    }  # fmt: skip
    idle = ", ".join(name for name, value in made_up.items() if value is not None)
    traced, sessions = options.trace is not None, options.sessions is not None
    rated, closed, sped = (value is not None for value in (options.rate, options.concurrency, options.speed))
    split = options.split is not None
    rules = (
        (traced and idle, f"--trace brings its own requests; leave out {idle} (--limit takes the first ones)"),
        (not traced and (sped or options.limit is not None), "--limit and --speed are for a --trace"),
        (rated and closed, "--rate is an open loop and --concurrency a closed one; give one of them"),
        (
            options.seeds > 1 and (closed or not (traced or rated)),
            "--seeds differ in when requests come, and a closed loop has none of that: give --rate, or one seed",
        ),
        (sped and (rated or closed), "--speed plays the trace's own times, which --rate and --concurrency replace"),
        (
            sessions and options.requests is not None,
            "--sessions × --rounds is the number of requests; leave out --requests",
        ),
        (
            not sessions and (options.rounds or options.think_s) is not None,
            "--rounds and --think-s are for --sessions",
        ),
        (
            options.kv_blocks is not None and options.kv_memory_bytes is not None,
            "--kv-blocks and --kv-memory both size the pool",
        ),
        (split and options.instances != 1, "--split says how many instances there are; leave out --instances"),
        (
            not split and (options.lane_gbytes_per_s is not None or options.prefill_path is not None),
            "--link-gbytes and --prefill-path are for a --split",
        ),
    )
    for broken, message in rules:
        if broken:
            raise BadSimOptions(message)


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The requests sent to the simulated cluster, by seed, and their description in reports."""

    title: str
    requests: int
    calls: Callable[[int], list[PlannedRequest]]
    concurrency: int | None
    span_s: float | None
    """Approximate duration of arrivals, if known."""
    notes: tuple[str, ...] = ()


def load_of(options: SimOptions, sequence_tokens_max: int) -> SimulatedLoad:
    if options.trace is not None:
        return _traced(options, options.trace, sequence_tokens_max)
    return _synthetic(options, sequence_tokens_max)


def _synthetic(options: SimOptions, sequence_tokens_max: int) -> SimulatedLoad:
    made = SyntheticLoad(
        conversations=options.sessions or options.requests or DEFAULT_REQUESTS,
        input_tokens=options.input_tokens or DEFAULT_INPUT_TOKENS,
        output_tokens=options.output_tokens or DEFAULT_OUTPUT_TOKENS,
        max_tokens=options.max_tokens,
        rounds=options.rounds or 1,
        think_us=round((options.think_s or 0.0) * 1e6),
        rate_per_s=options.rate,
    )
    if made.sequence_tokens_max > sequence_tokens_max:
        raise BadWorkload(
            f"the longest request is {made.sequence_tokens_max:,} tokens with what it declares; "
            f"a sequence has at most {sequence_tokens_max:,} (--max-model-len, --kv-blocks)"
        )
    if options.rate is not None:
        concurrency, pace = None, f"{options.rate:g} new a second"
    else:
        concurrency = options.concurrency or CLIENTS_AN_INSTANCE * options.instances
        pace = f"{concurrency:,} clients"
    in_rounds = f" in {made.conversations:,} conversations of {made.rounds}" if made.rounds > 1 else ""
    title = f"{made.requests:,} requests{in_rounds}, {made.input_tokens:,} tokens in, {made.output_tokens:,} out, {pace}"
    span_s = made.conversations / options.rate if options.rate is not None else None
    return SimulatedLoad(title, made.requests, made.calls, concurrency, span_s)


def _traced(options: SimOptions, trace: Path, sequence_tokens_max: int) -> SimulatedLoad:
    load = read_load(trace, options.limit, options.max_tokens, sequence_tokens_max)
    count = len(load.requests)
    title = f"{count:,} requests of {trace.name}"
    notes: tuple[str, ...] = ()
    if load.skipped:
        notes = (f"{load.skipped:,} requests of the trace are left out: empty, or over {sequence_tokens_max:,} tokens.",)
    if (clients := options.concurrency) is not None:
        closed = load.when_a_client_is_free()
        return SimulatedLoad(f"{title}, {clients:,} clients", count, lambda _seed: closed, clients, None, notes)
    if (rate := options.rate) is not None:
        return SimulatedLoad(
            f"{title}, {rate:g} a second", count, lambda seed: load.at_rate(seed, rate), None, count / rate, notes
        )
    if not load.is_timed:
        raise BadSimOptions(f"{trace} has lengths but no times: say when requests come with --rate or --concurrency")
    speed = options.speed or 1.0
    title, span_s = f"{title} at {speed:g} × its rate", load.gap_s * count / speed
    notes += _notes_on_times(load, speed, options.seeds)
    return SimulatedLoad(title, count, lambda seed: load.at_their_times(seed, speed), None, span_s, notes)


def _notes_on_times(load: TraceLoad, speed: float, seeds: int) -> tuple[str, ...]:
    notes = []
    if load.bunched:
        notes.append(
            f"{load.bunched:,} requests share the timestamp of the one before; they are spread until the next timestamp."
        )
    if seeds > 1:
        late_s = JITTER_GAPS * load.gap_s / speed
        notes.append(f"Seed 0 keeps the trace's times; the others move each arrival by up to {late_s:.3g} s.")
    return tuple(notes)


class Simulation:
    """Raises BadSimOptions, BadWorkload, BadConfig, BadStepTimes or TraceMalformed before anything runs."""

    def __init__(self, options: SimOptions) -> None:
        refuse_contradictions(options)
        self._prefill_instances = 0
        if options.split is not None:
            self._prefill_instances, decode = parse_split(options.split)
            options = replace(options, instances=self._prefill_instances + decode)
        self.options = options
        self.targets = LatencyTargets(options.ttft_slo_s, options.tpot_slo_ms)
        self.step_times = load_step_times(options.step_times)
        self.policies = _policies(options)
        shape = _config(options, self.step_times)
        self.load = load_of(options, shape.sequence_tokens_max)
        self.config = replace(shape, waiting_max=options.max_waiting or self.load.requests)

    @property
    def requests(self) -> int:
        """Requests of all runs together."""
        return self.load.requests * len(self.policies) * self.options.seeds

    @property
    def title(self) -> str:
        count = self.options.split or f"{self.options.instances}"
        shape = f"{count} × {self.step_times.name}, {self.config.blocks:,} KV blocks each"
        return f"{self.load.title}; {shape}"

    def run(
        self, doing: Callable[[str], None], advance: Callable[[int], None], keep: bool = False
    ) -> tuple[SimReport, list[RunRecord]]:
        """The report and, with `keep`, the first seed's run of each policy."""
        summaries: list[RunSummary] = []
        kept: list[RunRecord] = []
        for policy in self.policies:
            for seed in range(self.options.seeds):
                doing(f"{label_of(policy)}, seed {seed}")
                record = simulate(self.spec(policy, seed), advance)
                summaries.append(summarise(record, self.targets))
                if keep and seed == 0:
                    kept.append(record)
        return self._report(summaries), kept

    def spec(self, policy: ReserveAndVictims, seed: int) -> RunSpec:
        options = self.options
        config = replace(self.config, reserve=policy.reserve, victims=policy.victims)
        return RunSpec(
            label=label_of(policy),
            instances=options.instances,
            config=config,
            step_times=self.step_times,
            calls=self.load.calls(seed),
            concurrency=self.load.concurrency,
            seed=seed,
            network_us=options.network_us,
            host_us=options.host_us,
            look_every_us=self._look_every_us(),
            split=self._split(config) if self._prefill_instances else None,
            route=options.route,
        )

    def _split(self, config: WorkerConfig) -> PrefillDecodeSplit:
        path, gbytes = self.options.prefill_path or PrefillPath.SHORT, self._lane_gbytes_per_s
        road = road_of(self.step_times, config.block_size, gbytes)
        return PrefillDecodeSplit(self._prefill_instances, replace(config, prefill_path=path), self.step_times, road)

    @property
    def _lane_gbytes_per_s(self) -> float:
        return self.options.lane_gbytes_per_s or LANE_GBYTES_PER_S

    def _look_every_us(self) -> int:
        if self.options.look_every_s is not None:
            return max(1, round(self.options.look_every_s * 1e6))
        long = self.load.span_s is not None and self.load.span_s > LONG_RUN_S
        return round((LOOK_EVERY_S_LONG if long else LOOK_EVERY_S) * 1e6)

    def _report(self, runs: list[RunSummary]) -> SimReport:
        return SimReport(
            schema=SCHEMA,
            version=__version__,
            settings=self._settings(),
            ttft_target_s=self.targets.ttft_s,
            tpot_target_ms=self.targets.tpot_ms,
            notes=[*self.load.notes, *self._notes()],
            runs=runs,
        )

    def _notes(self) -> tuple[str, ...]:
        if not self._prefill_instances:
            return ()
        return (
            f"KV leaves layer by layer while prefill computes, over {self._lane_gbytes_per_s:g} GB/s out of and into each "
            "instance; checksums, connections and the schedulers' own time cost nothing.",
        )

    def _settings(self) -> dict[str, Setting]:
        """Effective settings, defaults included."""
        options, config = self.options, self.config
        return {
            "load": self.load.title,
            "trace": options.trace.name if options.trace is not None else None,
            "speed": options.speed,
            "limit": options.limit,
            "rate": options.rate,
            "concurrency": self.load.concurrency,
            "max_tokens": options.max_tokens,
            "instances": options.instances,
            "split": options.split,
            "link_gbytes_per_s": self._lane_gbytes_per_s if self._prefill_instances else None,
            "prefill_path": (options.prefill_path or PrefillPath.SHORT) if self._prefill_instances else None,
            "route": options.route,
            "step_times": self.step_times.name,
            "kv_blocks": config.blocks,
            "block_size": config.block_size,
            "max_num_seqs": config.slots,
            "max_num_batched_tokens": config.step_tokens,
            "max_model_len": config.context_tokens,
            "max_waiting": config.waiting_max,
            "prefix_cache": config.prefix_cache,
            "max_preemptions": config.max_preemptions,
            "seeds": options.seeds,
            "network_us": options.network_us,
            "host_us": options.host_us,
            "look_every_us": self._look_every_us(),
        }


def _policies(options: SimOptions) -> tuple[ReserveAndVictims, ...]:
    if options.compare is None:
        return (ReserveAndVictims(options.reserve, options.victims),)
    return parse_policies(options.compare, options.victims)


def _config(options: SimOptions, step_times: StepTimes) -> WorkerConfig:
    return WorkerConfig(
        slots=options.max_num_seqs,
        blocks=_blocks(options, step_times),
        block_size=options.block_size,
        context_tokens=options.max_model_len,
        step_tokens=options.max_num_batched_tokens,
        prefix_cache=options.prefix_cache,
        max_preemptions=options.max_preemptions,
    )


def _blocks(options: SimOptions, step_times: StepTimes) -> int:
    if options.kv_blocks is not None:
        return options.kv_blocks
    return blocks_of(step_times, options.kv_memory_bytes, options.block_size)


def blocks_of(step_times: StepTimes, memory_bytes: int | None, block_size: int) -> int:
    """Blocks of the pool; without a size in bytes, as many as the machine's memory holds."""
    memory_bytes = memory_bytes or KV_MEMORY_BYTES.get(step_times.name, KV_MEMORY_BYTES_OTHERS)
    block_bytes = step_times.file.roofline.kv_bytes_per_token * block_size
    blocks = int(memory_bytes / block_bytes)
    if not 1 <= blocks <= BLOCKS_MAX:
        raise BadSimOptions(
            f"{memory_bytes:,} bytes of KV are {blocks:,} blocks of {block_bytes:,.0f}; from 1 to {BLOCKS_MAX:,} can be "
            "simulated (--kv-memory, --kv-blocks)"
        )
    return blocks


def road_of(step_times: StepTimes, block_size: int, lane_gbytes_per_s: float, delay_us: int = PEER_DELAY_US) -> KvLinkModel:
    """The simulated link for KV between instances."""
    file = step_times.file
    return KvLinkModel(file.layers, round(file.roofline.kv_bytes_per_token * block_size), lane_gbytes_per_s * 1e9, delay_us)
