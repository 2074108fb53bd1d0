"""A simulated device: runs the steps of one instance one after the other, each for the time a step-time model gives.

Owns the executor (the production contract; scripted or counting) and when each launched step ends. Results are passed to the
instance when their step ends. Two faults can be set: a slowness factor, and a chance that a row of a result disagrees with
the scheduler, as with faulty kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from baton.core.engine.plan import StepPlan, StepResult
from baton.executor.contract import Executor
from baton.sim.faults import Fault
from baton.sim.run_records import StepSpan
from baton.sim.world import Host


class StepTimeModel(Protocol):
    """The duration of a step; `StepTimes` implements it."""

    def step_us(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int: ...


class LayerListener(Protocol):
    """Called for each layer of the steps that it awaits."""

    def awaits(self, step: int) -> bool: ...

    def layers_us(self, takes_us: int) -> Sequence[int]:
        """Microseconds from the beginning of a step of `takes_us` until each layer can be read."""

    def layer_done(self, step: int, layer: int) -> None: ...

    def step_done(self, step: int) -> None: ...


class SimulatedDevice:
    def __init__(self, host: Host, executor: Executor, times: StepTimeModel, done: Callable[[StepResult], None]) -> None:
        self._host = host
        self._executor = executor
        self._times = times
        self._done = done
        self._free_us = 0
        """When all launched steps will have ended."""
        self._stream = host.world.stream(f"device {host.name} life {host.lives}")
        self._context = _Contexts(executor.shape.slots)
        self.slowness = 1.0
        self.slow_until_us = 0
        """When the last step that was launched while it was slow will have ended."""
        self.disagreement = 0.0
        self.in_flight = 0
        self.hangs = False
        """Whether steps never end any more."""
        self.when_hung: Callable[[], None] | None = None
        """Called when the first step that should have ended does not."""
        self._hung = False
        """Whether a step hangs, and those behind it never begin."""
        self.longest_us = 0
        self.busy_us = 0
        self.spans: deque[StepSpan] | None = None
        self.number = 0
        self.signals: LayerListener | None = None
        self._computed: deque[StepResult] = deque()
        """Results of steps whose layers are awaited: computed when the step begins, passed on when it ends."""
        self._layers = 0
        """Number of layers of the running step."""
        self._layers_of, self._layers_told = -1, 0
        """The running step, and the layers of it reported so far; after a pause, the rest are reported when it ends."""

    def heal(self) -> None:
        """No step hangs from now on; one that hangs already does so for ever."""
        if self.when_hung is not None:
            self.hangs, self.when_hung = False, None

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        took_us = self._times.step_us(*self._context.load_of(plan))
        begins_us = max(self._host.world.now_us, self._free_us)
        self._free_us = begins_us + max(1, int(took_us * self.slowness))
        if self.slowness > 1.0:
            self.slow_until_us = self._free_us
        self.in_flight += 1
        if self.spans is not None:
            tokens = plan.tokens - len(plan.decode_slots)
            self.spans.append(StepSpan(self.number, plan.step, begins_us, self._free_us, len(plan.decode_slots), tokens))
        awaited = self.signals is not None and self.signals.awaits(plan.step)
        self._host.at(self._free_us, self._finish, self._free_us - begins_us, plan.step if awaited else None)
        if awaited:
            self._host.at(begins_us, self._compute, plan.step, self._free_us - begins_us)

    def _compute(self, step: int, takes_us: int) -> None:
        """Layers become readable one after the other while the step runs."""
        if self._hung:
            return
        self._computed.append(self._executor.collect())
        self._layers_of, self._layers_told = step, 0
        layers_us = () if self.signals is None else self.signals.layers_us(takes_us)
        self._layers = len(layers_us)
        for layer, ready_us in enumerate(layers_us):
            self._host.after(ready_us, self._layer_done, step, layer)

    def _layer_done(self, step: int, layer: int) -> None:
        if self.signals is not None and self._computed and (step, layer) == (self._layers_of, self._layers_told):
            self._layers_told += 1
            self.signals.layer_done(step, layer)

    def _layers_over(self, step: int) -> None:
        for layer in range(self._layers_told, self._layers):
            self._layer_done(step, layer)
        if self.signals is not None:
            self.signals.step_done(step)

    def _finish(self, took_us: int, awaited: int | None) -> None:
        if self.hangs:
            self._hung = True
            hung, self.when_hung = self.when_hung, None
            if hung is not None:
                hung()
            return
        self.longest_us = max(self.longest_us, took_us)
        self.in_flight -= 1
        self.busy_us += took_us
        if awaited is None:
            result = self._executor.collect()
        else:
            self._layers_over(awaited)
            result = self._computed.popleft()
        if self.disagreement and len(result.slots) and self._stream.random() < self.disagreement:
            result = self._disagreed(result)
        self._done(result)

    def _disagreed(self, result: StepResult) -> StepResult:
        """Change the number of known tokens of one row by one."""
        self._host.world.fire(Fault.DISAGREEMENT, self._host.name)
        row = self._stream.randrange(len(result.slots))
        known = result.known.copy()
        known[row] += self._stream.choice((-1, 1))
        return msgspec.structs.replace(result, known=known)


class _Contexts:
    """The context length of each slot when a step runs, from which its cost follows."""

    def __init__(self, slots: int) -> None:
        self._known = np.zeros(slots, dtype=np.int64)

    def load_of(self, plan: StepPlan) -> tuple[int, int, int, int]:
        """(decodes, tokens they attend to, prefill tokens, pairs of positions that prefill attends to)."""
        known, decodes = self._known, plan.decode_slots
        for start in plan.starts:
            known[start.slot] = len(start.tokens)
        tokens = pairs = 0
        for chunk in plan.chunks:
            tokens += chunk.end - chunk.begin
            pairs += (chunk.end * (chunk.end + 1) - chunk.begin * (chunk.begin + 1)) // 2
            known[chunk.slot] += chunk.samples
        context = int(np.add.reduce(known[decodes]))
        known[decodes] += 1
        return len(decodes), context, tokens, pairs
