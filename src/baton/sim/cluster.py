"""A workload on a cluster in virtual time, as `baton sim run` and the benchmarks measure it.

Owns one run without faults: instances and a front end or router, connected by `lines.Pipes`; devices that take the time a
step-time model gives and compute nothing; clients that know the length of their answers. In a split cluster the last
instances prefill for the others, KV moves as in `timed_transfers`, and clients are served only by those that decode. Memory
grows with requests and samples, never with tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.core.config import DECODE, PREFILL, WorkerConfig
from baton.core.engine.ended import EndedRequest
from baton.core.engine.request import FinishReason, RequestId, Sampling, Submission, Tokens
from baton.core.engine.worker import PrefillComposition
from baton.core.errors import BatonError, Refusal
from baton.core.routing import events as routing
from baton.core.routing.config import RouterConfig, RoutingPolicy
from baton.executor.contract import ExecutorShape
from baton.executor.counting import FILLER_TOKEN, STOP_TOKEN, CountingExecutor
from baton.sim.device import StepTimeModel
from baton.sim.faults import DiskRates
from baton.sim.front_end import FrontEnd, InstanceTable
from baton.sim.instance import InstanceSpec, SimulatedInstance
from baton.sim.instance_host import FRONT, InstanceHost, instance_name
from baton.sim.lines import Pipes
from baton.sim.router_host import RouterHost
from baton.sim.run_records import (
    HandoverTotals,
    InstanceSample,
    PassMeter,
    RequestOutcome,
    RunRecord,
    SimulatedRequest,
    StepSpan,
)
from baton.sim.timed_transfers import KvLinkModel, TimedTransfers
from baton.sim.world import Host, World
from baton.wire.request_table import LostEntry

PREFIX_ID_TOKENS = 512
"""Prompt tokens that one prefix id stands for."""
EVENTS_MAX = 1_000_000_000
FOR_EVER_US = 10**15
SECRET = bytes(32)
ANY_TOKEN = 2**31 - 1
TICK_IN_FLIGHT_US = 20_000
"""Interval of lease checks while a step computes, as in the engine process."""
NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
UNIQUE_FROM = 1 << 24
"""Token values from here on are unique to one request; lower values stand for prefix ids."""


class RunFailed(BatonError):
    """The run could not finish, or an answer has the wrong length."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request that a client will send."""

    at_us: int | None
    """Arrival time in an open loop. None: when a client is free or, in a session, after the previous call."""
    input_tokens: int
    """In a session: the tokens this round adds to the former prompts and answers."""
    output_tokens: int
    """Tokens it will really generate; the scheduler learns the number with the stop token."""
    max_tokens: int
    """The limit that the client declares."""
    prefix_ids: tuple[int, ...] = ()
    """Equal leading ids mean equal text, PREFIX_ID_TOKENS each; the rest of the prompt is unique to the request."""
    session: int | None = None
    think_us: int = 0
    """Pause after the previous call of the session."""


@dataclass(frozen=True, slots=True)
class PrefillDecodeSplit:
    """Some instances prefill for all others."""

    givers: int
    """Number of instances, the last ones, that only prefill; the others decode."""
    config: WorkerConfig
    """Configuration of the instances that prefill; their role is set by the run."""
    times: StepTimeModel
    """Step times of the instances that prefill."""
    kv_link: KvLinkModel
    prefilling: PrefillComposition | None = None
    """The scheduler of the instances that prefill; an experiment may compose its own."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    label: str
    instances: int
    config: WorkerConfig
    step_times: StepTimeModel
    calls: Sequence[PlannedRequest]
    concurrency: int | None = None
    """Clients at once, for calls without a time."""
    seed: int = 0
    network_us: int = 100
    """One way, between the front end and an instance."""
    host_us: int = 0
    """Front-end time per request before it is submitted (HTTP, tokenising); requests pass one after the other."""
    look_every_us: int = 1_000_000
    spans_max: int = 200_000
    split: PrefillDecodeSplit | None = None
    """None: every instance does everything."""
    metered: bool = False
    """Whether to measure the CPU time of passes; the run itself does not depend on it."""
    chosen: Callable[[Sequence[int]], int] | None = None
    """Picks the instance of the next request, given the prompt tokens waiting at each for a first token; None: in turn."""
    route: RoutingPolicy | None = None
    """Place requests with the production router under this policy; None: with the front end."""

    @property
    def takers(self) -> int:
        """Number of instances that serve clients; they come first."""
        return self.instances - (self.split.givers if self.split is not None else 0)


def simulate(spec: RunSpec, progress: Callable[[int], None] = lambda _ended: None) -> RunRecord:
    """Run it; `progress` is called with the number of requests that have newly ended."""
    return _Cluster(spec, progress).run()


class _Cluster:
    def __init__(self, spec: RunSpec, progress: Callable[[int], None]) -> None:
        self.spec = spec
        self.world = World(spec.seed, events_max=EVENTS_MAX, keep_digest=False)
        self.host = Host(self.world, FRONT)
        if spec.takers < 1:
            raise RunFailed(f"of {spec.instances} instances none is left to decode")
        self.front = FrontEnd([InstanceTable(number) for number in range(spec.instances)], range(spec.takers))
        self.record = RunRecord(spec.label, spec.seed, spec.instances, spec.config.blocks, spec.config.block_size)
        self.progress = progress
        self.ended = 0
        self._prefix_tokens: dict[int, int] = {}
        """The token value that stands for the text of each prefix id; ids may be any numbers."""
        self.queued_tokens = [0] * spec.takers
        """Prompt tokens of requests without a first token, by instance."""
        self._free_us = 0
        """When the front end will have processed all requests that arrived."""
        self._spans: deque[StepSpan] = deque(maxlen=spec.spans_max)
        self._lines = Pipes(spec.network_us)
        self._transfers = None if spec.split is None else TimedTransfers(spec.split.kv_link)
        self._peers_lines = None if spec.split is None else Pipes(spec.split.kv_link.delay_us)
        self._router_host = None if spec.route is None else self._make_router(spec.route)
        self._nodes = [self._start(number) for number in range(spec.instances)]
        self.numbers = {node.name: node.number for node in self._nodes}
        """Instance numbers by name."""
        self._chains = _chains(spec.calls)

    def run(self) -> RunRecord:
        began_s = time.perf_counter()
        self._begin_load()
        self.world.after(self.spec.look_every_us, self._sample)
        world, calls = self.world, len(self.spec.calls)
        while self.ended < calls:
            if world.next_us is None:
                raise RunFailed(f"nothing is due while {calls - self.ended} requests are open")
            world.step()
        self._conclude()
        self.record.wall_s = time.perf_counter() - began_s
        return self.record

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_router(self, policy: RoutingPolicy) -> RouterHost:
        # Requests may wait without limit: a run measures placement, not when requests are given up.
        config = RouterConfig(policy=policy, deadline_us=FOR_EVER_US, absent_us=FOR_EVER_US, waiting_max=FOR_EVER_US)
        return RouterHost(self.world, self._lines, config, SECRET, seed=self.spec.seed)

    def _start(self, number: int) -> InstanceHost:
        meter = PassMeter() if self.spec.metered else None
        if meter is not None:
            self.record.meters.append(meter)
        instance_table = self.front.instance_tables[number] if self._router_host is None else None
        node = InstanceHost(
            self.world,
            self._lines,
            self._instance_spec(number, meter),
            instance_table,
            DiskRates(),
            transfers=self._transfers,
            peers=self._peers_of(number),
            peers_lines=self._peers_lines,
        )
        self.record.roles.append(node.role.name)
        if instance_table is not None and node.role.serves:
            instance_table.line = line = self._lines.dial(self.host, *node.ends, instance_table)
            line.open()
        node.boot()
        if self.spec.spans_max and node.instance is not None:
            node.instance.device.spans = self._spans
        return node

    def _instance_spec(self, number: int, meter: PassMeter | None) -> InstanceSpec:
        spec, split = self.spec, self.spec.split
        if split is None:
            return InstanceSpec(number, spec.config, self._executor, spec.step_times, SECRET, None, meter)
        config, times = replace(spec.config, role=DECODE), spec.step_times
        if number >= spec.takers:
            config, times = replace(split.config, role=PREFILL), split.times
        return InstanceSpec(
            number, config, self._executor, times, SECRET, TICK_IN_FLIGHT_US, meter, prefilling=split.prefilling
        )

    def _peers_of(self, number: int) -> list[str]:
        """Every instance that decodes is a peer of every one that prefills."""
        if self.spec.split is None:
            return []
        takers, all_of_them = range(self.spec.takers), range(self.spec.instances)
        return [instance_name(other) for other in all_of_them if (other in takers) != (number in takers)]

    def _executor(self, shape: ExecutorShape) -> CountingExecutor:
        executor = CountingExecutor(shape, lambda seed: self.spec.calls[seed].output_tokens)
        executor.vocabulary = ANY_TOKEN  # prompts are made of numbers that stand for text
        return executor

    # ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_load(self) -> None:
        timed = [chain for chain in self._chains if chain[0][1].at_us is not None]
        free = iter([chain for chain in self._chains if chain[0][1].at_us is None])
        self._arrivals = iter(sorted(timed, key=lambda chain: chain[0][1].at_us or 0))
        self._arrive_next()
        for _ in range(self.spec.concurrency or 1):
            self.host.after(_SETTLED_US, _Client(self, free).go_on)

    def _arrive_next(self) -> None:
        chain = next(self._arrivals, None)
        if chain is not None:
            self.host.at((chain[0][1].at_us or 0) + _SETTLED_US, self._arrive, chain)

    def _arrive(self, chain: Chain) -> None:
        _Client(self, iter([chain])).go_on()
        self._arrive_next()

    def spend_host(self) -> int:
        """Microseconds until the front end has processed one more request."""
        now_us = self.world.now_us
        self._free_us = max(now_us, self._free_us) + self.spec.host_us
        return self._free_us - now_us

    def prompt(self, index: int, call: PlannedRequest) -> Tokens:
        """Shared tokens for the prefix ids, then tokens unique to the request."""
        ids = [self._prefix_tokens.setdefault(name, len(self._prefix_tokens)) for name in call.prefix_ids]
        if len(self._prefix_tokens) > UNIQUE_FROM:
            raise RunFailed(f"the calls name more than {UNIQUE_FROM:,} different prefixes")
        shared = np.repeat(np.array(ids, dtype=np.int32), PREFIX_ID_TOKENS)[: call.input_tokens]
        own = np.full(call.input_tokens - len(shared), UNIQUE_FROM + index, dtype=np.int32)
        return np.concatenate((shared, own), dtype=np.int32)

    def submit(self, submission: Submission, client: _Client) -> None:
        if self._router_host is not None:
            self._router_host.submit((submission,), client)
            return
        if self.spec.chosen is None:
            booking = self.front.submit((submission,), client)
        else:
            booking = self.front.instance_tables[self.spec.chosen(self.queued_tokens)].submit((submission,), client)
        if booking is None:
            raise RunFailed("no instance serves")
        self.queued_tokens[booking.instance] += len(submission.prompt)
        client.served_by(booking.instance)

    def finished(self) -> None:
        self.ended += 1
        self.progress(1)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _instances(self) -> list[SimulatedInstance]:
        return [node.instance for node in self._nodes if node.instance is not None]

    def _sample(self) -> None:
        for instance in self._instances:
            gauges = instance.require_worker().gauges()
            blocks = gauges.blocks
            self.record.samples.append(
                InstanceSample(
                    self.world.now_us - _SETTLED_US,
                    instance.spec.number,
                    gauges.running,
                    gauges.waiting,
                    blocks.free,
                    blocks.evictable,
                    blocks.running,
                    gauges.preemptions_for_others + gauges.preemptions_of_self,
                    gauges.reserve_ratio,
                    blocks.leased + blocks.receiving,
                )
            )
        self.world.after(self.spec.look_every_us, self._sample)

    def _conclude(self) -> None:
        record = self.record
        record.end_us = self.world.now_us - _SETTLED_US
        record.busy_us = [instance.device.busy_us for instance in self._instances]
        record.steps_each = [instance.require_worker().gauges().steps for instance in self._instances]
        record.steps = sum(record.steps_each)
        record.spans = [
            span._replace(begin_us=span.begin_us - _SETTLED_US, end_us=span.end_us - _SETTLED_US) for span in self._spans
        ]
        record.spans_left_out = record.steps - len(record.spans)
        if self._transfers is None:
            record.roles.clear()
        else:
            record.pools = [instance.spec.config.blocks for instance in self._instances]
            record.handed = [_handed(instance, self._transfers) for instance in self._instances]
            record.took_us = [us for node in self._nodes if node.neighbours is not None for us in node.neighbours.took_us]
        for request in record.requests:
            wanted = self.spec.calls[request.index].output_tokens
            if request.outcome in (RequestOutcome.STOP, RequestOutcome.LENGTH) and request.output_tokens != wanted:
                raise RunFailed(f"request {request.index} got {request.output_tokens} tokens, not {wanted}")


def _handed(instance: SimulatedInstance, transfers: TimedTransfers) -> HandoverTotals:
    gauges, both = instance.require_worker().gauges().handovers, transfers.of(instance.host.name)
    return HandoverTotals(
        made=gauges.made,
        refused=gauges.refused,
        failed=gauges.not_delivered + gauges.preempted + gauges.timed_out,
        bytes=round(sum(card.bytes for card in both)),
        busy_us=round(sum(card.busy_us for card in both)),
    )


def _outcome_of(reason: FinishReason) -> RequestOutcome:
    return RequestOutcome.LOST if reason is FinishReason.RESCHEDULE else RequestOutcome(reason)


Chain = list[tuple[int, PlannedRequest]]
"""Consecutive calls of one client, with their indices."""

_SETTLED_US = 10_000
"""Time for instances to start; times in records count from here."""


def _chains(calls: Sequence[PlannedRequest]) -> list[Chain]:
    """Each session is a chain; every other call is a chain of one."""
    chains: list[Chain] = []
    of_session: dict[int, Chain] = {}
    for index, call in enumerate(calls):
        chain = of_session.get(call.session) if call.session is not None else None
        if chain is None:
            chain = []
            chains.append(chain)
            if call.session is not None:
                of_session[call.session] = chain
        chain.append((index, call))
    return chains


class _Client:
    """Sends the calls of one chain after another, one call at a time."""

    def __init__(self, cluster: _Cluster, chains: Iterator[Chain]) -> None:
        self._cluster = cluster
        self._chains = chains
        self._chain: deque[tuple[int, PlannedRequest]] = deque()
        self._history = np.empty(0, dtype=np.int32)
        self._request: SimulatedRequest
        self._prompt = NO_TOKENS

    def go_on(self) -> None:
        if not self._chain:
            self._chain.extend(next(self._chains, ()))
            self._history = np.empty(0, dtype=np.int32)
            if not self._chain:
                return
            self._arrive(*self._chain.popleft())
        else:
            index, call = self._chain.popleft()
            self._cluster.host.after(call.think_us, self._arrive, index, call)

    def _arrive(self, index: int, call: PlannedRequest) -> None:
        cluster = self._cluster
        self._prompt = np.concatenate((self._history, cluster.prompt(index, call)), dtype=np.int32)
        self._prompt.setflags(write=False)
        self._request = SimulatedRequest(index, cluster.world.now_us - _SETTLED_US, len(self._prompt))
        cluster.record.requests.append(self._request)
        cluster.host.after(cluster.spend_host(), self._submit, index, call)

    def _submit(self, index: int, call: PlannedRequest) -> None:
        sampling = Sampling(seed=index, temperature=0.0, stop_token_ids=(STOP_TOKEN,))
        arrived_us = self._cluster.world.now_us
        submission = Submission(RequestId(str(index)), self._prompt, sampling, call.max_tokens, arrived_us=arrived_us)
        self._cluster.submit(submission, self)

    # ── called by the front end or router ────────────────────────────────────────────────────────────────────────────────

    def placed(self, where: str) -> None:
        self.served_by(self._cluster.numbers[where])

    def served_by(self, instance: int) -> None:
        self._request.instance = instance

    def opened(self) -> None:
        """Tokens follow."""

    def declined(self, refusal: Refusal) -> None:
        self._request.ended_because = refusal.message
        self._end(RequestOutcome.REFUSED)

    def progress(
        self,
        _place: int,
        _tokens: list[int],
        begin: int,
        end: int,
        cached: int | None,
        ended: EndedRequest | routing.ChoiceOutcome | None,
        _logprobs: object = None,
        _prompt_logprobs: object = None,
    ) -> None:
        request = self._request
        if request.first_us is None and end > begin:
            request.first_us = self._cluster.world.now_us - _SETTLED_US
            self._cluster.queued_tokens[request.instance or 0] -= request.input_tokens
            request.cached_tokens = cached or 0
        request.output_tokens += end - begin
        if ended is not None:
            bill = ended.bill
            request.recomputed_tokens, request.preemptions = bill.recomputed_tokens, bill.preemptions
            request.queue_us, request.prefill_us, request.decode_us = bill.queue_us, bill.prefill_us, bill.decode_us
            request.transfer_us = bill.transfer_us
            request.attempts = bill.attempts if isinstance(ended, EndedRequest) else bill.attempts - 1
            request.ended_because = "" if ended.fault is None else ended.fault.message
            self._end(_outcome_of(ended.reason))

    def lost(self, _place: int | None, end: LostEntry) -> None:
        raise RunFailed(f"an instance was lost where none can be: {end.reason}")

    def gone(self) -> None:
        raise RunFailed("the router was lost where it cannot be")

    def _end(self, outcome: RequestOutcome) -> None:
        request = self._request
        request.ended_us = self._cluster.world.now_us - _SETTLED_US
        request.outcome = outcome
        answer = np.full(request.output_tokens, FILLER_TOKEN, dtype=np.int32)
        self._history = np.concatenate((self._prompt, answer)) if self._chain else self._history
        self._prompt = NO_TOKENS  # a router keeps a reference to this client
        self._cluster.finished()
        self.go_on()
