"""What P may send now: signals of finished layers and orders to ship, brought together in whatever order they come.

Pure. A layer signal before its order is known is kept; an order for a step that is over is ready at once. Steps count
upwards and end in order. Each (block, layer) of an order is handed out exactly once, as runs of neighbouring layers:

    order: step 7, blocks 4..9    signals of step 7: 0 1 . 3    runs: layers 0..2, then 3..4, and 2..3 when it is signalled
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.handover.messages import Handover

SIGNALLED_STEPS_MAX = 64
"""Steps whose signals are kept. Forgetting the oldest loses nothing: its layers are ready when the step is over."""
SEQUENCE_BLOCKS_MAX = 1 << 20
"""Far more than any context has."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks [first, upto) of the sequence, these layers of each."""

    layers: range
    first: int
    upto: int


@dataclass(slots=True)
class _Order:
    step: int | None
    first: int
    upto: int
    waiting: int
    """Layers not handed out yet, one bit each."""


@dataclass(slots=True)
class _Task:
    opened: bool = False
    first: int = 0
    upto: int = 0
    ordered: int = 0
    """Blocks of the sequence that an order names, one bit each."""
    last: bool = False
    orders: list[_Order] = field(default_factory=list)


class LayerSignals:
    """Which layers of which steps are written. The one thing here that other threads touch, under their own lock."""

    def __init__(self, layers: int) -> None:
        self._all = (1 << layers) - 1
        self._layers: dict[int, int] = {}
        self._over_upto = -1

    def layer_done(self, step: int, layer: int) -> None:
        if step > self._over_upto:
            self._layers[step] = self._layers.get(step, 0) | (1 << layer)
            if len(self._layers) > SIGNALLED_STEPS_MAX:
                del self._layers[min(self._layers)]

    def step_done(self, step: int) -> None:
        if step > self._over_upto:
            self._over_upto = step
            self._layers = {later: layers for later, layers in self._layers.items() if later > step}

    def written(self, step: int | None) -> int:
        """One bit a layer."""
        if step is None or step <= self._over_upto:
            return self._all
        return self._layers.get(step, 0) & self._all


class SendQueue:
    """A refusal is a string that says why; None is agreement."""

    def __init__(self, layers: int, signals: LayerSignals, tasks_max: int, run_layers_max: int | None = None) -> None:
        self._all = (1 << layers) - 1
        self._run_layers_max = run_layers_max or layers
        self._signals = signals
        self._tasks: dict[Handover, _Task] = {}
        self._tasks_max = tasks_max

    def open(self, handover: Handover, first: int, blocks: int) -> str | None:
        task = self._task(handover)
        if task is None:
            return f"more than {self._tasks_max} hand-overs at once"
        if task.opened:
            return "opened twice"
        task.opened, task.first, task.upto = True, first, first + blocks
        return self._wrong_orders(task)

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> str | None:
        task = self._task(handover)
        if task is None:
            return f"more than {self._tasks_max} hand-overs at once"
        if task.last:
            return "ordered to ship after the last"
        if not 0 <= first <= upto <= SEQUENCE_BLOCKS_MAX:
            return f"ordered to ship [{first}, {upto})"
        blocks = _bits(first, upto)
        if task.ordered & blocks:
            return f"ordered to ship some of [{first}, {upto}) twice"
        if blocks:
            task.orders.append(_Order(step, first, upto, self._all))
        task.ordered |= blocks
        task.last = last
        return self._wrong_orders(task)

    def next_run(self, handover: Handover) -> BlockRun | None:
        """The next that may be sent; once returned it counts as sent."""
        task = self._tasks.get(handover)
        if task is None or not task.opened:
            return None
        for at, order in enumerate(task.orders):
            ready = order.waiting & self._signals.written(order.step)
            if ready:
                begin = (ready & -ready).bit_length() - 1
                beyond = ~(ready >> begin)
                count = min((beyond & -beyond).bit_length() - 1, self._run_layers_max)
                order.waiting &= ~(((1 << count) - 1) << begin)
                if not order.waiting:
                    del task.orders[at]
                return BlockRun(range(begin, begin + count), order.first, order.upto)
        return None

    def finished(self, handover: Handover) -> bool:
        """Everything was ordered and handed out."""
        task = self._tasks.get(handover)
        return task is not None and task.opened and task.last and not task.orders

    def forget(self, handover: Handover) -> None:
        self._tasks.pop(handover, None)

    def _task(self, handover: Handover) -> _Task | None:
        if handover not in self._tasks and len(self._tasks) >= self._tasks_max:
            return None
        return self._tasks.setdefault(handover, _Task())

    @staticmethod
    def _wrong_orders(task: _Task) -> str | None:
        """Only what was opened may be ordered; and in the end all of it, or D would wait for the rest for ever."""
        if not task.opened:
            return None
        missing = task.ordered ^ _bits(task.first, task.upto)
        if task.ordered & missing:
            return f"ordered to ship more than [{task.first}, {task.upto})"
        if task.last and missing:
            return f"ordered to ship less than [{task.first}, {task.upto})"
        return None


def _bits(first: int, upto: int) -> int:
    return ((1 << (upto - first)) - 1) << first
