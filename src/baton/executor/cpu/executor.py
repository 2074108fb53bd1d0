"""The executor on torch and CPU: runs StepPlans in order on one thread of its own.

Owns the model, the KV pool and the slot table, and implements `core.engine.plan`: stops, copies, starts and grows in that
order, then one packed forward for all chunks and decodes, then one outcome for each stop, chunk and decode. A sampled token
is in the table at once, so the next decode needs nothing from the scheduler. Where decodes may yield several tokens, drafts
of a proposer are fed too, and the accepted ones are yielded (see `drafts`); the KV of rejected ones is overwritten by the
next decode. Knows nothing of requests, caches or clients.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from baton.core.config import BadConfig
from baton.core.engine.plan import (
    NO_INT32S,
    NO_INT64S,
    Chunk,
    Int32s,
    Int64s,
    Logprobs,
    RowOutcome,
    Start,
    StepPlan,
    StepResult,
    Stop,
)
from baton.core.engine.request import NO_TOKENS, PromptLogprobs, Sampling, Tokens, frozen_tokens
from baton.core.errors import InvariantViolated
from baton.core.start_stage import OnStage, no_stages
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints, MakeBackends, no_backends
from baton.executor.contract import Allocate, ExecutorShape, KvView, LayerDone, zeroed
from baton.executor.cpu.native_attention import NativeAttention, can_serve
from baton.executor.cpu.native_kernels import LANES, NativeKernels, load_kernels
from baton.executor.cpu.packed_modules import weight_bytes, weight_formats
from baton.executor.cpu.quantising import FORMATS, quantise_model
from baton.executor.drafts import DraftProposer, DraftTokens, NaiveProposer, accepted_drafts, drafts_of, no_drafts
from baton.executor.final_hidden import FinalHidden
from baton.executor.fingerprint import fingerprint_model
from baton.executor.gguf_folder import gguf_in
from baton.executor.kv_pool import KvPool, blocks_for_memory, kv_bytes_per_block
from baton.executor.layer_probe import fuse_model
from baton.executor.model_loading import DTYPES, LoadedModel, forward, load_model
from baton.executor.packing import FeedRange, PackedBatch, pack
from baton.executor.paged_attention import AttentionContext, GatherAttention
from baton.executor.prompt_scores import PromptScorer, ScoredRange
from baton.executor.sampling import Sampler
from baton.executor.slot_table import NO_BLOCK, SlotTable
from baton.executor.step_results import ResultRows, begin_rows, joined_logprobs

log = logging.getLogger(__name__)

ATTENTIONS = ("auto", "gather", "native")
DEFAULT_KV_MEMORY_BYTES = 2 * 1024**3
NICENESS = 5
"""Niceness added to the computing threads."""
NOTHING_RAN = 0
"""The `base_step` of the first plan of an executor."""
TRIED_TOKENS = 64
"""Tokens of the step that is tried at the start."""
NAIVE = NaiveProposer()


@dataclass(frozen=True, slots=True)
class _Work:
    """The part of a plan that can be computed."""

    chunks: list[FeedRange]
    decode_slots: Int32s
    drafts: DraftTokens
    """Drafts of the decodes."""
    rows: Int32s
    """Row of the result for each sequence that samples: chunks, then decodes."""
    scored: list[ScoredRange]
    """Prompt tokens whose log-probabilities are asked for."""

    @property
    def slots(self) -> Int32s:
        """The slot of each sequence that samples."""
        chunk_slots = np.array([feed.slot for feed in self.chunks if feed.samples], dtype=np.int32)
        return np.concatenate([chunk_slots, self.decode_slots]).astype(np.int32)

    @property
    def first_decode(self) -> int:
        """Index of the first decode among the sequences that sample."""
        return len(self.rows) - len(self.decode_slots)

    @property
    def all_drafts(self) -> DraftTokens:
        """Drafts of each sequence that samples."""
        chunks = np.zeros((self.first_decode, self.drafts.tokens.shape[1]), dtype=np.int32)
        counts = np.concatenate([np.zeros(self.first_decode, dtype=np.int32), self.drafts.counts])
        return DraftTokens(np.concatenate([chunks, self.drafts.tokens]), counts)

    @property
    def draws(self) -> Int32s:
        """Number of tokens drawn for each sequence that samples."""
        return np.concatenate([np.ones(self.first_decode, dtype=np.int32), 1 + self.drafts.counts])


@dataclass(frozen=True, slots=True)
class _Yield:
    """The tokens of the sequences that sample, in their order."""

    tokens: Tokens
    """The tokens of all sequences, concatenated."""
    counts: Int32s
    logprobs: tuple[Logprobs, ...]
    """`row` is the index of the sequence."""
    sat_out: Int64s
    """Indexes of the sequences whose masks were late."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """`row` is that of the result."""


NOTHING = _Yield(NO_TOKENS, NO_INT32S, (), NO_INT64S)


class TorchCpuExecutor:
    def __init__(
        self,
        loaded: LoadedModel,
        shape: ExecutorShape,
        fingerprint: bytes,
        kernels: NativeKernels | None,
        thread: ThreadPoolExecutor,
        allocate: Allocate = zeroed,
        proposer: DraftProposer = NAIVE,
        constraints: CompiledConstraints = NO_CONSTRAINTS,
        is_batch_invariant: bool = False,
        formats: Sequence[str] = (),
    ) -> None:
        """With `kernels` attention is native, without them gathered; the pool's layout depends on which.

        `is_batch_invariant` says that they compute the whole model, so that a row has the same bits in every batch.
        `formats` are those of quantised weights.
        `proposer` is used only where the shape allows more than one token per decode, `constraints` where a request has one.
        """
        self.shape = shape
        self.vocabulary = loaded.vocabulary
        self.fingerprint = fingerprint
        self.kv_bytes_per_block = kv_bytes_per_block(loaded.layers, shape.block_size, loaded.dtype)
        self.details = ", ".join(["CPU", *(["batch-invariant"] if is_batch_invariant else []), *_told(formats)])
        self.weight_bytes = weight_bytes(loaded.model)
        self._model = loaded.model
        self._kernels = kernels
        self._logits_dtype = torch.float64 if loaded.dtype == torch.float64 else torch.float32
        self._slots = SlotTable(shape)
        self._kv = KvPool(loaded.layers, shape.blocks, shape.block_size, loaded.dtype, allocate)
        self.on_layer: LayerDone | None = None
        self.constraints = constraints
        """Its backends for constraints, and what they have compiled."""
        self._sampler = Sampler(shape.slots, loaded.vocabulary, torch.device("cpu"), constraints)
        self._scorer = PromptScorer(loaded.vocabulary, torch.device("cpu"))
        self._hidden = FinalHidden(loaded.model)
        self._proposer = proposer
        self._last_step = NOTHING_RAN
        self._in_doubt = False
        self._thread = thread
        self._launched: deque[Future[StepResult]] = deque()

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "bfloat16",
        slots: int = 64,
        block_size: int = 32,
        blocks: int | None = None,
        kv_memory_bytes: int = DEFAULT_KV_MEMORY_BYTES,
        context_tokens: int | None = None,
        attention: str = "auto",
        quantization: str = "auto",
        batch_invariant: bool = False,
        allocate: Allocate = zeroed,
        burst: int = 1,
        proposer: DraftProposer = NAIVE,
        constrained_burst: int = 0,
        backends: MakeBackends = no_backends,
        on_stage: OnStage = no_stages,
    ) -> TorchCpuExecutor:
        """Load a model folder. `blocks` overrides `kv_memory_bytes`; the context defaults to the model's own. `backends`
        makes those for constraints from the size of the vocabulary. `on_stage` is called by one thread at a time.
        `batch_invariant` raises BadConfig where the kernels do not have the whole model; where they have it, a row has the
        same bits in every batch anyway. `quantization`: a GGUF file's weights stay as they are (auto) or become floats
        (none); those of safetensors stay floats (auto, none) or are quantised (int8, int4)."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-executor")
        try:
            asked = _Asked(path, dtype, attention, quantization, block_size, context_tokens)
            prepared = thread.submit(_prepare, asked, on_stage).result()
            loaded, kernels, is_invariant = prepared.loaded, prepared.kernels, prepared.is_invariant
            if batch_invariant and not is_invariant and loaded.dtype is not torch.float64:
                raise BadConfig(
                    f"--batch-invariant cannot be had here for {loaded.model.config.model_type}: a part of it is left to "
                    "torch (the log says which, at level info); --dtype float64 makes answers exact"
                )
        except BaseException:
            thread.shutdown(wait=True)
            raise
        bytes_per_block = kv_bytes_per_block(loaded.layers, block_size, loaded.dtype)
        shape = ExecutorShape(
            slots=slots,
            blocks=blocks_for_memory(kv_memory_bytes, bytes_per_block, block_size) if blocks is None else blocks,
            block_size=block_size,
            context_tokens=min(context_tokens or loaded.context_tokens, loaded.context_tokens),
            burst=burst,
            constrained_burst=constrained_burst,
        )
        layout = f"block outermost, {'gathered' if kernels is None else 'native'}, block_size={block_size}"
        if prepared.formats:
            layout += f", weights {_digest(prepared.formats)}"
        constraints = CompiledConstraints(backends(loaded.vocabulary))
        fingerprint = fingerprint_model(path, dtype, layout)
        formats = sorted({form for _, form in prepared.formats})
        return cls(loaded, shape, fingerprint, kernels, thread, allocate, proposer, constraints, is_invariant, formats)

    @property
    def kv(self) -> KvView:
        return self._kv.view

    def try_step(self, step_tokens: int) -> int:
        """Compute TRIED_TOKENS tokens and return how many microseconds `step_tokens` may take. Before the first launch."""
        tokens = min(TRIED_TOKENS, self.shape.context_tokens - 1, self.shape.blocks * self.shape.block_size, step_tokens)
        if tokens < 1:
            return 0
        blocks = np.arange(-(-tokens // self.shape.block_size), dtype=np.int32)
        ids = frozen_tokens(np.zeros(tokens, dtype=np.int32))
        start = Start(0, 1, ids, tokens, 0, self.shape.context_tokens, Sampling(seed=0, temperature=0.0), blocks)
        plan = StepPlan(0, 0, starts=(start,), chunks=(Chunk(0, 1, 0, tokens, samples=False),))
        began_s = time.perf_counter()
        self._thread.submit(self._try, plan).result()
        took_us = (time.perf_counter() - began_s) * 1e6
        self._thread.submit(self._try, StepPlan(0, 0, stops=(Stop(0, 1),))).result()
        return round(took_us * max(1.0, step_tokens / tokens))

    @torch.inference_mode()
    def _try(self, plan: StepPlan) -> None:
        self._step(plan)

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(self._thread.submit(self._run, plan))

    def collect(self) -> StepResult:
        if not self._launched:
            raise InvariantViolated("collect without a launched step would wait for ever")
        return self._launched.popleft().result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._sampler.close()
        self._kv.release()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        if self._in_doubt:
            raise InvariantViolated(f"step {plan.step} follows one that failed; what the slots hold is unknown")
        if plan.base_step != self._last_step:
            raise InvariantViolated(
                f"step {plan.step} builds on {plan.base_step}, but the last one here was {self._last_step}"
            )
        self._in_doubt = True
        result = self._step(plan)
        self._last_step = plan.step
        self._in_doubt = False
        return result

    def _step(self, plan: StepPlan) -> StepResult:
        answer = begin_rows(plan)
        self._change_slots(plan, answer)
        work = self._choose_work(plan, answer)
        yielded = self._compute(plan.step, work)
        return self._finish_answer(plan, answer, work, yielded)

    def _change_slots(self, plan: StepPlan, answer: ResultRows) -> None:
        for row, stop in enumerate(plan.stops):
            if self._slots.holds(stop.slot, stop.epoch):
                answer.outcomes[row] = RowOutcome.PREEMPTED
                answer.known[row] = self._slots.stop(stop.slot)
                self._sampler.stop(stop.slot)
                self._scorer.stop(stop.slot)
        for copy in plan.copies:
            self._kv.copy(copy.source, copy.target)
        for start in plan.starts:
            self._slots.start(start)
            self._sampler.start(start.slot, start.tokens, start.prompt_tokens, start.sampling)
            self._scorer.start(start.slot, start.tokens, start.prompt_tokens, start.sampling)
        self._slots.grow(plan.grow_slots, plan.grow_at, plan.grow_blocks)

    def _choose_work(self, plan: StepPlan, answer: ResultRows) -> _Work:
        chunks: list[FeedRange] = []
        chunk_rows: list[int] = []
        sampled_rows: list[int] = []
        for row, chunk in enumerate(plan.chunks, start=len(plan.stops)):
            if not self._slots.holds(chunk.slot, chunk.epoch):
                continue
            outcome = self._slots.judge(chunk)
            answer.outcomes[row] = outcome
            if outcome is RowOutcome.NOTHING_OUT_OF_BLOCKS:
                continue
            samples = chunk.samples and bool(self._slots.known[chunk.slot] < self._slots.limits[chunk.slot])
            chunks.append(FeedRange(chunk.slot, chunk.begin, chunk.end, samples))
            chunk_rows.append(row)
            if samples:
                sampled_rows.append(row)
        decode_slots, decode_rows = self._choose_decodes(plan, answer)
        rows = np.concatenate([np.array(sampled_rows, dtype=np.int32), decode_rows])
        return _Work(chunks, decode_slots, self._draft(decode_slots), rows, self._scorer.ranges(chunks, chunk_rows))

    def _choose_decodes(self, plan: StepPlan, answer: ResultRows) -> tuple[Int32s, Int32s]:
        """The slots that can decode and their rows in the result, by array operations: a step may have a thousand."""
        table, slots = self._slots, plan.decode_slots
        first = len(plan.stops) + len(plan.chunks)
        rows = np.arange(first, first + len(slots), dtype=np.int32)
        held = table.occupied[slots] & (table.epochs[slots] == plan.decode_epochs)
        rows, slots = rows[held], slots[held]
        position = table.known[slots] - 1
        gap = position > table.computed[slots]
        if bool((gap & ~table.starved[slots]).any()):
            raise InvariantViolated(f"step {plan.step} decodes a slot whose prefill is not finished")
        dry = gap | (table.table[slots, position // self.shape.block_size] == NO_BLOCK)
        answer.outcomes[rows] = np.where(dry, RowOutcome.NOTHING_OUT_OF_BLOCKS, RowOutcome.TOKENS)
        table.starved[slots[dry]] = True
        runs = ~dry & (table.known[slots] < table.limits[slots])
        return slots[runs], rows[runs]

    def _draft(self, slots: Int32s) -> DraftTokens:
        """Drafts for these slots, as many as their limits and blocks have room for."""
        table, shape = self._slots, self.shape
        forced = self._force(slots)
        if not len(slots) or (shape.burst == 1 and forced is None):
            return no_drafts(len(slots))
        proposed = no_drafts(len(slots))
        if shape.burst > 1:
            proposed = self._proposer.propose(table.tokens, slots, table.known[slots])
        if forced is not None:
            proposed = proposed.instead(forced)
        left = table.limits[slots] - table.known[slots] - 1  # one token is yielded without drafts
        drafts = proposed.cut(np.minimum(left, table.room(slots, shape.burst_max - 1)))
        table.draft(slots, drafts)
        return drafts

    def _force(self, slots: Int32s) -> DraftTokens | None:
        """The tokens that constraints force; None where no slot has a constraint, or only one token may be yielded."""
        held, most = self._sampler.constrained[slots], self.shape.burst_max - 1
        if not most or not held.any():
            return None
        known = self._slots.known[slots].tolist()
        return drafts_of(
            [self._sampler.forced(slot, known[row], most) if held[row] else [] for row, slot in enumerate(slots.tolist())]
        )

    def _compute(self, step: int, work: _Work) -> _Yield:
        if not work.chunks and not len(work.decode_slots):
            return NOTHING
        self._sampler.prepare(work.slots, self._slots.known[work.slots], work.all_drafts)
        batch = pack(self._slots, work.chunks, work.decode_slots, work.drafts.counts)
        with self._hidden.kept() if work.scored else contextlib.nullcontext():
            logits = forward(self._model, batch.ids, batch.positions, batch.logit_rows, self._attention(step, batch))
        self._mark_computed(work)
        yielded = self._draw(logits.to(self._logits_dtype), work) if len(work.rows) else NOTHING
        if work.scored:
            scores = self._scorer.score(work.scored, lambda rows: self._hidden.logits(rows).to(self._logits_dtype))
            yielded = replace(yielded, prompt_logprobs=scores)
            self._hidden.drop()
        self._slots.append(work.slots, yielded.tokens, yielded.counts)
        decoded = work.decode_slots[yielded.counts[work.first_decode :] > 0]
        self._slots.computed[decoded] = self._slots.known[decoded] - 1
        return yielded

    def _draw(self, logits: torch.Tensor, work: _Work) -> _Yield:
        """Draw a token for each row of logits but those of sequences that sit out, and keep the accepted ones."""
        draws = work.draws
        sequences = np.repeat(np.arange(len(draws)), draws)
        nth = np.arange(len(sequences)) - np.repeat(np.cumsum(draws) - draws, draws)
        slots = work.slots[sequences]
        late = self._sampler.late(work.slots, np.arange(len(draws)) >= work.first_decode)
        drawn = np.flatnonzero(~late[sequences])
        here = logits if len(drawn) == len(sequences) else logits[torch.from_numpy(drawn)]
        sampled = self._sampler.sample(here, slots[drawn], (self._slots.known[slots] + nth)[drawn])
        tokens = np.zeros(len(sequences), dtype=np.int32)
        tokens[drawn] = sampled.tokens
        counts = np.ones(len(draws), dtype=np.int32)
        counts[work.first_decode :] += accepted_drafts(tokens[work.first_decode :], work.drafts)
        counts[late] = 0
        for row in drawn[list(reversed(sampled.failed))].tolist():
            counts[sequences[row]] = min(counts[sequences[row]], nth[row])
        stands = nth < counts[sequences]
        lines = [
            msgspec.structs.replace(line, row=int(sequences[drawn[line.row]]))
            for line in sampled.logprobs
            if stands[drawn[line.row]]
        ]
        return _Yield(tokens[stands], counts, joined_logprobs(lines), np.flatnonzero(late))

    def _attention(self, step: int, batch: PackedBatch) -> AttentionContext:
        written = None if self.on_layer is None else partial(self.on_layer, step)
        if self._kernels is None:
            return GatherAttention(batch, self._kv.layers, written)
        return NativeAttention(self._kernels, batch, self._kv.layers, written)

    def _mark_computed(self, work: _Work) -> None:
        for feed in work.chunks:
            self._slots.computed[feed.slot] = max(feed.end, int(self._slots.computed[feed.slot]))
            self._slots.starved[feed.slot] = False
        self._slots.starved[work.decode_slots] = False

    def _finish_answer(self, plan: StepPlan, answer: ResultRows, work: _Work, yielded: _Yield) -> StepResult:
        counts = np.zeros(len(answer.slots), dtype=np.int32)
        counts[work.rows] = yielded.counts
        answer.outcomes[work.rows[yielded.counts == 0]] = RowOutcome.CONSTRAINT_FAILED
        answer.outcomes[work.rows[yielded.sat_out]] = RowOutcome.SAT_OUT
        present = answer.outcomes != RowOutcome.NOTHING_EMPTY_SLOT
        present[: len(plan.stops)] = False
        answer.known[present] = self._slots.known[answer.slots[present]]
        return StepResult(
            step=plan.step,
            slots=answer.slots,
            epochs=answer.epochs,
            outcomes=answer.outcomes,
            counts=counts,
            tokens=yielded.tokens,
            known=answer.known,
            logprobs=tuple(msgspec.structs.replace(line, row=int(work.rows[line.row])) for line in yielded.logprobs),
            drafted=self._drafted(answer, work),
            prompt_logprobs=yielded.prompt_logprobs,
        )

    def _drafted(self, answer: ResultRows, work: _Work) -> Int32s:
        if self.shape.burst_max == 1:
            return NO_INT32S
        drafted = np.zeros(len(answer.slots), dtype=np.int32)
        drafted[work.rows[work.first_decode :]] = work.drafts.counts
        return drafted


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a model is loaded with."""

    path: Path
    dtype: str
    attention: str
    quantization: str
    block_size: int
    context_tokens: int | None

    @property
    def quantised_weights(self) -> bool:
        """Whether there are weights to be kept quantised, or to be quantised."""
        has_file = gguf_in(self.path) is not None
        if self.quantization in FORMATS and has_file:
            raise BadConfig(
                f"--quantization {self.quantization} is for safetensors; a GGUF file keeps its own formats (auto), or its "
                "weights become floats (none)"
            )
        return self.quantization in FORMATS or (self.quantization == "auto" and has_file)


@dataclass(frozen=True, slots=True)
class _Prepared:
    loaded: LoadedModel
    kernels: NativeKernels | None
    """For attention and whole layers."""
    is_invariant: bool
    """Whether they have the whole model."""
    formats: list[tuple[str, str]]
    """Of the quantised weights, by module."""


def _prepare(asked: _Asked, on_stage: OnStage) -> _Prepared:
    """Load the model on the executor's thread, where all computing happens.

    OpenMP keeps a pool of threads for each thread that ever computed in parallel. With two pools on the same cores its
    threads sleep between operations, and every small operation waits for a wake-up.
    """
    _yield_to_others()  # before that pool is created: its threads inherit the niceness
    if asked.attention not in ATTENTIONS:
        raise ValueError(f"attention is one of {', '.join(ATTENTIONS)}, not {asked.attention!r}")
    quantised = asked.quantised_weights
    wanted = (asked.attention != "gather" or quantised) and asked.dtype in DTYPES
    found = load_kernels(DTYPES[asked.dtype], on_stage) if wanted else None
    on_stage("loading the weights")
    loaded = load_model(asked.path, asked.dtype, context_tokens=asked.context_tokens, kernels=found if quantised else None)
    if asked.quantization in FORMATS:
        _quantise(loaded, asked, found)
    formats = weight_formats(loaded.model)
    kernels = _choose_kernels(asked, loaded, found)
    return _Prepared(loaded, kernels, kernels is not None and fuse_model(loaded.model, loaded.layers, kernels), formats)


def _quantise(loaded: LoadedModel, asked: _Asked, kernels: NativeKernels | None) -> None:
    if kernels is None:
        raise BadConfig(f"--quantization {asked.quantization} cannot be had here: it needs the native kernels (see the log)")
    quantise_model(loaded.model, asked.quantization, kernels)


def _digest(formats: Sequence[tuple[str, str]]) -> str:
    return hashlib.blake2b(repr(list(formats)).encode(), digest_size=8).hexdigest()


def _told(formats: Sequence[str]) -> list[str]:
    return [f"weights in {' and '.join(formats)}"] if formats else []


def _yield_to_others() -> None:
    """Raise the niceness of the computing threads. They take all cores; an engine, front end or router that cannot run for
    half a second would be considered lost."""
    if sys.platform == "linux":  # on other systems threads have no niceness of their own
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # where it is forbidden the priority stays as it is
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _choose_kernels(asked: _Asked, loaded: LoadedModel, found: NativeKernels | None) -> NativeKernels | None:
    """The kernels for the requested attention, or for the best available."""
    kernels = None if asked.attention == "gather" else found
    if kernels is not None and not can_serve(loaded.layers, asked.block_size):
        log.info("native attention needs head and block sizes in multiples of %d", LANES)
        kernels = None
    if kernels is None and asked.attention == "native":
        raise BadConfig(f"--attention native cannot be had for {loaded.model.config.model_type} here: the log says why")
    log.info("attention: %s", "gathered by torch" if kernels is None else "native, over blocks in place")
    return kernels
