"""The parts of `baton bench gpu`, each a function from a bench to its rows.

Owns what is measured, at which sizes, and the targets. A part that cannot do its work raises: the process ends with it, and
another one goes on with the parts that are left (see `gpu`). Parts that need the same executor follow one another, so that
it is made once.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from msgspec.structs import replace

from baton.bench.copied_masks import CONSTRAINT, copied_masks
from baton.bench.gpu_floor import (
    GpuRates,
    ModelSizesOnGpu,
    decode_operations,
    floor_s,
    flop_of,
    prefill_operations,
    sizes_of,
)
from baton.bench.gpu_peer import PeerFailed, load_peer, run_peer
from baton.bench.gpu_profile import BETWEEN_STEPS_US, Recorder, Span, attention_us, busiest, idle_share, within
from baton.bench.gpu_rates import measure_rates
from baton.bench.gpu_report import GpuRow, PartResult, StepPoint
from baton.bench.gpu_serve import ClosedLoop, ClosedLoopLoad, ServedTotals, steps_alone_s
from baton.bench.gpu_steps import CannotMeasure, SharedPool, StepTimer, StepTiming, stream
from baton.bench.step_plans import GREEDY
from baton.core.engine.request import Sampling
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.drafts import NaiveProposer, NgramProposer
from baton.executor.kv_pool import kv_bytes_per_block
from baton.executor.model_loading import LoadedModel, load_shape
from baton.executor.model_shapes import ModelShape, note_shape, shape_fields

KV_SHARE = 0.85
"""KV's share of the memory that is free beside the weights."""
DECODE_TARGETS = {1: 1.25, 32: 1.20, 128: 1.20, 256: 1.15}
ATTENTION_TARGET, ATTENTION_BATCH_MIN = 0.85, 32
PREFILL_TARGET = 0.60
SERVE_TARGET = 0.85
IDLE_TARGET = 0.03
NGRAMS = (2, 5)
"""(shortest, longest) n-gram, as in `baton serve`."""


WHOLE_LOAD, SMALL_LOAD = ClosedLoopLoad(256, 1024, 256, 256), ClosedLoopLoad(32, 1024, 64, 32)


class Make(Protocol):
    """Makes an executor of a model."""

    def __call__(
        self, loaded: LoadedModel, shape: ExecutorShape, *, step_tokens: int, attention: str, batch_invariant: bool
    ) -> Executor:
        """Drafts are n-grams when the shape allows drafts. Constraints are those of `copied_masks`."""


def make_on_cuda(
    loaded: LoadedModel, shape: ExecutorShape, *, step_tokens: int, attention: str, batch_invariant: bool
) -> Executor:
    # Imported here because triton is not everywhere, and tests drive other executors.
    from baton.executor.cuda.executor import TorchCudaExecutor

    proposer = NaiveProposer() if shape.burst == 1 else NgramProposer(shape.burst - 1, *NGRAMS)
    return TorchCudaExecutor.of(
        loaded, shape, step_tokens=step_tokens, proposer=proposer, attention=attention, batch_invariant=batch_invariant,
        backends=copied_masks,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of all measurements."""

    shape: str = "qwen3-8b"
    moe_shape: str = "qwen3-30b-a3b"
    families: tuple[str, ...] = ("llama3-8b", "mistral-7b", "gemma2-9b")
    checked: tuple[str, ...] = ("tiny-qwen3", "tiny-llama", "tiny-mistral", "tiny-gemma2", "tiny-qwen3-moe")
    attention: str = "auto"
    dtype: str = "bfloat16"
    slots: int = 256
    block_size: int = 16
    blocks_max: int = 36_000
    blocks_max_others: int = 18_000
    """KV blocks for shapes other than the first, which are measured at fewer sizes."""
    context_tokens: int = 33_024
    step_tokens: int = 8192
    batches: tuple[int, ...] = (1, 32, 128, 256)
    context: int = 1024
    long: tuple[int, int] = (8, 32_768)
    """Batch and context."""
    grid: tuple[tuple[int, int], ...] = (
        (1, 256), (8, 256), (64, 256), (256, 256), (8, 1024), (64, 1024), (1, 4096), (8, 4096), (32, 4096), (128, 4096),
        (1, 16_384), (32, 16_384),
    )  # fmt: skip
    """Further (batch, context) points for the step-time model."""
    prefill_tokens: int = 8192
    prefills: tuple[tuple[int, int, int], ...] = (
        (1, 128, 0), (1, 512, 0), (1, 2048, 0), (4, 512, 0), (16, 128, 0), (1, 512, 8192), (1, 2048, 8192),
    )  # fmt: skip
    load: ClosedLoopLoad = WHOLE_LOAD
    small_load: ClosedLoopLoad = SMALL_LOAD
    """First load of the peer."""
    peer_limit_s: float = 120.0
    draft_tokens: int = 4
    draft_batches: tuple[int, ...] = (1, 32)
    constrained_batch: int = 64
    """Rows, of which every other one has a constraint."""
    live_tokens: int = 4
    """Number of tokens with logits above zero; a small number makes the model repeat itself."""
    profile_steps: int = 12
    idle_from_step: int = 80
    idle_steps: int = 48


@dataclass(slots=True)
class GpuBench:
    """Holds one executor at a time, and the measurements of this run."""

    scale: Scale
    device: str = "cuda"
    make: Make = make_on_cuda
    rates: GpuRates = field(default_factory=lambda: GpuRates(0.0, 0.0))
    said: Callable[[str], None] = print
    _key: tuple[object, ...] | None = None
    _made: SharedPool | None = None

    def sizes(self, shape: str) -> ModelSizesOnGpu:
        return sizes_of(shape_fields(shape))

    def executor(
        self, shape: str, *, burst: int = 1, batch_invariant: bool = False, live_tokens: int | None = None
    ) -> SharedPool:
        """The requested executor; a different one that is open is closed first."""
        key = (shape, burst, batch_invariant, live_tokens)
        if self._made is None or key != self._key:
            self.close()
            self._made, self._key = self._make(shape, burst, batch_invariant, live_tokens), key
        return self._made

    def _make(self, shape: str, burst: int, batch_invariant: bool, live_tokens: int | None) -> SharedPool:
        scale = self.scale
        loaded = load_shape(shape, scale.dtype, self.device)
        if live_tokens is not None:
            head = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                head.weight[live_tokens:].zero_()
        sizes = ExecutorShape(
            slots=scale.slots,
            blocks=self._blocks(loaded, scale.blocks_max if shape == scale.shape else scale.blocks_max_others),
            block_size=scale.block_size,
            context_tokens=min(scale.context_tokens, loaded.context_tokens),
            burst=burst,
        )
        made = SharedPool(
            self.make(
                loaded,
                sizes,
                step_tokens=max(scale.step_tokens, sizes.slots * burst),
                attention=scale.attention,
                batch_invariant=batch_invariant,
            )
        )
        self.said(f"  {shape}: {sizes.blocks} blocks of {sizes.block_size}, burst {burst}, invariant {batch_invariant}")
        StepTimer(made).fill()
        return made

    def _blocks(self, loaded: LoadedModel, most: int) -> int:
        if not torch.cuda.is_available():
            return most
        free_bytes, _ = torch.cuda.mem_get_info()
        block_bytes = kv_bytes_per_block(loaded.layers, self.scale.block_size, loaded.dtype)
        return min(most, int(free_bytes * KV_SHARE) // block_bytes)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        self._made = self._key = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def rates(bench: GpuBench) -> PartResult:
    found = bench.rates
    return PartResult(
        "rates",
        rows=[
            GpuRow("memory read", found.read_bytes_per_s / 1e12, "TB/s"),
            GpuRow("bf16 matrix products", found.matrix_flop_per_s / 1e12, "TFLOP/s"),
        ],
    )


def check(bench: GpuBench) -> PartResult:
    """Compare tokens with the CPU executor in float32, for a tiny model of each family."""
    rows = []
    for name in bench.scale.checked:
        ours = _tokens(GpuBench(_checking(bench.scale, name), bench.device, bench.make, said=bench.said), name)
        theirs = _tokens_on_cpu(bench.scale, name)
        same = sum(a == b for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
        every = sum(len(one) for one in theirs)
        rows.append(GpuRow(f"{name}, float32", same, f"of {every} tokens", "CPU executor", same / every, at_least=1.0))
    return PartResult("check", rows=rows)


CHECK_LOAD = ClosedLoopLoad(4, 130, 24, 4, lengths=(3, 17, 64, 130))
CHECK_BLOCKS, CHECK_CONTEXT, CHECK_STEP_TOKENS = 128, 512, 96
"""A prompt takes several steps, beside decodes of other requests."""


def _checking(scale: Scale, name: str) -> Scale:
    return Scale(
        shape=name, dtype="float32", slots=CHECK_LOAD.at_once, block_size=scale.block_size, blocks_max=CHECK_BLOCKS,
        context_tokens=CHECK_CONTEXT, step_tokens=CHECK_STEP_TOKENS, attention=scale.attention,
    )  # fmt: skip


def _tokens(bench: GpuBench, name: str) -> list[list[int]]:
    try:
        return greedy(bench.executor(name))
    finally:
        bench.close()


def _tokens_on_cpu(scale: Scale, name: str) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        note_shape(Path(folder), ModelShape(name))
        executor = TorchCpuExecutor.load(
            Path(folder), dtype="float32", slots=CHECK_LOAD.at_once, block_size=scale.block_size, blocks=CHECK_BLOCKS,
            context_tokens=CHECK_CONTEXT, attention="gather",
        )  # fmt: skip
        try:
            return greedy(SharedPool(executor))
        finally:
            executor.close()


def greedy(executor: SharedPool) -> list[list[int]]:
    return ClosedLoop(executor, CHECK_LOAD, CHECK_STEP_TOKENS).run().answers()


def decode(bench: GpuBench) -> PartResult:
    scale = bench.scale
    stepper = StepTimer(bench.executor(scale.shape))
    result = PartResult("decode")
    for batch in scale.batches:
        _decode(bench, stepper, scale.shape, batch, scale.context, result, DECODE_TARGETS.get(batch))
    _decode(bench, stepper, scale.shape, *scale.long, result)
    largest = max(scale.batches)
    plain = stepper.decode(largest, scale.context)
    for words, sampling in (
        ("drawn from all", Sampling(seed=1, temperature=1.0)),
        ("top-p 0.9", Sampling(seed=1, temperature=1.0, top_p=0.9)),
        ("top-k 50", Sampling(seed=1, temperature=1.0, top_k=50)),
    ):
        drawn = stepper.decode(largest, scale.context, sampling)
        result.rows.append(_beside(f"batch {largest} × {scale.context:,}, {words}", drawn, "greedy", plain))
    return result


def grid(bench: GpuBench) -> PartResult:
    """Points for the step-time model of the simulator."""
    scale = bench.scale
    stepper = StepTimer(bench.executor(scale.shape))
    result = PartResult("grid")
    for batch, context in scale.grid:
        _decode(bench, stepper, scale.shape, batch, context, result)
    for sequences, tokens, begin in scale.prefills:
        _prefill(bench, stepper, scale.shape, (sequences, tokens, begin), result)
    return result


def prefill(bench: GpuBench) -> PartResult:
    scale = bench.scale
    stepper = StepTimer(bench.executor(scale.shape))
    result = PartResult("prefill")
    whole, eighth = scale.prefill_tokens, scale.prefill_tokens // 8
    _prefill(bench, stepper, scale.shape, (1, whole, 0), result, PREFILL_TARGET)
    _prefill(bench, stepper, scale.shape, (8, eighth, 0), result)
    return result


def attention(bench: GpuBench) -> PartResult:
    """Attention kernels alone: from the profiler, and from the time that a longer context adds to a step."""
    scale, sizes = bench.scale, bench.sizes(bench.scale.shape)
    executor = bench.executor(scale.shape)
    stepper = StepTimer(executor)
    result = PartResult("attention")
    for batch in scale.batches:
        kv_bytes = batch * scale.context * sizes.kv_bytes_per_token
        added_s = stepper.decode(batch, 2 * scale.context).step_s - stepper.decode(batch, scale.context).step_s
        what = f"batch {batch}: {scale.context:,} more of context"
        result.rows.append(_of_read_rate(what, kv_bytes, max(added_s, 1e-9), bench.rates))
        spans = profile_decodes(executor, stepper, batch, scale)
        spent_s = attention_us(spans) / scale.profile_steps / 1e6
        if spent_s:
            wanted = ATTENTION_TARGET if batch >= ATTENTION_BATCH_MIN else None
            what = f"batch {batch} × {scale.context:,}: kernels"
            result.rows.append(_of_read_rate(what, kv_bytes, spent_s, bench.rates, wanted))
        else:
            result.notes.append(f"batch {batch}: the profiler named no kernel that attends")
        table = busiest(spans, scale.profile_steps)
        result.notes.append(f"batch {batch}, kernels by time, each from the end of the one before:\n{table}")
    return result


def profile_decodes(executor: SharedPool, stepper: StepTimer, batch: int, scale: Scale) -> list[Span]:
    plans = list(stepper.decode_plans(batch, scale.context, scale.profile_steps))
    recorder = Recorder()
    recorder.start()
    for _ in stream(executor, iter(plans)):
        pass
    recorder.stop()
    return recorder.spans


def serve(bench: GpuBench) -> PartResult:
    executor = bench.executor(bench.scale.shape)
    served, alone_s = _serve(bench, executor, bench.scale.load)
    row = GpuRow(
        str(bench.scale.load), served.tokens_per_s, "tokens/s", f"steps alone {alone_s:.2f} s",
        alone_s / served.seconds, at_least=SERVE_TARGET,
    )  # fmt: skip
    return PartResult(
        "serve", rows=[row], notes=[f"{len(served.plans)} steps, {served.output_tokens:,} tokens, {served.seconds:.2f} s"]
    )


def _serve(bench: GpuBench, executor: SharedPool, load: ClosedLoopLoad) -> tuple[ServedTotals, float]:
    ClosedLoop(executor, ClosedLoopLoad(load.at_once, 64, 16, load.at_once), bench.scale.step_tokens).run()  # warms up
    served = ClosedLoop(executor, load, bench.scale.step_tokens).run()
    return served, steps_alone_s(executor, served.plans)


def peer(bench: GpuBench) -> PartResult:
    """Run `transformers` with a small load, then with the whole load if the time allows, then Baton with the same."""
    scale = bench.scale
    bench.close()
    model = load_peer(scale.shape, bench.device)
    load = scale.small_load
    run = run_peer(model, load, scale.peer_limit_s)
    notes = [f"transformers with {load}: {run.tokens_per_s:,.0f} tokens/s, attention {run.attention}"]
    # Its steps take longer with more requests, though not by as many times.
    growth = scale.load.requests * scale.load.output_tokens / (load.requests * load.output_tokens) / 2
    try:
        if run.seconds * growth > scale.peer_limit_s:
            raise PeerFailed(f"it would take about {run.seconds * growth:.0f} s")
        run, load = run_peer(model, scale.load, scale.peer_limit_s), scale.load
    except PeerFailed as why:
        notes.append(f"{scale.load} was too much for it: {why}")
    del model
    served, _ = _serve(bench, bench.executor(scale.shape), load)
    against = f"transformers {run.tokens_per_s:,.0f} tokens/s"
    row = GpuRow(str(load), served.tokens_per_s, "tokens/s", against, served.tokens_per_s / run.tokens_per_s)
    return PartResult("peer", rows=[row], notes=notes)


def idle(bench: GpuBench) -> PartResult:
    """In the middle of the closed loop, where every step only decodes."""
    scale = bench.scale
    executor = bench.executor(scale.shape)
    spans = _profile_service(bench, executor)
    result = PartResult("idle")
    if spans:
        between, all_ = idle_share(spans, BETWEEN_STEPS_US), idle_share(spans)
        words = f"of the time, in gaps ≥ {BETWEEN_STEPS_US:g} µs"
        result.rows.append(GpuRow("between decode steps", 100 * between, "%", words, between, at_most=IDLE_TARGET))
        result.rows.append(GpuRow("all gaps", 100 * all_, "%", "of the time", all_))
    else:
        result.notes.append("the profiler saw no kernels")
    return result


def _profile_service(bench: GpuBench, executor: SharedPool) -> list[Span]:
    scale = bench.scale
    recorder = Recorder()

    def watch(settled: int) -> None:
        if settled == scale.idle_from_step:
            recorder.start()
        elif settled == scale.idle_from_step + scale.idle_steps:
            recorder.stop()

    ClosedLoop(executor, scale.load, scale.step_tokens, watch).run()
    recorder.stop()
    # The edges are left out: there the profiler itself was at work.
    return within(recorder.spans, 0.2, 0.9)


def invariant(bench: GpuBench) -> PartResult:
    """Cost of the batch-invariant mode."""
    scale = bench.scale
    usual = StepTimer(bench.executor(scale.shape))
    before = {batch: usual.decode(batch, scale.context) for batch in scale.batches}
    prefilled = usual.prefill(1, scale.prefill_tokens)
    same = StepTimer(bench.executor(scale.shape, batch_invariant=True))
    rows = [
        _beside(f"batch {batch} × {scale.context:,}", same.decode(batch, scale.context), "usual", before[batch])
        for batch in scale.batches
    ]
    rows.append(_beside(f"prefill of {scale.prefill_tokens:,}", same.prefill(1, scale.prefill_tokens), "usual", prefilled))
    return PartResult("invariant", rows=rows)


def drafts(bench: GpuBench) -> PartResult:
    """A repetitive model with and without drafts: the best case of n-grams."""
    scale = bench.scale
    plain = StepTimer(bench.executor(scale.shape, live_tokens=scale.live_tokens))
    before = {batch: plain.decode(batch, scale.context) for batch in scale.draft_batches}
    drafted = StepTimer(bench.executor(scale.shape, burst=1 + scale.draft_tokens, live_tokens=scale.live_tokens))
    result = PartResult("drafts", notes=[f"greedy, over {scale.live_tokens} tokens that have logits"])
    for batch in scale.draft_batches:
        timing = drafted.decode(batch, scale.context)
        a_row = timing.tokens_a_step / batch
        result.rows.append(GpuRow(f"batch {batch}: tokens a row and step", a_row, "", f"of {1 + scale.draft_tokens}"))
        result.rows.append(
            GpuRow(f"batch {batch}: step", timing.step_s * 1e3, "ms", f"undrafted {before[batch].step_s * 1e3:.2f} ms",
                timing.step_s / before[batch].step_s)
        )  # fmt: skip
        speed, without = timing.tokens_a_step / timing.step_s, before[batch].tokens_a_step / before[batch].step_s
        result.rows.append(
            GpuRow(f"batch {batch}: speed", speed, "tokens/s", f"undrafted {without:,.0f} tokens/s", speed / without)
        )
    return result


def constrained(bench: GpuBench) -> PartResult:
    """A batch of which half has a constraint beside the same batch without any."""
    scale = bench.scale
    stepper, batch = StepTimer(bench.executor(scale.shape)), scale.constrained_batch
    result = PartResult("constrained", notes=["masks are copied from random ones: computing them is not included"])
    for words, wish in (("greedy", GREEDY), ("top-p 0.9", Sampling(seed=1, temperature=1.0, top_p=0.9))):
        free = stepper.decode(batch, scale.context, wish)
        mixed = stepper.decode(batch, scale.context, wish, replace(wish, constraint=CONSTRAINT))
        what = f"batch {batch} × {scale.context:,}, {words}"
        result.rows.append(_beside(f"{what}: half constrained", mixed, "none constrained", free))
        rate, others = mixed.tokens_a_step / mixed.step_s, batch / 2 / mixed.step_s
        told = f"the other half {others:,.0f} tokens/s; fewer where rows sit steps out"
        result.rows.append(GpuRow(f"{what}: constrained rows", rate - others, "tokens/s", told))
    return result


def moe(bench: GpuBench) -> PartResult:
    scale = bench.scale
    stepper = StepTimer(bench.executor(scale.moe_shape))
    result = PartResult("moe")
    for batch in scale.batches:
        _decode(bench, stepper, scale.moe_shape, batch, scale.context, result)
    _prefill(bench, stepper, scale.moe_shape, (1, scale.prefill_tokens, 0), result)
    return result


def families(bench: GpuBench) -> PartResult:
    scale = bench.scale
    result = PartResult("families")
    for shape in scale.families:
        stepper = StepTimer(bench.executor(shape))
        for batch in scale.batches[:2]:
            _decode(bench, stepper, shape, batch, scale.context, result)
        _prefill(bench, stepper, shape, (4, scale.prefill_tokens // 4, 0), result)
    return result


PARTS: dict[str, Callable[[GpuBench], PartResult]] = {
    part.__name__: part
    for part in (
        rates,
        check,
        decode,
        attention,
        prefill,
        serve,
        idle,
        grid,
        invariant,
        constrained,
        drafts,
        moe,
        peer,
        families,
    )
}
"""In order of execution; the most important come first, in case the time runs out."""


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decode(
    bench: GpuBench,
    stepper: StepTimer,
    shape: str,
    batch: int,
    context: int,
    result: PartResult,
    at_most: float | None = None,
) -> None:
    timing = stepper.decode(batch, context)
    least_s = floor_s(decode_operations(bench.sizes(shape), batch, context), bench.rates)
    what = f"{shape}, batch {batch} × {context:,}"
    floor = f"floor {least_s * 1e3:.2f} ms"
    result.rows.append(GpuRow(what, timing.step_s * 1e3, "ms", floor, timing.step_s / least_s, at_most=at_most))
    result.points.append(StepPoint(shape, timing.step_s * 1e6, decodes=batch, context_tokens=context))
    bench.said(f"  {what}: {timing.step_s * 1e3:.3f} ms, {timing.step_s / least_s:.3f} of the floor")


def _prefill(
    bench: GpuBench,
    stepper: StepTimer,
    shape: str,
    chunks: tuple[int, int, int],
    result: PartResult,
    at_least: float | None = None,
) -> None:
    sequences, tokens, begin = chunks
    timing = stepper.prefill(*chunks)
    flop_per_s = flop_of(prefill_operations(bench.sizes(shape), *chunks)) / timing.step_s
    what = f"{shape}, {sequences} × {tokens:,}" + (f" after {begin:,}" if begin else "")
    against = f"{flop_per_s / 1e12:,.0f} TFLOP/s, of the matrix rate"
    share = flop_per_s / bench.rates.matrix_flop_per_s
    result.rows.append(GpuRow(what, timing.step_s * 1e3, "ms", against, share, at_least=at_least))
    result.points.append(StepPoint(shape, timing.step_s * 1e6, sequences=sequences, chunk_tokens=tokens, begin_tokens=begin))
    bench.said(f"  {what}: {timing.step_s * 1e3:.2f} ms, {share:.3f} of the matrix rate")


def _beside(what: str, timing: StepTiming, name: str, other: StepTiming) -> GpuRow:
    against = f"{name} {other.step_s * 1e3:.2f} ms"
    return GpuRow(what, timing.step_s * 1e3, "ms", against, timing.step_s / other.step_s)


def _of_read_rate(what: str, read_bytes: float, spent_s: float, found: GpuRates, at_least: float | None = None) -> GpuRow:
    rate = read_bytes / spent_s
    against = f"{rate / 1e12:.2f} TB/s, of the read rate"
    return GpuRow(what, spent_s * 1e3, "ms", against, rate / found.read_bytes_per_s, at_least=at_least)


def need_device() -> None:
    if not torch.cuda.is_available():
        raise CannotMeasure("torch sees no CUDA device here")


def measured_rates(device: str) -> GpuRates:
    need_device()
    return measure_rates(torch.device(device))


def parts_named(names: Sequence[str]) -> list[str]:
    """The named parts in order of execution; raises CannotMeasure for an unknown one."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise CannotMeasure(f"there is no part {unknown[0]!r} (there are: {', '.join(PARTS)})")
    return [name for name in PARTS if name in names]
