"""Share of a prompt's KV sent before its prefill ends, and its effect on the time to the first token.

An instance that prefills and one that decodes, each with the loop, worker and transfers that serve, on threads of one
process; only the session between them is in memory. The one that prefills computes a real model; the one that decodes only
counts, since its part begins where the measurement ends. What counts as left is what has arrived in the other pool, which
is never more.

    as computed      each layer leaves as soon as a step has written it
    after prefill    nothing leaves before the last step is over
    … throttled      both again, the sender held to 1.5 times the rate at which the run before produced KV
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import zmq
from rich.console import Console

from baton.bench.stats import median
from baton.core.config import DECODE, PREFILL, Role, WorkerConfig
from baton.core.engine.gauges import PeerTraffic
from baton.core.engine.orders import Submit
from baton.core.engine.plan import StepPlan, StepResult
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import RequestId, Sampling, Submission, frozen_tokens
from baton.core.engine.worker import Worker
from baton.core.handover.messages import Handover, Heard, PeerEffect, PeerEvent, PeerId, PeerOpened, Ship, Tell
from baton.executor.contract import Executor, ExecutorShape, KvView, LayerDone
from baton.executor.counting import CountingExecutor
from baton.kv.shared_memory import shared_bytes
from baton.kv.transfer_contract import KvLayout, KvMemory
from baton.node.engine import EngineLoop
from baton.node.inbox import EngineInbox, ThreadFailure
from baton.node.kv_transfers import KvTransfers, TransferOrder
from baton.wire.engine_messages import StepOutput, decode_from_engine, encode_to_engine
from benchmarks.runner import Columns, Progress, table_of

PREFILL_PEER, DECODE_PEER = PeerId("prefill"), PeerId("decode")
BLOCK_SIZE = 16
THROTTLE = 1.5
GOAL = 0.90
ANSWER_S = 600
HOST = "127.0.0.1"


class OverlapMode(msgspec.Struct, frozen=True):
    kind: str
    after_prefill: bool
    throttled: bool

    @property
    def title(self) -> str:
        sent = "after prefill" if self.after_prefill else "as computed"
        return f"{self.kind}, {sent}{', throttled' if self.throttled else ''}"


class OverlapRun(msgspec.Struct, frozen=True):
    bytes_per_s: float | None
    """Rate limit of the sender; None: unlimited."""
    prefill_s: float
    ttft_s: float
    left_share: float
    """Share of bytes that had arrived in the other pool when the prefill ended."""


class OverlapResult(msgspec.Struct, frozen=True):
    mode: OverlapMode
    runs: list[OverlapRun]

    @property
    def left_share(self) -> float:
        return median([run.left_share for run in self.runs])

    @property
    def ttft_s(self) -> float:
        return median([run.ttft_s for run in self.runs])


class OverlapReport(msgspec.Struct, frozen=True):
    model: str
    prompt_tokens: int
    step_tokens: int
    kv_bytes: int
    modes: list[OverlapResult]


class _LoopEnded(Exception):
    """Ends an engine loop."""


class _SendAfterPrefill:
    """Delays all sends of a prompt until its prefill has ended."""

    def __init__(self, inner: KvTransfers) -> None:
        self._inner = inner
        self._ships: dict[Handover, list[Ship]] = {}

    def carry_out(self, order: TransferOrder) -> None:
        if isinstance(order, Ship):
            self._ships.setdefault(order.handover, []).append(order)
        else:
            self._inner.carry_out(order)

    def layer_done(self, _step: int, _layer: int) -> None:
        """Ignored: nothing is sent by layer."""

    def before_handling(self, event: PeerEvent) -> None:
        pass

    def step_done(self, step: int) -> None:
        over = [handover for handover, ships in self._ships.items() if ships[-1].last and (ships[-1].step or 0) <= step]
        for handover in over:
            for ship in self._ships.pop(handover):
                self._inner.carry_out(replace(ship, step=None))

    def close(self) -> None:
        self._inner.close()


class _TimedExecutor:
    """An executor that records when steps with a first token ended."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.shape, self.vocabulary, self.fingerprint = inner.shape, inner.vocabulary, inner.fingerprint
        self.on_layer: LayerDone | None = None
        self.arrived_bytes: Callable[[], int] = lambda: 0
        self.firsts: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        """(end time, bytes arrived by then) of each step that yielded a first token."""

    @property
    def kv(self) -> KvView:
        return self._inner.kv

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        if len(result.tokens):
            self.firsts.put((time.monotonic(), self.arrived_bytes()))
        return result

    def close(self) -> None:
        self._inner.close()


class _Instance:
    """One instance: an engine loop on a thread, connected to the other instance in memory."""

    def __init__(self, role: Role, executor: Executor, step_tokens: int, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        shape = executor.shape
        config = WorkerConfig(
            slots=shape.slots, blocks=shape.blocks, block_size=shape.block_size, context_tokens=shape.context_tokens,
            step_tokens=step_tokens, prefix_cache=False, role=role,
        )  # fmt: skip
        self.inbox = EngineInbox()
        self.front, back = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        self.front.bind(f"inproc://{role.name}")
        self.front.setsockopt(zmq.RCVTIMEO, ANSWER_S * 1000)
        back.connect(f"inproc://{role.name}")
        self.transfers: KvTransfers | _SendAfterPrefill | None = None
        self.other: _Instance | None = None
        self._role = role
        worker = Worker(config, PrefixIndex(b"bench", executor.fingerprint, config.blocks), b"bench")
        self._loop = EngineLoop(worker, executor, back, self.inbox, self)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, other: _Instance) -> None:
        self.other = other
        self._thread.start()
        self.inbox.put(PeerOpened(DECODE_PEER if self._role.gives else PREFILL_PEER))

    def stop(self) -> None:
        self.inbox.put(ThreadFailure(_LoopEnded()))
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(_LoopEnded):
            self._loop.run()

    def carry_out(self, effect: PeerEffect) -> None:
        if isinstance(effect, Tell) and self.other is not None:
            self.other.inbox.put(Heard(PREFILL_PEER if self._role.gives else DECODE_PEER, effect.message))
        elif self.transfers is not None and isinstance(effect, TransferOrder):
            self.transfers.carry_out(effect)

    def layer_done(self, step: int, layer: int) -> None:
        if self.transfers is not None:
            self.transfers.layer_done(step, layer)

    def before_handling(self, event: PeerEvent) -> None:
        pass

    def step_done(self, step: int) -> None:
        if self.transfers is not None:
            self.transfers.step_done(step)

    def connect_to(self, addresses: tuple[str, ...]) -> None:
        del addresses  # the two instances are connected already

    def traffic(self) -> PeerTraffic:
        return PeerTraffic({}, 0)


@dataclass
class InstancePair:
    """Both instances, and measurements on them."""

    prefill_side: _Instance
    decode_side: _Instance
    executor: _TimedExecutor
    memory: KvMemory
    target: KvMemory
    asked: int = 0

    def measure(self, mode: OverlapMode, prompt_tokens: int, bytes_per_s: float | None) -> OverlapRun:
        receiving = KvTransfers(DECODE, mode.kind, self.target, self.decode_side.inbox.put, HOST)
        sending = KvTransfers(PREFILL, mode.kind, self.memory, self.prefill_side.inbox.put, HOST, bytes_per_s)
        sending.accept(DECODE_PEER, receiving.offer(PREFILL_PEER, same_host=True))
        self.decode_side.transfers = receiving
        self.prefill_side.transfers = _SendAfterPrefill(sending) if mode.after_prefill else sending
        self.executor.arrived_bytes = receiving.arrived_bytes
        try:
            return self._ask(prompt_tokens, bytes_per_s)
        finally:
            sending.close()
            receiving.close()

    def _ask(self, prompt_tokens: int, bytes_per_s: float | None) -> OverlapRun:
        self.asked += 1
        draws = np.random.default_rng(self.asked)
        prompt = frozen_tokens(draws.integers(10, self.executor.vocabulary, prompt_tokens))
        asked = Submission(RequestId(str(self.asked)), prompt, Sampling(seed=0, temperature=0.0), 1)
        began_s = time.monotonic()
        self.decode_side.front.send(encode_to_engine(Submit(self.asked, (asked,))))
        ended_s, left_bytes = self.executor.firsts.get(timeout=ANSWER_S)
        while True:
            message = decode_from_engine(self.decode_side.front.recv())
            if isinstance(message, StepOutput) and message.ended:
                break
        kv_bytes = -(-prompt_tokens // BLOCK_SIZE) * self.memory.layout.block_bytes
        return OverlapRun(bytes_per_s, ended_s - began_s, time.monotonic() - began_s, left_bytes / kv_bytes)


@contextlib.contextmanager
def pair(folder: Path, dtype: str, prompt_tokens: int, step_tokens: int) -> Iterator[InstancePair]:
    from baton.executor.cpu.executor import TorchCpuExecutor

    blocks = 2 * (-(-prompt_tokens // BLOCK_SIZE) + 1)
    fds: list[int] = []

    def allocate(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        shared = shared_bytes(size)
        fds.append(shared.fd)
        return shared.array

    inner = TorchCpuExecutor.load(folder, dtype=dtype, slots=2, block_size=BLOCK_SIZE, blocks=blocks, allocate=allocate)
    executor = _TimedExecutor(inner)
    pool, spans, found, _ = executor.kv
    sizes = tuple(end - begin for begin, end in spans)
    layout = KvLayout(executor.fingerprint, found, BLOCK_SIZE, sizes)
    memory = KvMemory(layout, pool, spans, fds[0])
    target = KvMemory(layout, np.zeros_like(pool), spans)
    shape = ExecutorShape(2, blocks, BLOCK_SIZE, executor.shape.context_tokens)
    counting = CountingExecutor(shape, lambda _seed: 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    prefill_side = _Instance(PREFILL, executor, step_tokens, context)
    decode_side = _Instance(DECODE, counting, step_tokens, context)
    inner.on_layer = prefill_side.layer_done
    prefill_side.start(decode_side)
    decode_side.start(prefill_side)
    try:
        yield InstancePair(prefill_side, decode_side, executor, memory, target)
    finally:
        prefill_side.stop()
        decode_side.stop()
        context.destroy(0)
        executor.close()


def run(
    folder: Path, dtype: str, kinds: list[str], prompt_tokens: int, step_tokens: int, rounds: int, progress: Progress
) -> OverlapReport:
    """Measure all modes, interleaved: each throttled run follows the run that sets its limit, since machines drift."""
    runs: dict[OverlapMode, list[OverlapRun]] = {}

    def measure(mode: OverlapMode, bytes_per_s: float | None) -> OverlapRun:
        progress.doing(mode.title)
        runs.setdefault(mode, []).append(sides.measure(mode, prompt_tokens, bytes_per_s))
        progress.done()
        return runs[mode][-1]

    with pair(folder, dtype, prompt_tokens, step_tokens) as sides:
        kv_bytes = -(-prompt_tokens // BLOCK_SIZE) * sides.memory.layout.block_bytes
        sides.measure(OverlapMode(kinds[0], after_prefill=False, throttled=False), prompt_tokens, None)  # to warm up
        for kind in kinds * rounds:
            measure(OverlapMode(kind, after_prefill=True, throttled=False), None)
            for after_prefill in (False, True):
                free = measure(OverlapMode(kind, after_prefill=False, throttled=False), None)
                measure(OverlapMode(kind, after_prefill, throttled=True), THROTTLE * kv_bytes / free.prefill_s)
    modes = [OverlapResult(mode, found) for mode, found in sorted(runs.items(), key=lambda item: item[0].title)]
    return OverlapReport(folder.name, prompt_tokens, step_tokens, kv_bytes, modes)


RUNS_A_ROUND = 5
"""Runs per round and kind."""


def show(console: Console, report: OverlapReport) -> None:
    def link(item: OverlapResult) -> str:
        ratios = [one.bytes_per_s * one.prefill_s / report.kv_bytes for one in item.runs if one.bytes_per_s is not None]
        return f"{median(ratios):.2f}" if ratios else ""

    columns: Columns[OverlapResult] = (
        ("way", lambda item: item.mode.title),
        ("left before the end", lambda item: f"{item.left_share:.1%}"),
        ("prefill s", lambda item: f"{median([one.prefill_s for one in item.runs]):.2f}"),
        ("first token s", lambda item: f"{item.ttft_s:.2f}"),
        ("link ÷ production", link),
    )
    title = (
        f"KV of {report.prompt_tokens} tokens of {report.model} ({report.kv_bytes / 1e6:.0f} MB), "
        f"steps of {report.step_tokens}; at least {GOAL:.0%} should leave before the prefill ends"
    )
    console.print(table_of(title, columns, report.modes))
