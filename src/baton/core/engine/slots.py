"""The running set as columns: one row per slot, one numpy array per property.

A pass over a thousand decoding requests is then a handful of array operations rather than a thousand objects. Rows belong to
the scheduler; nothing outside it keeps a view of them.

Lengths of one row, in tokens:

    0            computed            known      known+pending       limit
    ├── KV settled ──┤                  │              │                │
    ├── delivered to the client ────────┤              │                │
    ├── delivered, or in flight at most ───────────────┤                │
    ├── the most there may ever be ────────────────────────────────────┤
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.core.engine.masks import any_true
from baton.core.engine.plan import Int32s, Int64s
from baton.core.engine.request import Phase, Tokens
from baton.core.errors import InvariantViolated

NO_REQUEST = -1
"""Serial of an empty row. Serials of requests start at 0."""

PAD = -1
"""Fills the unused columns of `stop_ids`. Token ids are never negative, so it matches none."""

PREFILLING, DECODING = int(Phase.RUNNING_PREFILL), int(Phase.RUNNING_DECODE)
RESTORING, PREEMPTING, FINISHED = int(Phase.RESTORING), int(Phase.PREEMPTING), int(Phase.FINISHED)
"""Phases as plain numbers: numpy compares with them six times as fast as with members of an enum."""

CACHE_LINE_TOKENS = 16


class Slots:
    def __init__(self, slots: int, table_width: int, outputs_max: int) -> None:
        self.slots = slots
        self.serial = np.full(slots, NO_REQUEST, dtype=np.int64)
        self.epoch = np.zeros(slots, dtype=np.int64)
        self.phase = np.full(slots, Phase.FINISHED, dtype=np.int8)
        """A copy of the request's phase, for selecting rows; written only by `RunningSet.move`."""
        self.priority = np.zeros(slots, dtype=np.int64)
        self.arrived = np.zeros(slots, dtype=np.int64)
        """Time at which a front end took the request; among equal priorities, the earlier is the more senior."""
        self.protected = np.zeros(slots, dtype=np.bool_)
        """Never a victim again: it was preempted too often, and its whole remaining need is promised."""
        self.discarded = np.zeros(slots, dtype=np.bool_)
        """Its further tokens are counted but not delivered."""
        self.started = np.zeros(slots, dtype=np.bool_)
        """A plan had its Start: the executor knows the row, and only a Stop frees it."""
        self.restoring = np.zeros(slots, dtype=np.bool_)
        """A copy from host memory writes to its blocks."""
        self.prompt = np.zeros(slots, dtype=np.int64)
        self.known = np.zeros(slots, dtype=np.int64)
        self.planned = np.zeros(slots, dtype=np.int64)
        """Prefill only: positions that are computed once all steps in flight have settled."""
        self.pending = np.zeros(slots, dtype=np.int64)
        """The most tokens that steps in flight may still yield."""
        self.computed = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.burst = np.ones(slots, dtype=np.int64)
        """Most tokens that one decode of the row may yield."""
        self.stops_from = np.zeros(slots, dtype=np.int64)
        """A stop token counts only once `known` has reached this (`min_tokens`)."""
        self.stop_ids = np.full((slots, 1), PAD, dtype=np.int32)
        self.published = np.zeros(slots, dtype=np.int64)
        """Leading blocks that were published in the prefix index."""
        self.held = np.zeros(slots, dtype=np.int64)
        self.table = np.zeros((slots, table_width), dtype=np.int32)
        # The system allocates zeroed pages when they are first written, so full width costs only what is used.
        # Rows a power of two apart would fall into the same cache sets; the odd cache line keeps them apart.
        self._outputs = np.zeros((slots, outputs_max + CACHE_LINE_TOKENS), dtype=np.int32)
        self._empty = list(range(slots - 1, -1, -1))

    def snapshot_fields(self) -> dict[str, object]:
        """Of the two wide columns, what occupied rows use: the rest was never written, or is not read again."""
        used = np.where(self.serial == NO_REQUEST, 0, self.known - self.prompt)
        held = np.where(self.serial == NO_REQUEST, 0, self.held)
        packed = {"table": _leading(self.table, held), "_outputs": _leading(self._outputs, used)}
        return {**vars(self), **packed, "widths": (self.table.shape[1], self._outputs.shape[1])}

    def restore_fields(self, fields: dict[str, object]) -> None:
        widths, table, outputs = fields.pop("widths"), fields["table"], fields["_outputs"]
        if not (isinstance(widths, tuple) and isinstance(table, np.ndarray) and isinstance(outputs, np.ndarray)):
            raise TypeError("columns of a slot table")
        vars(self).update(fields)
        self.table = np.zeros((self.slots, widths[0]), dtype=np.int32)
        self._outputs = np.zeros((self.slots, widths[1]), dtype=np.int32)
        table_at = outputs_at = 0
        for slot in range(self.slots):
            held = self._held_now(slot)
            count = 0 if self.serial[slot] == NO_REQUEST else int(self.known[slot] - self.prompt[slot])
            self.table[slot, :held] = table[table_at : table_at + held]
            self._outputs[slot, :count] = outputs[outputs_at : outputs_at + count]
            table_at, outputs_at = table_at + held, outputs_at + count

    def _held_now(self, slot: int) -> int:
        return 0 if self.serial[slot] == NO_REQUEST else int(self.held[slot])

    @property
    def has_room(self) -> bool:
        return bool(self._empty)

    @property
    def occupied(self) -> int:
        return self.slots - len(self._empty)

    def claim(self, serial: int) -> int:
        """Take an empty row and reset its columns."""
        slot = self._empty.pop()
        for column in (self.prompt, self.known, self.planned, self.pending, self.computed, self.published, self.held):
            column[slot] = 0
        self.protected[slot] = self.discarded[slot] = self.started[slot] = self.restoring[slot] = False
        self.serial[slot] = serial
        return slot

    def vacate(self, slot: int) -> None:
        if self.serial[slot] == NO_REQUEST:
            raise InvariantViolated(f"slot {slot} is already empty")
        self.serial[slot] = NO_REQUEST
        self.phase[slot] = Phase.FINISHED
        self._empty.append(slot)

    def set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            extra = len(ids) - self.stop_ids.shape[1]
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=PAD)
        self.stop_ids[slot] = PAD
        self.stop_ids[slot, : len(ids)] = ids

    def append(self, rows: Int64s, tokens: Tokens) -> None:
        """Append one output to each of these distinct rows."""
        known = self.known[rows]
        self._outputs[rows, known - self.prompt[rows]] = tokens
        self.known[rows] = known + 1

    def draws_stop(self, rows: Int64s, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Mask of the tokens just appended to these rows that end their request."""
        hits = self.stop_ids[rows] == tokens[:, None]
        if not any_true(hits):
            return np.zeros(len(rows), dtype=np.bool_)
        return np.asarray(hits.any(axis=1) & (self.known[rows] > self.stops_from[rows]))

    def restore(self, slot: int, outputs: Tokens) -> None:
        """Give an empty row the outputs that its request had before it was preempted."""
        self._outputs[slot, : len(outputs)] = outputs
        self.known[slot] = self.prompt[slot] + len(outputs)

    def outputs(self, slot: int) -> Tokens:
        """A copy of the outputs of the slot's request so far."""
        return self._outputs[slot, : int(self.known[slot] - self.prompt[slot])].copy()

    def output_bytes(self, slot: int, begin: int, end: int) -> bytes:
        """Outputs [begin, end) as bytes, for the prefix hash."""
        return self._outputs[slot, begin:end].tobytes()

    def output_blocks(self, rows: Int64s, begins: Int64s, width: int) -> bytes:
        """Outputs [begin, begin + width) of each row, end to end, as bytes, for the prefix hash."""
        gathered: Tokens = self._outputs[rows[:, None], begins[:, None] + np.arange(width)]
        return gathered.tobytes()

    def blocks(self, slot: int) -> Int32s:
        """A copy of the slot's table."""
        return self.table[slot, : self.held[slot]].copy()

    def append_blocks(self, slot: int, blocks: Int32s) -> None:
        held = int(self.held[slot])
        self.table[slot, held : held + len(blocks)] = blocks
        self.held[slot] = held + len(blocks)

    def running(self) -> Int64s:
        """Rows that will still grow, including those whose KV comes from elsewhere."""
        phase = self.phase
        rows: Int64s = ((phase >= PREFILLING) & (phase <= RESTORING)).nonzero()[0]
        return rows

    @property
    def loading(self) -> int:
        """Number of rows that wait for KV from host memory, or for the fence that ends the wait."""
        return int(np.count_nonzero(self.restoring))

    def by_seniority(self, rows: Int64s) -> Int64s:
        """These rows, the most senior first: by priority, then by arrival anywhere, then by acceptance here."""
        return np.asarray(rows[np.lexsort((self.serial[rows], self.arrived[rows], self.priority[rows]))])

    def decoding(self) -> Int64s:
        rows: Int64s = (self.phase == DECODING).nonzero()[0]
        return rows


def _leading(column: Int32s, counts: Int64s) -> Int32s:
    """The first `counts[row]` values of each row, one row after the other."""
    return np.concatenate([column[row, :count] for row, count in enumerate(counts.tolist())])
