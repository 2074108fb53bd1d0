"""Bandwidth of KV transfers between two processes, compared with memcpy and a bare socket.

Both pools lie in memory that has been touched. Blocks are scattered in both, as in pools long in use; every layer of every
block is a piece of its own, as when layers leave while a step computes. All of it is measured in turns within a round:

    memcpy     one thread, one process, the same pieces between the same places
    socket     the same number of bytes through a plain loopback connection, from and to one run of memory
    shm …      from the order to ship until everything is known to be there (with checks: and to be right)

A ratio is taken within each round, so that a machine that is busy slows both sides of it; the median over rounds counts.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.bench.machine import OtherLoad, describe_machine
from baton.bench.stats import median
from baton.core.handover.messages import Arriving, Handover, PeerEvent, PeerId, Verified
from baton.kv.transfer_contract import KINDS, Receiver, available, make_receiver
from benchmarks.handover_sender import (
    ANSWER_S,
    SOCKET_CALL_BYTES,
    TOKEN,
    Begin,
    Order,
    Send,
    SendBare,
    Sent,
    filled_pool,
    layout_of,
    scattered,
)
from benchmarks.options import JsonFile
from benchmarks.runner import (
    Columns,
    Experiment,
    MeasurementFailed,
    Progress,
    Rounds,
    median_ratio,
    model_folder,
    print_other_load,
    run_benchmark,
    table_of,
)

MEMCPY, SOCKET = "memcpy", "socket"
GOALS = {"shm": (MEMCPY, 0.80), "tcp": (SOCKET, 0.70)}
"""Transfer kind → (reference, share of it to reach without checks)."""


@dataclass(frozen=True, slots=True)
class ModelKv:
    """KV sizes of a model."""

    name: str
    layers: int
    layer_bytes: int
    """Keys and values of one layer of one block of 16 tokens."""


MODELS = (
    ModelKv("8B, bf16", 32, 8 * 128 * 2 * 16 * 2),
    ModelKv("SmolLM2-135M, float32", 30, 3 * 64 * 2 * 16 * 4),
)


class TransferFailed(MeasurementFailed):
    """A measured transfer failed."""


class TransferMeasured(msgspec.Struct, frozen=True):
    """A transfer kind, memcpy or socket, with or without checks."""

    name: str
    verified: bool = False

    @property
    def title(self) -> str:
        return f"{self.name}, checks" if self.verified else self.name


class TransferSpeed(msgspec.Struct, frozen=True):
    way: TransferMeasured
    gb_per_s: list[float]
    of_memcpy: float
    of_socket: float


class ModelSpeeds(msgspec.Struct, frozen=True):
    model: str
    piece_bytes: int
    total_bytes: int
    speeds: list[TransferSpeed]
    goals: dict[str, float]
    """Transfer kind → measured share of its reference."""


class HandoverReport(msgspec.Struct, frozen=True):
    machine: dict[str, str | int | float]
    rounds: int
    load: list[OtherLoad]
    models: list[ModelSpeeds]
    absent: dict[str, str]


class _SenderProcess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, what: Order) -> Callable[[], Sent]:
        """Send an order; call the result to wait for the reply."""
        if self._process.stdin is None:
            raise TransferFailed("the sending process has no way in")
        self._process.stdin.write(msgspec.json.encode(what) + b"\n")
        self._process.stdin.flush()
        return self._answer

    def _answer(self) -> Sent:
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise TransferFailed("the sending process is gone")
        sent = msgspec.json.decode(line, type=Sent)
        if sent.failure:
            raise TransferFailed(sent.failure)
        return sent


@contextlib.contextmanager
def _sender_process() -> Iterator[_SenderProcess]:
    command = [sys.executable, "-m", "benchmarks.handover_sender"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield _SenderProcess(process)
    finally:
        process.kill()
        process.communicate()


class Transfers:
    """Source and target pools of one model, and the transfers between them."""

    def __init__(self, model: ModelKv, total_bytes: int, sender: _SenderProcess) -> None:
        self._sender = sender
        block_bytes = layout_of(model.layer_bytes, model.layers).block_bytes
        blocks = -(-total_bytes // block_bytes)
        begun = sender.ask(Begin(model.layer_bytes, model.layers, blocks))
        self._source = filled_pool(model.layer_bytes, model.layers, blocks)
        self._memory = filled_pool(model.layer_bytes, model.layers, blocks)
        self._sources, self._targets = scattered(blocks, seed=1), scattered(blocks, seed=2)
        self._receivers: dict[tuple[str, bool], tuple[Receiver, queue.SimpleQueue[PeerEvent]]] = {}
        self._requests = 0
        self.total_bytes = blocks * block_bytes
        begun()

    def measure(self, way: TransferMeasured) -> float:
        """Seconds of one transfer."""
        match way.name:
            case "memcpy":
                return self._memcpy_s()
            case "socket":
                return self._socket_s()
            case _:
                return self._transfer_s(way)

    def close(self) -> None:
        for receiver, _ in self._receivers.values():
            receiver.close()

    def _memcpy_s(self) -> float:
        pairs = list(zip(self._targets.tolist(), self._sources.tolist(), strict=True))
        began_s = time.monotonic()
        for begin, end in self._memory.spans:
            to, of = self._memory.pool[:, begin:end], self._source.pool[:, begin:end]
            for target, source in pairs:
                to[target] = of[source]
        return time.monotonic() - began_s

    def _socket_s(self) -> float:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            answer = self._sender.ask(SendBare(listener.getsockname()[1]))
            line, _ = listener.accept()
            with line:
                into, at = self._memory.pool.data.cast("B"), 0
                while at < len(into):
                    size = line.recv_into(into[at : at + SOCKET_CALL_BYTES])
                    if not size:
                        raise TransferFailed("the bare socket closed early")
                    at += size
                ended_s = time.monotonic()
        return ended_s - answer().began_s

    def _transfer_s(self, way: TransferMeasured) -> float:
        receiver, events = self._receiver(way)
        self._requests += 1
        handover = Handover(PeerId("sender"), self._requests, 1)
        self._memory.pool[:, 0] = 255  # every block must arrive
        receiver.expect(handover, TOKEN, 0, self._targets)
        if not way.verified:
            receiver.verify(handover, b"")
        answer = self._sender.ask(Send(way.name, way.verified, receiver.address, self._requests))
        if way.verified:
            sent = answer()
            receiver.verify(handover, sent.checks)
        ended_s = self._wait_verified(events)
        if not way.verified:
            sent = answer()
        if not (self._memory.pool[self._targets, 0] == self._source.pool[self._sources, 0]).all():
            raise TransferFailed(f"{way.title}: what arrived is not what was sent")
        return ended_s - sent.began_s

    @staticmethod
    def _wait_verified(events: queue.SimpleQueue[PeerEvent]) -> float:
        while isinstance(event := events.get(timeout=ANSWER_S), Arriving):
            pass
        if not isinstance(event, Verified):
            raise TransferFailed(str(event))
        return time.monotonic()

    def _receiver(self, way: TransferMeasured) -> tuple[Receiver, queue.SimpleQueue[PeerEvent]]:
        key = way.name, way.verified
        if key not in self._receivers:
            events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
            self._receivers[key] = make_receiver(way.name, self._memory, events.put, verified=way.verified), events
        return self._receivers[key]


def transfers_to_measure(kinds: Sequence[str]) -> list[TransferMeasured]:
    bare = [TransferMeasured(MEMCPY), TransferMeasured(SOCKET)]
    return [*bare, *(TransferMeasured(kind, verified) for verified in (False, True) for kind in kinds)]


def run(total_bytes: int, rounds: int, progress: Progress, models: Sequence[ModelKv] = MODELS) -> HandoverReport:
    """Measure all models and transfers, in turns."""
    absent = {kind: reason for kind in KINDS if (reason := available(kind)) is not None}
    ways = transfers_to_measure([kind for kind in KINDS if kind not in absent])
    taking = Rounds(progress, rounds)
    speeds = [_measure_model(model, total_bytes, ways, taking) for model in models]
    return HandoverReport(describe_machine(), rounds, taking.loads, speeds, absent)


def _measure_model(model: ModelKv, total_bytes: int, ways: Sequence[TransferMeasured], rounds: Rounds) -> ModelSpeeds:
    with _sender_process() as sender:
        transfers = Transfers(model, total_bytes, sender)
        try:
            taken_s = rounds.repeat(model.name, {way.title: partial(transfers.measure, way) for way in ways})
        finally:
            transfers.close()
        return speeds_of(model, transfers.total_bytes, {way: taken_s[way.title] for way in ways})


def speeds_of(model: ModelKv, total_bytes: int, taken_s: Mapping[TransferMeasured, Sequence[float]]) -> ModelSpeeds:
    def share(way: TransferMeasured, of: str) -> float:
        return median_ratio(taken_s[TransferMeasured(of)], taken_s[way])

    speeds = [
        TransferSpeed(way, [total_bytes / taken / 1e9 for taken in values], share(way, MEMCPY), share(way, SOCKET))
        for way, values in taken_s.items()
    ]
    goals = {kind: share(TransferMeasured(kind), of) for kind, (of, _) in GOALS.items() if TransferMeasured(kind) in taken_s}
    return ModelSpeeds(model.name, model.layer_bytes, total_bytes, speeds, goals)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


Megabytes = Annotated[int, typer.Option(min=64, max=4096, help="KV to hand over each time, in MB.")]
RoundCount = Annotated[int, typer.Option(min=3, max=100, help="Times that each way is measured.")]
OverlapSwitch = Annotated[bool, typer.Option(help="Also measure how much leaves while the prefill still computes.")]
ModelName = Annotated[str, typer.Option(help="For that: a folder of safetensors, a GGUF file, or smollm2.")]
PromptTokens = Annotated[int, typer.Option(min=64, help="For that: length of the prompt.")]
StepTokens = Annotated[int, typer.Option(min=16, help="For that: most tokens a step.")]
OverlapRounds = Annotated[int, typer.Option(min=1, max=100, help="For that: times that each way is measured.")]
OverlapJson = Annotated[Path, typer.Option(dir_okay=False, help="For that: where the numbers go.")]


def handover(
    megabytes: Megabytes = 128,
    rounds: RoundCount = 5,
    json_file: JsonFile = Path("bench-results/handover.json"),
    overlap: OverlapSwitch = True,
    model: ModelName = "smollm2",
    prompt_tokens: PromptTokens = 2000,
    step_tokens: StepTokens = 2048,
    overlap_rounds: OverlapRounds = 3,
    overlap_json: OverlapJson = Path("bench-results/overlap.json"),
) -> None:
    """Measure the bandwidth of a hand-over between two processes, beside memcpy and a bare socket.

    shm, tcp and, where it is installed, mooncake, with and without checks, for the KV of a large and of a small model.
    Blocks are scattered and every layer is sent on its own. Then, with a real model, the share of a prompt's KV that leaves
    before its prefill ends, and the time to the first token beside sending it afterwards. Exits with 1 when one failed.
    """

    def prepare(progress: Progress) -> Experiment[HandoverReport]:
        ways = transfers_to_measure([kind for kind in KINDS if available(kind) is None])
        return Experiment(len(ways) * rounds * len(MODELS), lambda: run(megabytes * 1_000_000, rounds, progress))

    run_benchmark(prepare, show, json_file)
    if overlap:
        _overlap(model, prompt_tokens, step_tokens, overlap_rounds, overlap_json)


def _overlap(model: str, prompt_tokens: int, step_tokens: int, rounds: int, json_file: Path) -> None:
    # Imported here because torch takes seconds, and the rest of the command must not pay for it.
    from benchmarks import overlap

    kinds = [kind for kind in ("shm", "tcp") if available(kind) is None]

    def prepare(progress: Progress) -> Experiment[overlap.OverlapReport]:
        folder = model_folder(model, progress)
        work = partial(overlap.run, folder, "bfloat16", kinds, prompt_tokens, step_tokens, rounds, progress)
        return Experiment(overlap.RUNS_A_ROUND * len(kinds) * rounds, work)

    run_benchmark(prepare, overlap.show, json_file)


COLUMNS: Columns[TransferSpeed] = (
    ("", lambda speed: speed.way.title),
    ("GB/s", lambda speed: f"{median(speed.gb_per_s):.2f}"),
    ("lowest – highest", lambda speed: f"{min(speed.gb_per_s):.2f} – {max(speed.gb_per_s):.2f}"),
    ("of memcpy", lambda speed: f"{speed.of_memcpy:.2f}"),
    ("of a bare socket", lambda speed: f"{speed.of_socket:.2f}"),
)


def show(console: Console, report: HandoverReport) -> None:
    for model in report.models:
        total_mb = model.total_bytes / 1e6
        title = f"{model.model}: {total_mb:,.0f} MB in pieces of {model.piece_bytes / 1024:g} KiB, {report.rounds} rounds"
        console.print(table_of(title, COLUMNS, model.speeds))
        for kind, reached in model.goals.items():
            of, goal = GOALS[kind]
            verdict = "reached" if reached >= goal else "missed"
            console.print(f"{kind} without checks: {reached:.2f} of {of} (goal {goal:.2f}): {verdict}")
    print_other_load(console, report.load, report.absent)
