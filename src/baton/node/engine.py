"""The engine process: drives one Worker and one executor, and talks to the front end over one ZeroMQ socket.

    python -m baton.node.engine        settings come as JSON on standard input

The loop hands in what has arrived, plans what is due, and waits either for the oldest step in flight or, when nothing is in
flight, for a message. The queue to the front end is bounded: when the front end does not drain it, the engine pauses.
Standard input is also the life line: when it closes, the front end is gone and so are we.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from baton.core.config import WorkerConfig
from baton.core.errors import BatonError
from baton.core.plan import StepPlan, StepResult
from baton.core.prefix import PrefixIndex
from baton.core.worker import Effect, Event, Launch, StepDone, Tick, Worker
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.scripted import ScriptedExecutor
from baton.node.scripted_text import BYTE_VOCABULARY
from baton.node.settings import EngineSettings
from baton.wire.dispatch import event_of, message_of
from baton.wire.messages import (
    WIRE_VERSION,
    Failed,
    FromEngine,
    Ready,
    decode_to_engine,
    encode_from_engine,
    wire_gauges,
)

log = logging.getLogger("baton.engine")

QUEUED_MESSAGES_MAX = 1000
"""Either way. A step is one message, so the engine is never more than this many steps ahead of the front end."""
MESSAGES_A_TURN = 256
"""How many messages are taken in before the next step is planned."""
LAST_WORDS_MS = 1000

EXIT_FAILED = 1
EXIT_ORPHANED = 3


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class EngineLoop:
    def __init__(
        self, worker: Worker, executor: Executor, socket: zmq.Socket[bytes], now_us: Callable[[], int] = monotonic_us
    ) -> None:
        self._worker = worker
        self._executor = executor
        self._socket = socket
        self._now_us = now_us
        self._steps_in_flight = 0

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """Take in what has arrived, plan what is due, then wait for the one thing that can happen next."""
        self._take_messages()
        deadline, now_us = self._worker.next_deadline(), self._now_us()
        if deadline is not None and deadline <= now_us:
            self._tell(Tick())
        elif self._steps_in_flight:
            self._steps_in_flight -= 1
            self._tell(StepDone(self._executor.collect()))
        else:
            self._socket.poll(None if deadline is None else -(-(deadline - now_us) // 1000))

    def _take_messages(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            # A frame that is no message ends the engine: dropping it would leave somebody waiting for ever.
            self._tell(event_of(decode_to_engine(frame)))

    def _tell(self, event: Event) -> None:
        for effect in self._worker.handle(event, self._now_us()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Launch):
            self._executor.launch(effect.plan)
            self._steps_in_flight += 1
        elif (message := message_of(effect, self._worker.gauges)) is not None:
            self._send(message)

    def _send(self, message: FromEngine) -> None:
        # Blocks at the high-water mark: a front end that does not read pauses the engine instead of filling memory.
        self._socket.send(encode_from_engine(message))


def build_executor(settings: EngineSettings) -> tuple[Executor, str]:
    """The executor that the settings ask for, and a line about it for the operator."""
    if settings.model_folder is None:
        return _scripted(settings), "scripted executor, no model"
    # Imported here because torch takes seconds, and the scripted executor must not pay for it.
    from baton.executor.torch_cpu import TorchCpuExecutor

    if settings.threads is not None:
        import torch

        torch.set_num_threads(settings.threads)
    executor = TorchCpuExecutor.load(
        Path(settings.model_folder),
        dtype=settings.dtype,
        slots=settings.slots,
        block_size=settings.block_size,
        blocks=settings.blocks,
        kv_memory_bytes=settings.kv_memory_bytes,
        context_tokens=settings.context_tokens,
        attention=settings.attention,
    )
    return executor, f"{settings.dtype} on CPU"


def _scripted(settings: EngineSettings) -> Executor:
    shape = ExecutorShape(
        slots=settings.slots,
        blocks=settings.blocks or 4096,
        block_size=settings.block_size,
        context_tokens=settings.context_tokens or 8192,
        burst=settings.burst,
    )
    return PacedExecutor(ScriptedExecutor(shape, BYTE_VOCABULARY), settings.step_ms / 1000)


class PacedExecutor:
    """Another executor whose steps take at least so long."""

    def __init__(self, inner: Executor, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self.shape = inner.shape
        self.vocabulary = inner.vocabulary
        self.fingerprint = inner.fingerprint

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        time.sleep(self._step_s)
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()


def worker_config(settings: EngineSettings, shape: ExecutorShape) -> WorkerConfig:
    return WorkerConfig(
        slots=shape.slots,
        blocks=shape.blocks,
        block_size=shape.block_size,
        context_tokens=shape.context_tokens,
        step_tokens=settings.step_tokens,
        burst=shape.burst,
        depth=settings.depth,
        waiting_max=settings.waiting_max,
        prefix_cache=settings.prefix_cache,
        reserve=settings.reserve,
        ratio_initial=settings.ratio_initial,
        ratio_decay=settings.ratio_decay,
        ratio_floor=settings.ratio_floor,
        ratio_clip_tokens=settings.ratio_clip_tokens,
        fixed_blocks=settings.fixed_blocks,
        fixed_blocks_decay=settings.fixed_blocks_decay,
        victims=settings.victims,
        max_preemptions=settings.max_preemptions,
    )


def serve(settings: EngineSettings, socket: zmq.Socket[bytes]) -> None:
    executor, details = build_executor(settings)
    config = worker_config(settings, executor.shape)
    worker = Worker(config, PrefixIndex(settings.prefix_secret, executor.fingerprint, config.blocks))
    ready = Ready(
        version=WIRE_VERSION,
        context_tokens=config.sequence_tokens_max,
        vocabulary=executor.vocabulary,
        slots=config.slots,
        blocks=config.blocks,
        block_size=config.block_size,
        details=details,
        gauges=wire_gauges(worker.gauges()),
    )
    socket.send(encode_from_engine(ready))
    EngineLoop(worker, executor, socket).run()


def _exit_with_front_end() -> None:
    """Ends this process when standard input closes, whatever the main thread is doing."""
    # Not through sys.stdin: its lock would be held when the main thread ends the process for another reason.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(EXIT_ORPHANED)


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    threading.Thread(target=_exit_with_front_end, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
    socket.connect(settings.endpoint)
    try:
        serve(settings, socket)
    except Exception as error:
        # Not swallowed: the front end learns why, the traceback goes to the log, and the process ends with it.
        reason = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        socket.send(encode_from_engine(Failed(reason)))
        socket.close()
        zmq.Context.instance().term()
        if isinstance(error, BatonError):
            log.error("%s", reason)
            sys.exit(EXIT_FAILED)
        raise


if __name__ == "__main__":
    main()
