"""An executor without a model: the next token, and the contents of every KV cell, are a hash of the whole prefix.

    cell(p)   = mix(cell(p-1), token(p))                  written to the block that the table names for position p
    next      = mix(Σ mix(cell(i), i) for all i ≤ p)      read back through the block table, as attention would

One lost or repeated token, one wrong, stale or swapped block changes every token that follows, so a test that compares with
`undisturbed` (which knows neither blocks nor slots) sees it. With several layers, those above the first repeat its cells
under a mask of their own, and one that does not agree with the first spoils the draw. It can also yield up to `burst`
tokens a step; how many is another hash of the prefix, and which ones they are does not depend on it.

Where the hashed token is not one that constraint, allowed tokens and bad words permit, the next one that is follows instead.
When there is no time for more masks, decodes with a constraint sit the step out; the one that has done so for longest has
the first turn in the next one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.core.engine.plan import Chunk, Float32s, Int32s, Logprobs, RowOutcome, Start, StepPlan, StepResult
from baton.core.engine.request import NO_TOKENS, PromptLogprobs, Sampling, Tokens
from baton.core.errors import InvariantViolated
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import ConstraintError, Matcher, allowed_of, words_of
from baton.executor.constraints.scripted_backend import ScriptedBackend
from baton.executor.contract import Allocate, ExecutorShape, KvView, LayerDone, spans, zeroed
from baton.executor.fingerprint import SCRIPTED_MARK

SCRIPTED_CONSTRAINTS = CompiledConstraints([ScriptedBackend()])
_MASK = (1 << 64) - 1
_ODD_A, _ODD_B, _ODD_C = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xAEF17502108EF2D9
_EMPTY_PREFIX = 0x5BF03635F0A31A3D
_FACTOR_B, _FACTOR_C = np.uint64(_ODD_B), np.uint64(_ODD_C)
_FEW, _MORE = np.uint64(29), np.uint64(32)
"""Shifts. Made once: a draw takes a dozen operations on a few cells, and making a scalar takes as long as one of them."""


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 32)) * _ODD_B) & _MASK
    value = ((value ^ (value >> 29)) * _ODD_C) & _MASK
    return value ^ (value >> 32)


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> _MORE)) * _FACTOR_B
    values = (values ^ (values >> _FEW)) * _FACTOR_C
    return values ^ (values >> _MORE)


def _cell(previous: int, token: int) -> int:
    return _mix(previous + (token + 1) * _ODD_A)


def _summand(cell: int, position: int) -> int:
    return _mix(cell ^ (position * _ODD_A & _MASK))


def _draw(total: int, sampling: Sampling, outputs: Sequence[int], vocabulary: int, matcher: Matcher | None) -> int | None:
    """The token that follows a prefix with this sum; a greedy one ignores the seed. None if no token may follow."""
    state = total if sampling.temperature == 0 else total ^ _mix(sampling.seed * _ODD_A + sampling.choice)
    token = _mix(state) % vocabulary
    is_early = len(outputs) < sampling.min_tokens
    if not (is_early or sampling.is_restricted):
        return token
    permits = _permits(sampling, outputs, vocabulary, matcher)
    permitted = [other % vocabulary for other in range(token, token + vocabulary) if permits(other % vocabulary)]
    if is_early:
        return next((other for other in permitted if other not in sampling.stop_token_ids), (*permitted, None)[0])
    return (*permitted, None)[0]


def _permits(sampling: Sampling, outputs: Sequence[int], vocabulary: int, matcher: Matcher | None) -> Callable[[int], bool]:
    """Whether a token may follow these outputs."""
    banned = {
        word[-1]
        for word in sampling.bad_words
        if len(word) == 1 or tuple(outputs[-(len(word) - 1) :]) == word[:-1]
    }  # fmt: skip
    allowed = frozenset(sampling.allowed_token_ids or range(vocabulary)) - banned
    if matcher is None:
        return allowed.__contains__
    words = np.zeros(words_of(vocabulary), dtype=np.uint32)
    matcher.mask(words)
    mask = allowed_of(words, vocabulary)
    return lambda token: token in allowed and bool(mask[token])


def _consume(matcher: Matcher | None, token: int) -> None:
    if matcher is not None and not matcher.consume(token):
        raise InvariantViolated(f"token {token} was drawn, and its constraint does not allow it")


def undisturbed(prompt: npt.ArrayLike, sampling: Sampling, tokens_max: int, vocabulary: int) -> list[int]:
    """The tokens that any run must yield, however it was scheduled, up to and including the first stop token."""
    cell, total, position = _EMPTY_PREFIX, 0, 0
    for token in np.asarray(prompt).tolist():
        cell = _cell(cell, token)
        total = (total + _summand(cell, position)) & _MASK
        position += 1
    outputs: list[int] = []
    matcher = None if sampling.constraint is None else SCRIPTED_CONSTRAINTS.matcher(sampling.constraint, NO_TOKENS)
    while len(outputs) < tokens_max:
        token = _draw(total, sampling, outputs, vocabulary, matcher)
        if token is None:
            break
        _consume(matcher, token)
        outputs.append(token)
        if token in sampling.stop_token_ids and len(outputs) > sampling.min_tokens:
            break
        cell = _cell(cell, token)
        total = (total + _summand(cell, position)) & _MASK
        position += 1
    return outputs


_Decoded = tuple[RowOutcome, list[int], int]
"""Of a decode: the outcome, the tokens that it yields, and how many the slot then knows."""


@dataclass(slots=True)
class _Slot:
    epoch: int
    tokens: list[int]
    prompt_tokens: int
    limit: int
    sampling: Sampling
    table: list[int]
    matcher: Matcher | None
    has_failed: bool = False
    """Its constraint permits no token, or its matcher gave up."""
    sat_out: int = 0
    """How many steps it has sat out since its last token."""
    read: bytes = b""
    """The cells that the last draw has read, and their sum."""
    total: int = 0

    def place(self, block: int, at: int) -> None:
        if at != len(self.table):
            raise InvariantViolated(f"a table of {len(self.table)} blocks was grown at {at}")
        self.table.append(block)


class ScriptedExecutor:
    mark = SCRIPTED_MARK
    """The part of the fingerprint that all scripted executors share."""

    def __init__(
        self,
        shape: ExecutorShape,
        vocabulary: int = 512,
        layers: int = 1,
        allocate: Allocate = zeroed,
        constraints: CompiledConstraints = SCRIPTED_CONSTRAINTS,
        is_late: Callable[[], bool] | None = None,
    ) -> None:
        """`is_late`: whether there is no time for one more mask in this step; None: there always is."""
        self.shape = shape
        self.vocabulary = vocabulary
        self.fingerprint = self.mark + str(vocabulary).encode() + (f":{layers}".encode() if layers > 1 else b"")
        layer_bytes = shape.block_size * np.dtype(np.uint64).itemsize
        raw = allocate(shape.blocks * layers * layer_bytes)
        self.kv = KvView(raw.reshape(shape.blocks, -1), spans([layer_bytes] * layers), "uint64")
        self.on_layer: LayerDone | None = None
        self.constraints = constraints
        self._is_late = is_late
        self._layers = layers
        self._pool = raw.view(np.uint64).reshape(shape.blocks, layers, shape.block_size)
        self._cells = self._pool[:, 0]
        """The first layer, which tokens are drawn from."""
        self._masks = np.arange(1, layers, dtype=np.uint64) * np.uint64(_ODD_B)
        """The XOR masks of the layers above the first."""
        self._slots: dict[int, _Slot] = {}
        self._launched: deque[StepPlan] = deque()
        self._last_step = 0
        positions = np.arange(shape.context_tokens, dtype=np.uint64)
        self._salts = positions * np.uint64(_ODD_A)

    def launch(self, plan: StepPlan) -> None:
        if plan.base_step != self._last_step:
            raise InvariantViolated(f"a plan built on step {plan.base_step} came after step {self._last_step}")
        self._last_step = plan.step
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        rows = _Rows()
        for stop in plan.stops:
            slot = self._slots.get(stop.slot)
            if slot is None or slot.epoch != stop.epoch:
                rows.add(stop.slot, stop.epoch, RowOutcome.NOTHING_EMPTY_SLOT, [], 0)
            else:
                del self._slots[stop.slot]
                rows.add(stop.slot, stop.epoch, RowOutcome.PREEMPTED, [], len(slot.tokens))
        for copy in plan.copies:
            self._pool[copy.target] = self._pool[copy.source]
        for start in plan.starts:
            self._start(start)
        if len(plan.grow_slots):
            grows = plan.grow_slots.tolist(), plan.grow_at.tolist(), plan.grow_blocks.tolist()
            for slot_id, at, block in zip(*grows, strict=True):
                self._slots[slot_id].place(block, at)
        for chunk in plan.chunks:
            self._run_chunk(chunk, rows)
        decodes = list(zip(plan.decode_slots.tolist(), plan.decode_epochs.tolist(), strict=True))
        decoded = self._run_decodes(decodes)
        for slot_id, epoch in decodes:
            rows.add(slot_id, epoch, *decoded[slot_id])
            if (slot := self._slots.get(slot_id)) is not None:
                self._report(slot, rows)
        if self.on_layer is not None and plan.tokens:
            for layer in range(self._layers):
                self.on_layer(plan.step, layer)
        return rows.result(plan.step)

    def close(self) -> None:
        self._launched.clear()
        self._slots.clear()

    def _start(self, start: Start) -> None:
        if start.slot in self._slots:
            raise InvariantViolated(f"slot {start.slot} was started while it was in use")
        tokens = start.tokens.tolist()
        slot = _Slot(start.epoch, tokens, start.prompt_tokens, start.limit, start.sampling, start.blocks.tolist(), None)
        self._slots[start.slot] = slot
        try:
            slot.matcher = self._matcher_of(start)
        except ConstraintError:
            slot.has_failed = True

    def _matcher_of(self, start: Start) -> Matcher | None:
        """A matcher that has consumed the earlier outputs; None without a constraint."""
        constraint = start.sampling.constraint
        return None if constraint is None else self.constraints.matcher(constraint, start.tokens[start.prompt_tokens :])

    def _run_chunk(self, chunk: Chunk, rows: _Rows) -> None:
        slot = self._slots.get(chunk.slot)
        if slot is None or slot.epoch != chunk.epoch:
            rows.add(chunk.slot, chunk.epoch, RowOutcome.NOTHING_EMPTY_SLOT, [], 0)
        elif not self._write(slot, chunk.begin, chunk.end):
            rows.add(chunk.slot, chunk.epoch, RowOutcome.NOTHING_OUT_OF_BLOCKS, [], len(slot.tokens))
        elif not chunk.samples:
            rows.add(chunk.slot, chunk.epoch, RowOutcome.NOTHING_CHUNK_UNFINISHED, [], len(slot.tokens))
            self._report_prompt(slot, chunk, rows)
        else:
            token = self._next_token(slot)
            outcome = RowOutcome.CONSTRAINT_FAILED if token is None else RowOutcome.TOKENS
            rows.add(chunk.slot, chunk.epoch, outcome, [] if token is None else [token], len(slot.tokens))
            self._report(slot, rows)
            self._report_prompt(slot, chunk, rows)

    def _run_decodes(self, decodes: list[tuple[int, int]]) -> dict[int, _Decoded]:
        """By slot."""
        turns = decodes if self._is_late is None else sorted(decodes, key=self._steps_sat_out, reverse=True)
        return {slot_id: self._run_decode(slot_id, epoch) for slot_id, epoch in turns}

    def _steps_sat_out(self, decode: tuple[int, int]) -> int:
        slot = self._slots.get(decode[0])
        return 0 if slot is None else slot.sat_out

    def _run_decode(self, slot_id: int, epoch: int) -> _Decoded:
        slot = self._slots.get(slot_id)
        if slot is None or slot.epoch != epoch:
            return RowOutcome.NOTHING_EMPTY_SLOT, [], 0
        if self._has_no_time(slot):
            slot.sat_out += 1
            return RowOutcome.SAT_OUT, [], len(slot.tokens)
        slot.sat_out = 0
        yielded: list[int] = []
        room = slot.limit - len(slot.tokens)
        burst = self.shape.burst if slot.sampling.constraint is None else self.shape.burst_max
        while len(yielded) < room and self._write(slot, len(slot.tokens) - 1, len(slot.tokens)):
            token = self._next_token(slot)
            if token is None:
                break
            yielded.append(token)
            if len(yielded) >= 1 + _mix(yielded[0]) % burst or self._has_no_time(slot):
                break
        missing = RowOutcome.CONSTRAINT_FAILED if slot.has_failed else RowOutcome.NOTHING_OUT_OF_BLOCKS
        return RowOutcome.TOKENS if yielded else missing, yielded, len(slot.tokens)

    def _has_no_time(self, slot: _Slot) -> bool:
        """Whether there is no time for the slot's next mask; without a constraint it has none."""
        return self._is_late is not None and slot.matcher is not None and self._is_late()

    def _report(self, slot: _Slot, rows: _Rows) -> None:
        """Add log-probabilities if requested. A token's is minus its id, so that a misplaced one is noticed."""
        if slot.sampling.logprobs is not None:
            rows.add_logprobs(slot.sampling.logprobs, self.vocabulary)

    def _report_prompt(self, slot: _Slot, chunk: Chunk, rows: _Rows) -> None:
        """The same for the prompt tokens that this chunk's logits predict."""
        begin, end = chunk.begin + 1, min(chunk.end + 1, slot.prompt_tokens)
        if slot.sampling.prompt_logprobs is not None and begin < end:
            rows.add_prompt_logprobs(begin, slot.tokens[begin:end], slot.sampling.prompt_logprobs, self.vocabulary)

    def _write(self, slot: _Slot, begin: int, end: int) -> bool:
        """Fill the cells of positions [begin, end); False, and nothing written, where a block is missing."""
        size = self.shape.block_size
        if end > len(slot.table) * size:
            return False
        cell = int(self._cells[slot.table[(begin - 1) // size], (begin - 1) % size]) if begin else _EMPTY_PREFIX
        for position in range(begin, end):
            cell = _cell(cell, slot.tokens[position])
            self._cells[slot.table[position // size], position % size] = cell
        if self._layers > 1 and end - begin == 1:  # a decode
            self._pool[slot.table[begin // size], 1:, begin % size] = self._masks ^ np.uint64(cell)
        elif self._layers > 1:
            positions = np.arange(begin, end)
            blocks, offsets = np.array(slot.table)[positions // size], positions % size
            self._pool[blocks, 1:, offsets] = self._cells[blocks, offsets][:, None] ^ self._masks
        return True

    def _next_token(self, slot: _Slot) -> int | None:
        """Draw the next token of the slot and append it; None if its constraint fails."""
        length = len(slot.tokens)
        used = slot.table[: -(-length // self.shape.block_size)]
        cells = self._cells[used].reshape(-1)[:length]
        total = self._sum_of(slot, cells)
        if self._layers > 1 and not self._layers_agree(used, cells):
            total ^= _ODD_C
        token = None
        if not slot.has_failed:
            outputs = slot.tokens[slot.prompt_tokens :]
            with contextlib.suppress(ConstraintError):
                token = _draw(total, slot.sampling, outputs, self.vocabulary, slot.matcher)
        if token is None:
            slot.has_failed = True
            return None
        self._take(slot, token)
        return token

    def _take(self, slot: _Slot, token: int) -> None:
        _consume(slot.matcher, token)
        slot.tokens.append(token)

    def _sum_of(self, slot: _Slot, cells: npt.NDArray[np.uint64]) -> int:
        """The sum over all cells, which were read back: those that are as they were at the last draw count as they did."""
        read, total, known = cells.tobytes(), slot.total, len(slot.read) // cells.itemsize
        if known and read.startswith(slot.read):
            for position, cell in enumerate(cells[known:].tolist(), start=known):
                total += _summand(cell, position)
            total &= _MASK
        else:
            total = int(np.add.reduce(_mix_array(cells ^ self._salts[: len(cells)])))
        slot.read, slot.total = read, total
        return total

    def _layers_agree(self, used: list[int], cells: npt.NDArray[np.uint64]) -> bool:
        above = self._pool[used, 1:].transpose(1, 0, 2).reshape(self._layers - 1, -1)[:, : len(cells)]
        return 0 not in (above ^ self._masks[:, None] == cells).tobytes()


class _Rows:
    """Collects the rows of a StepResult."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._epochs: list[int] = []
        self._outcomes: list[int] = []
        self._counts: list[int] = []
        self._known: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []

    def add(self, slot: int, epoch: int, outcome: RowOutcome, tokens: list[int], known: int) -> None:
        self._slots.append(slot)
        self._epochs.append(epoch)
        self._outcomes.append(outcome)
        self._counts.append(len(tokens))
        self._known.append(known)
        self._tokens.extend(tokens)

    def add_logprobs(self, alternatives: int, vocabulary: int) -> None:
        """Add log-probabilities to the row that was added last."""
        count = self._counts[-1]
        if count:
            lines = _lines_of(self._tokens[-count:], alternatives, vocabulary)
            self._logprobs.append(Logprobs(len(self._counts) - 1, *lines))

    def add_prompt_logprobs(self, begin: int, tokens: list[int], alternatives: int, vocabulary: int) -> None:
        """The same for tokens of its prompt from position `begin` on. Each token is the most likely one."""
        chosen, top_ids, top = _lines_of(tokens, alternatives, vocabulary)
        ranks = np.ones(len(tokens), dtype=np.int32)
        self._prompt_logprobs.append(PromptLogprobs(len(self._counts) - 1, begin, chosen, ranks, top_ids, top))

    def result(self, step: int) -> StepResult:
        slots: Int32s = np.array(self._slots, dtype=np.int32)
        tokens: Tokens = np.array(self._tokens, dtype=np.int32)
        return StepResult(
            step=step,
            slots=slots,
            epochs=np.array(self._epochs, dtype=np.int64),
            outcomes=np.array(self._outcomes, dtype=np.int8),
            counts=np.array(self._counts, dtype=np.int32),
            tokens=tokens,
            known=np.array(self._known, dtype=np.int64),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )


def _lines_of(given: list[int], alternatives: int, vocabulary: int) -> tuple[Float32s, Int32s, Float32s]:
    tokens = np.array(given, dtype=np.int32)
    after = np.arange(min(alternatives, vocabulary), dtype=np.int32)
    chosen = -tokens.astype(np.float32)
    return chosen, (tokens[:, None] + after) % vocabulary, chosen[:, None] - after.astype(np.float32)
