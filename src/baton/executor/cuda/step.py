"""One step: from a plan to kernels, and from the device's report to a StepResult.

    plan ─▶ slots change (stops, copies, starts, grows) ─▶ rows are chosen ─▶ forward ─▶ draw ─▶ advance ─▶ report

At launch the host knows the epoch of each slot and which chunks fit. Whether a decode has a block and how many tokens it
yields is in the report (see `report`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import triton

from baton.core.engine.plan import NO_INT32S, NO_INT64S, Int32s, Int64s, Logprobs, RowOutcome, StepPlan, StepResult
from baton.core.engine.request import PromptLogprobs
from baton.core.errors import InvariantViolated
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints
from baton.executor.contract import ExecutorShape, KvView
from baton.executor.cuda.attention import chunk_queries
from baton.executor.cuda.chunks import ChunkArrays, MixedSize, lay_out_chunks
from baton.executor.cuda.drafted_runner import DraftedRunner, rows_most
from baton.executor.cuda.forced_tokens import RowLayout
from baton.executor.cuda.kernels_steps import DRY, RUNS, SITS_OUT, advance
from baton.executor.cuda.masked_draws import DrawnSlots, MaskedDraws
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.report import ReportShape, read_report
from baton.executor.cuda.runner import LogitRows, ModelRunner, named_chunks
from baton.executor.cuda.sampling import DeviceSampler
from baton.executor.cuda.slots import DeviceSlots
from baton.executor.cuda.staging import StepDownload, StepDownloads, StepUploads
from baton.executor.drafts import DraftTokens
from baton.executor.final_hidden import FinalHidden
from baton.executor.model_loading import LoadedModel
from baton.executor.packing import FeedRange
from baton.executor.prompt_scores import PromptScorer, ScoredRange
from baton.executor.sampling import Sampler
from baton.executor.slot_table import SlotTable
from baton.executor.step_results import ResultRows, begin_rows, joined_logprobs

Written = Callable[[int], None]
NOTHING_DRAWN = DrawnSlots(NO_INT32S, NO_INT32S, NO_INT64S)


@dataclass(slots=True)
class _Work:
    feeds: list[FeedRange] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    """Row of the result for each chunk that samples."""
    decode_slots: Int32s = field(default_factory=lambda: NO_INT32S)
    """The slots that decode, with the spare slot in place of those that cannot."""
    decode_rows: Int32s = field(default_factory=lambda: NO_INT32S)
    held: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    failed_rows: dict[int, int] = field(default_factory=dict)
    """Rows of the result for which no token may be drawn, and how many tokens come before that."""
    feed_rows: list[int] = field(default_factory=list)
    """Row of the result for each chunk."""
    scored: list[ScoredRange] = field(default_factory=list)
    """Prompt tokens whose log-probabilities are asked for."""
    size: MixedSize | None = None
    """The size to which a step with chunks is padded."""
    drawn: DrawnSlots = NOTHING_DRAWN
    is_constrained: bool = False
    """Some row that is drawn has a constraint."""
    needs_host: bool = False
    """The host's sampler draws."""
    left: Int32s = field(default_factory=lambda: NO_INT32S)
    """Forced tokens that each decode should find planned."""
    layout: RowLayout | None = None
    """The rows of decodes, where some may be fed what their grammar forces."""

    @property
    def draws(self) -> bool:
        return bool(self.sampled_rows) or len(self.decode_slots) > 0

    @property
    def tokens(self) -> int:
        """Tokens of chunks."""
        return sum(feed.end - feed.begin for feed in self.feeds)

    @property
    def rows(self) -> int:
        """Sequences of the forward that decode: where there is a layout each of its rows is one."""
        return len(self.decode_slots) if self.layout is None else len(self.layout.cells)

    def note_failed(self, row: int, chunk_rows: int) -> None:
        """No token may be drawn for a row of the draw, of which the first `chunk_rows` are of chunks."""
        if row < chunk_rows:
            self.failed_rows[self.sampled_rows[row]] = 0
        else:
            first_rows = self.drawn.first_rows
            sequence = int(np.searchsorted(first_rows, row - chunk_rows, side="right")) - 1
            self.failed_rows[int(self.decode_rows[sequence])] = row - chunk_rows - int(first_rows[sequence])


class LaunchedStep:
    """A step in flight. `result` waits for it."""

    def __init__(self, make: Callable[[Int32s], StepResult], told: StepDownload) -> None:
        self._make = make
        self._told = told

    def result(self) -> StepResult:
        return self._make(self._told.wait())


class StepRunner:
    def __init__(
        self,
        loaded: LoadedModel,
        shape: ExecutorShape,
        slots: DeviceSlots,
        pool: CudaPool,
        runner: ModelRunner,
        invariant: bool,
        step_tokens: int,
        constraints: CompiledConstraints = NO_CONSTRAINTS,
    ) -> None:
        device = slots.known.device
        self.runner = runner
        self._shape, self._slots, self._pool = shape, slots, pool
        self._step_tokens = step_tokens
        self._tile_queries = chunk_queries(invariant)
        self._host = SlotTable(shape)
        """The slots as plans describe them, without the progress of decodes."""
        rows = shape.slots + rows_most(shape)
        self._sampler = DeviceSampler(shape.slots, loaded.vocabulary, rows, device)
        self._shaping = Sampler(shape.slots, loaded.vocabulary, device, constraints)
        """Samples the rows that the device's sampler cannot."""
        capable = bool(constraints.versions)
        self.takes_constraints = capable
        self._masked = MaskedDraws(shape, loaded.vocabulary, rows, self._shaping.matchers, device, capable)
        self.drafted: DraftedRunner | None = None
        """For steps in which some decode may be fed what its grammar forces; None where that is never done."""
        if self._masked.forced is not None:
            propose = runner.propose
            self.drafted = DraftedRunner(
                loaded, shape, slots, pool, runner.scratch, step_tokens, self._masked.forced, propose
            )
        self.masks_all = False
        """Draw as if some row had a constraint in every step; for compiling."""
        self.forces_all = False
        """Give every decode rows for forced tokens; for compiling."""
        self._scorer = PromptScorer(loaded.vocabulary, device)
        self._hidden = FinalHidden(loaded.model)
        self._drawn = torch.zeros(rows, dtype=torch.int32, device=device)
        self._cells = torch.zeros(shape.slots * shape.burst_max, dtype=torch.int32, device=device)
        """What was drawn, where there is a layout, in the cells of decodes."""
        self._uploads = StepUploads(8 * step_tokens + 32 * shape.slots, device)
        self._downloads = StepDownloads(shape.slots * (8 + shape.burst_max), device)
        self._decoding: Int32s | None = None
        """The contents of `decode_slots` on the device."""

    @property
    def kv(self) -> KvView:
        return self._pool.view

    def release(self) -> None:
        self._shaping.close()
        self._pool.release()

    def launch(self, plan: StepPlan, written: Written | None) -> LaunchedStep:
        rows = begin_rows(plan)
        told = self._downloads.next()
        self._change_slots(plan, rows, told)
        work = self._choose(plan, rows)
        if work.feeds and written is None and not work.scored:  # a captured step cannot report layers or keep its states
            work.size = self._runner_of(work).mixed_size(len(work.feeds), work.tokens, work.rows)
        logprobs: list[Logprobs] = []
        prompts: tuple[PromptLogprobs, ...] = ()
        runner, sequences = self._runner_of(work), self._set_decodes(work)
        decodes = sequences if work.layout is None else self.runner.bucket(len(work.decode_slots))
        shape = ReportShape(len(plan.stops), len(work.sampled_rows), decodes, runner.width)
        if work.feeds or len(work.decode_slots):
            if work.is_constrained and not work.needs_host:
                self._masked.propose(runner.propose, runner.decode_slots[:decodes], runner.width - 1, work.drawn)
            with self._hidden.kept() if work.scored else nullcontext():
                drawn = self._forward(work, sequences, written)
            if work.draws:
                logprobs = self._draw(drawn, work)
            if work.scored:  # waits for the device
                prompts = self._scorer.score(work.scored, lambda rows: self._hidden.logits(rows).float())
                self._hidden.drop()
            self._advance(work, shape, drawn.chunk_rows, told)
        report = self._downloads.fetch(shape.words)
        if work.is_constrained:
            failed = {int(rows.slots[row]): before for row, before in work.failed_rows.items()}
            self._masked.expect(report, shape, work.drawn, self._host.epochs, failed, is_recorded=work.needs_host)
        return LaunchedStep(lambda words: self._answer(plan, rows, work, shape, words, logprobs, prompts), report)

    def _change_slots(self, plan: StepPlan, rows: ResultRows, told: torch.Tensor) -> None:
        if plan.stops:
            self._stop(plan, rows, told)
        for copy in plan.copies:
            self._pool.copy(copy.source, copy.target)
        for start in plan.starts:
            self._host.start(start)
            self._sampler.start(start.slot, start.sampling)
            self._shaping.start(start.slot, start.tokens, start.prompt_tokens, start.sampling)
            self._masked.start(start.slot, len(start.tokens))
            self._scorer.start(start.slot, start.tokens, start.prompt_tokens, start.sampling)
        if plan.starts:
            self._slots.start(plan.starts, self._shape.context_tokens)
        self._host.grow(plan.grow_slots, plan.grow_at, plan.grow_blocks)
        self._slots.grow(plan.grow_slots, plan.grow_at, plan.grow_blocks)

    def _stop(self, plan: StepPlan, rows: ResultRows, told: torch.Tensor) -> None:
        """Read the known tokens of stopped slots before the slots are reused."""
        for row, stop in enumerate(plan.stops):
            if self._host.holds(stop.slot, stop.epoch):
                rows.outcomes[row] = RowOutcome.PREEMPTED
                self._host.stop(stop.slot)
                self._shaping.stop(stop.slot)
                self._scorer.stop(stop.slot)
        (named,) = self._uploads.send([np.clip(rows.slots[: len(plan.stops)], 0, self._shape.slots)])
        torch.index_select(self._slots.known, 0, named, out=told[: len(plan.stops)])

    def _choose(self, plan: StepPlan, rows: ResultRows) -> _Work:
        work = _Work()
        for row, chunk in enumerate(plan.chunks, start=len(plan.stops)):
            if not self._host.holds(chunk.slot, chunk.epoch):
                continue
            outcome = self._host.judge(chunk)
            rows.outcomes[row] = outcome
            rows.known[row] = self._host.known[chunk.slot]
            if outcome is RowOutcome.NOTHING_OUT_OF_BLOCKS:
                continue
            samples = chunk.samples and bool(self._host.known[chunk.slot] < self._host.limits[chunk.slot])
            work.feeds.append(FeedRange(chunk.slot, chunk.begin, chunk.end, samples))
            work.feed_rows.append(row)
            self._host.computed[chunk.slot] = max(chunk.end, int(self._host.computed[chunk.slot]))
            self._host.starved[chunk.slot] = False
            if samples:
                work.sampled_rows.append(row)
                self._host.known[chunk.slot] += 1
        work.scored = self._scorer.ranges(work.feeds, work.feed_rows)
        self._choose_decodes(plan, rows, work)
        sampled = np.array([feed.slot for feed in work.feeds if feed.samples], dtype=np.int32)
        count = len(work.decode_slots)
        work.drawn = DrawnSlots(sampled, work.decode_slots, np.arange(count, dtype=np.int64) * self._shape.burst)
        work.is_constrained = self._masked.concern(work.drawn)
        work.needs_host = self._sampler.needs_host(work.drawn.all)
        self._lay_out_forced(work)
        return work

    def _lay_out_forced(self, work: _Work) -> None:
        """Give decodes rows for what their grammars force, if some have it planned."""
        forced, count = self._masked.forced, len(work.decode_slots)
        if forced is None or self.drafted is None or work.needs_host or not count:
            return
        left = np.full(count, self._shape.burst_max - 1, np.int32) if self.forces_all else forced.left(work.decode_slots)
        if left.any():
            work.left, work.layout = left, forced.lay_out(left, self.drafted.rows_max)
            work.drawn = replace(work.drawn, first_rows=work.layout.first_rows)

    def _runner_of(self, work: _Work) -> ModelRunner:
        return self.runner if work.layout is None or self.drafted is None else self.drafted

    def _choose_decodes(self, plan: StepPlan, rows: ResultRows, work: _Work) -> None:
        table, slots = self._host, plan.decode_slots
        if not len(slots):
            return
        first = len(plan.stops) + len(plan.chunks)
        work.decode_rows = np.arange(first, first + len(slots), dtype=np.int32)
        work.held = table.occupied[slots] & (table.epochs[slots] == plan.decode_epochs)
        gap = work.held & (table.known[slots] - 1 > table.computed[slots])
        if bool((gap & ~table.starved[slots]).any()):
            raise InvariantViolated(f"step {plan.step} decodes a slot whose prefill is not finished")
        rows.outcomes[work.decode_rows[gap]] = RowOutcome.NOTHING_OUT_OF_BLOCKS
        rows.known[work.decode_rows[gap]] = table.known[slots[gap]]
        work.held &= ~gap
        work.decode_slots = slots if work.held.all() else np.where(work.held, slots, self._slots.spare).astype(np.int32)

    def _set_decodes(self, work: _Work) -> int:
        """Upload the slots that decode; returns the sequences of the forward, padded to the number of a captured step."""
        count = work.rows
        if work.size is not None:
            sequences = work.size.sequences
        else:
            sequences = count if work.feeds or not count else self._runner_of(work).bucket(count)
        if work.layout is not None and self.drafted is not None:
            (there,) = self._uploads.send([self.drafted.fill(work.decode_slots, work.left, work.layout)])
            self.drafted.take(there)
            return sequences
        if sequences and self._decoding is not work.decode_slots:  # plans with the same decodes share one array
            filled = np.full(self._shape.slots, self._slots.spare, dtype=np.int32)
            filled[:count] = work.decode_slots
            (there,) = self._uploads.send([filled])
            self.runner.decode_slots.copy_(there)
            self._decoding = work.decode_slots
        return sequences

    def _forward(self, work: _Work, sequences: int, written: Written | None) -> LogitRows:
        if work.feeds:
            return self._mixed(work, self._lay_out(work), sequences, written)
        drawn = self._runner_of(work).decode(sequences)
        if written is not None:
            for layer in range(len(self._pool.layers)):
                written(layer)
        return drawn

    def _mixed(self, work: _Work, chunks: ChunkArrays, sequences: int, written: Written | None) -> LogitRows:
        runner = self._runner_of(work)
        if work.size is None:
            return runner.mixed(named_chunks(self._uploads.send(chunks)), sequences, written)
        (filled,) = self._uploads.send([runner.frame(work.size).fill(chunks)])
        return runner.mixed_filled(work.size, filled)

    def _lay_out(self, work: _Work) -> ChunkArrays:
        if work.tokens > self._step_tokens:
            raise InvariantViolated(f"a step of {work.tokens} tokens, but there is room for {self._step_tokens}")
        return lay_out_chunks(work.feeds, self._host, self._tile_queries)

    def _draw(self, drawn: LogitRows, work: _Work) -> list[Logprobs]:
        out = self._drawn[: len(drawn.slots)]
        if work.is_constrained:
            self._masked.catch_up(self._host.holds)
        if work.needs_host:
            return self._draw_on_host(drawn, out, work)
        table = self._masked.table if work.is_constrained or self.masks_all else None
        if work.is_constrained:
            sent = self._masked.send(work.drawn, drawn.chunk_rows)
            for row in reversed(sent.failed):
                work.note_failed(row, drawn.chunk_rows)
            if len(sent.late):
                self._sit_out(sent.late, self._runner_of(work).codes)
        mode = self._sampler.mode_of(work.drawn.all)
        self._sampler.draw(drawn.logits, drawn.slots, drawn.positions, out, mode, table)
        if work.is_constrained:
            self._masked.done()
        return []

    def _sit_out(self, decodes: Int64s, codes: torch.Tensor) -> None:
        """Nothing of what is drawn for these decodes stands."""
        (named,) = self._uploads.send([decodes.astype(np.int32)])
        at = named.long()
        codes.index_copy_(0, at, torch.where(codes[at] == RUNS, SITS_OUT, codes[at]))

    def _draw_on_host(self, drawn: LogitRows, out: torch.Tensor, work: _Work) -> list[Logprobs]:
        """Draw with the host's sampler, which waits for the device. Only rows that were computed are drawn: padding rows and
        rows without a block, at their limit or without a draft have no position. Rows whose masks are late sit out."""
        sampled_chunks = len(work.sampled_rows)
        slots = drawn.slots.cpu().numpy()
        queries = self.runner.queries
        sequences = (len(slots) - drawn.chunk_rows) // queries
        fed = self.runner.fed[:sequences].cpu().numpy()
        chunks, feeding = np.arange(sampled_chunks), np.flatnonzero(fed > 0)
        positions = drawn.positions.cpu().numpy().astype(np.int64)
        firsts = np.concatenate([chunks, drawn.chunk_rows + feeding * queries])
        self._shaping.prepare(slots[firsts], positions[firsts], self._drafts_fed(sampled_chunks, fed))
        late = feeding[self._shaping.late(slots[firsts], np.arange(len(firsts)) >= sampled_chunks)[sampled_chunks:]]
        if len(late):
            self._sit_out(late, self.runner.codes)
        computed = np.arange(queries) < fed[:, None]
        computed[late] = False
        decodes = np.flatnonzero(computed.reshape(-1))
        real = np.concatenate([chunks, drawn.chunk_rows + decodes])
        rows = torch.from_numpy(real).to(out.device)
        sampled = self._shaping.sample(drawn.logits.index_select(0, rows).float(), slots[real], positions[real])
        for row in reversed(sampled.failed):
            work.note_failed(int(real[row]), drawn.chunk_rows)
        out[rows] = torch.from_numpy(sampled.tokens).to(out.device)
        unfilled = np.concatenate([chunks, sampled_chunks + decodes])
        return [msgspec.structs.replace(line, row=int(unfilled[line.row])) for line in sampled.logprobs]

    def _drafts_fed(self, chunks: int, fed: Int32s) -> DraftTokens:
        """The drafts behind each row that draws first for its slot: none for chunks, then those of the decodes."""
        most = self.runner.queries - 1
        table = self.runner.drafts[: len(fed) * most].view(len(fed), most).cpu().numpy()
        tokens = np.concatenate([np.zeros((chunks, most), dtype=np.int32), table[fed > 0]])
        counts = np.concatenate([np.zeros(chunks, dtype=np.int32), fed[fed > 0] - 1]).astype(np.int32)
        return DraftTokens(tokens, counts)

    def _advance(self, work: _Work, shape: ReportShape, chunk_rows: int, told: torch.Tensor) -> None:
        """Write the drawn tokens into the slots and the report."""
        used, sampled, sequences, queries = shape
        runner, drawn = self._runner_of(work), self._drawn[chunk_rows:]
        if work.layout is not None and self.drafted is not None:
            self.drafted.spread(drawn, work.rows, self._cells)
            drawn = self._cells
        if sampled:
            (named,) = self._uploads.send([work.drawn.sampled])
            _launch_advance(
                self._slots, named, self._drawn, runner.drafts, runner.running, runner.running, sampled, 1,
                told[used:], told[used + sampled :], told[used + 2 * sampled :],
            )  # fmt: skip
            used += 3 * sampled
        if sequences:
            parts = [told[used + part * sequences :] for part in range(5)]
            _launch_advance(
                self._slots, runner.decode_slots, drawn, runner.drafts, runner.codes, runner.fed, sequences, queries,
                parts[4], parts[1], parts[2],
            )  # fmt: skip
            parts[0][:sequences].copy_(runner.codes[:sequences])
            parts[3][:sequences].copy_(runner.fed[:sequences])

    def _answer(
        self,
        plan: StepPlan,
        rows: ResultRows,
        work: _Work,
        shape: ReportShape,
        words: Int32s,
        logprobs: list[Logprobs],
        prompts: tuple[PromptLogprobs, ...],
    ) -> StepResult:
        report = read_report(words, shape)
        stopped = np.flatnonzero(rows.outcomes[: shape.stops] == RowOutcome.PREEMPTED)
        rows.known[stopped] = report.stopped_known[stopped]
        counts = np.zeros(len(rows.slots), dtype=np.int32)
        drafted = np.zeros(len(rows.slots), dtype=np.int32)
        tokens = report.sampled_tokens
        counts[work.sampled_rows] = 1
        if work.failed_rows:
            tokens = tokens[[row not in work.failed_rows for row in work.sampled_rows]]
        rows.known[work.sampled_rows] = report.sampled_known
        sources = [(row, draw, 1) for draw, row in enumerate(work.sampled_rows)]
        if shape.sequences:
            columns = (report.codes, report.counts, report.known, report.fed)
            told = [column[: len(work.decode_rows)] for column in columns]
            yielded = report.tokens[: len(work.decode_rows)]
            held = work.held
            mine = work.decode_rows[held]
            code, count, known, fed = (column[held] for column in told)
            rows.outcomes[mine] = np.where(code == DRY, RowOutcome.NOTHING_OUT_OF_BLOCKS, RowOutcome.TOKENS)
            rows.outcomes[mine[code == SITS_OUT]] = RowOutcome.SAT_OUT
            rows.known[mine] = known
            counts[mine] = count
            drafted[mine] = np.maximum(fed - 1, 0)
            failed = _failed_decodes(work, told[1])
            stands = np.arange(shape.queries) < np.where(held & ~failed, told[1], 0)[:, None]
            tokens = np.concatenate([tokens, yielded[stands]])
            if logprobs:
                places = enumerate(work.decode_rows.tolist())
                sources += [(row, shape.sampled + nth * shape.queries, int(counts[row])) for nth, row in places]
        for row, before in work.failed_rows.items():
            if counts[row] > before:
                rows.outcomes[row], counts[row] = RowOutcome.CONSTRAINT_FAILED, 0
        return StepResult(
            step=plan.step,
            slots=rows.slots,
            epochs=rows.epochs,
            outcomes=rows.outcomes,
            counts=counts,
            tokens=tokens.astype(np.int32),
            known=rows.known,
            logprobs=_placed(logprobs, sources) if logprobs else (),
            drafted=drafted if self._shape.burst_max > 1 else NO_INT32S,
            prompt_logprobs=prompts,
        )


def _failed_decodes(work: _Work, counts: Int32s) -> npt.NDArray[np.bool_]:
    """Which decodes would yield a token that was drawn although none may be."""
    befores = [work.failed_rows.get(row) for row in work.decode_rows.tolist()]
    pairs = zip(befores, counts.tolist(), strict=True)
    return np.array([before is not None and count > before for before, count in pairs], dtype=np.bool_)


def _placed(lines: list[Logprobs], sources: list[tuple[int, int, int]]) -> tuple[Logprobs, ...]:
    """`sources`: (row of the result, its first drawn row, how many of those are accepted)."""
    row_of = {first + nth: row for row, first, count in sources for nth in range(count)}
    return joined_logprobs([msgspec.structs.replace(line, row=row_of[line.row]) for line in lines if line.row in row_of])


def _launch_advance(
    slots: DeviceSlots,
    named: torch.Tensor,
    drawn: torch.Tensor,
    drafts: torch.Tensor,
    codes: torch.Tensor,
    fed: torch.Tensor,
    sequences: int,
    queries: int,
    yielded: torch.Tensor,
    counts: torch.Tensor,
    afterwards: torch.Tensor,
) -> None:
    advance[(1,)](
        named, drawn, drafts, codes, fed, slots.tokens, slots.known, slots.limits, yielded, counts, afterwards, sequences,
        slots.tokens.stride(0), SEQUENCES=max(16, triton.next_power_of_2(sequences)), QUERIES=queries,
        QUERIES_PADDED=triton.next_power_of_2(queries), num_warps=8,
    )  # fmt: skip
