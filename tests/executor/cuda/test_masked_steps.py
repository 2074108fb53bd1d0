"""Steps with constrained rows that are drawn on the device yield what the CPU executor yields, whatever is beside them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from tests.support.no_device import pretend_a_device

from baton.core.engine.plan import Chunk, Int32s, RowOutcome, Start, StepPlan, StepResult, Stop
from baton.core.engine.request import Constraint, Sampling, frozen_tokens
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource, fits
from baton.executor.constraints.slot_matchers import Bools, SlotMatchers
from baton.executor.contract import Executor, ExecutorShape
from baton.executor.cpu.executor import TorchCpuExecutor
from baton.executor.cuda.executor import TorchCudaExecutor
from baton.executor.cuda.masked_draws import DrawnSlots, MaskedDraws, SentMasks
from baton.executor.cuda.masks import NO_MASK, MaskTable, MaskUploads
from baton.executor.cuda.runner import LogitRows
from baton.executor.cuda.staging import RING, StepDownloads
from baton.executor.cuda.step import StepRunner
from baton.executor.drafts import NgramProposer, no_drafts
from baton.executor.model_loading import load_shape
from baton.executor.model_shapes import SHAPES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device; tests/gpu runs the executor on it"),
    pytest.mark.filterwarnings("ignore:Conversion of an array"),
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
]

MODEL = "tiny-llama"
SHAPE = ExecutorShape(slots=4, blocks=12, block_size=16, context_tokens=64, burst=3)
PROPOSER = NgramProposer(drafts=2, ngram_min=1, ngram_max=3)
VOCABULARY = int(str(SHAPES[MODEL]["vocab_size"]))
SOURCES = [ScriptedSource(seed, VOCABULARY).text() for seed in (3, 4)]
CONSTRAINTS = [Constraint("scripted", "1", source) for source in SOURCES]
DRAWN = Sampling(seed=5, temperature=0.7, constraint=CONSTRAINTS[0])
GREEDY = Sampling(seed=6, temperature=0.0, constraint=CONSTRAINTS[1])
FREE = Sampling(seed=7, temperature=0.9, top_p=0.9)
PENALISED = Sampling(seed=8, temperature=1.0, presence_penalty=0.4)
"""Its steps are drawn by the host."""
BROKEN = Sampling(seed=9, constraint=Constraint("scripted", "1", "no source"))
PROMPT = [1, 2, 3, 1, 2, 3, 1]


@pytest.fixture(autouse=True)
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch, [])


@dataclass
class Drawn:
    """How many steps were drawn in which way."""

    masked: int = 0
    by_host: int = 0
    plain: int = 0


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    noted, send, draw, on_host = Drawn(), MaskedDraws.send, StepRunner._draw, StepRunner._draw_on_host

    def note_send(self: MaskedDraws, slots: DrawnSlots, chunk_rows: int) -> SentMasks:
        noted.masked += 1
        return send(self, slots, chunk_rows)

    def note_draw(self: StepRunner, *arguments: object) -> object:
        noted.plain += 1
        return draw(self, *arguments)  # type: ignore[arg-type]

    def note_host(self: StepRunner, rows: LogitRows, out: torch.Tensor, work: object) -> object:
        noted.by_host += 1
        return on_host(self, rows, out, work)  # type: ignore[arg-type]

    monkeypatch.setattr(MaskedDraws, "send", note_send)
    monkeypatch.setattr(StepRunner, "_draw", note_draw)
    monkeypatch.setattr(StepRunner, "_draw_on_host", note_host)
    return noted


@dataclass
class Requests:
    """Gives plans: which slots start, stop and decode in each step."""

    step: int = 0
    epochs: dict[int, int] = field(default_factory=dict)
    epoch: int = 0

    def plan(self, starts: dict[int, Sampling], stops: list[int], decodes: list[int]) -> StepPlan:
        stopped = tuple(Stop(slot, self.epochs.pop(slot)) for slot in stops)
        begun, chunks = [], []
        for slot, wish in starts.items():
            self.epoch += 1
            self.epochs[slot] = self.epoch
            blocks = np.arange(3 * slot, 3 * slot + 3, dtype=np.int32)
            begun.append(Start(slot, self.epoch, frozen_tokens(PROMPT), len(PROMPT), 0, 48, wish, blocks))
            chunks.append(Chunk(slot, self.epoch, 0, len(PROMPT), True))
        self.step += 1
        return StepPlan(
            self.step, self.step - 1, stops=stopped, starts=tuple(begun), chunks=tuple(chunks),
            decode_slots=np.array(decodes, dtype=np.int32),
            decode_epochs=np.array([self.epochs[slot] for slot in decodes], dtype=np.int64),
        )  # fmt: skip


def plans() -> Iterator[StepPlan]:
    """Constrained rows beside others; a slot in use again; a step of the host in between; then none with a constraint."""
    asked = Requests()
    yield asked.plan({0: DRAWN, 1: FREE, 2: BROKEN}, [], [])
    yield asked.plan({3: GREEDY}, [2], [0, 1])
    yield asked.plan({}, [], [0, 1, 3])
    yield asked.plan({2: PENALISED}, [], [0, 1, 3])
    yield asked.plan({0: GREEDY}, [0, 2], [1, 3])
    yield asked.plan({}, [], [0, 1, 3])
    yield asked.plan({}, [0, 3], [1])
    yield asked.plan({0: FREE}, [], [1])
    yield asked.plan({}, [], [0, 1])


def results_of(executor: Executor) -> list[StepResult]:
    """Two steps in flight."""
    results, waiting = [], 0
    for plan in plans():
        executor.launch(plan)
        waiting += 1
        if waiting == 2:
            results.append(executor.collect())
            waiting -= 1
    results.append(executor.collect())
    executor.close()
    return results


def outputs_of(results: list[StepResult]) -> dict[int, list[int]]:
    """By epoch."""
    outputs: dict[int, list[int]] = {}
    for result in results:
        at = 0
        for epoch, count in zip(result.epochs.tolist(), result.counts.tolist(), strict=True):
            outputs.setdefault(epoch, []).extend(result.tokens[at : at + count].tolist())
            at += count
    return outputs


def on_cpu() -> Executor:
    thread, constraints = ThreadPoolExecutor(max_workers=1), CompiledConstraints([ScriptedBackend()])
    plain = replace(SHAPE, burst=1)
    return TorchCpuExecutor(load_shape(MODEL, "float32"), plain, b"", None, thread, constraints=constraints)


@pytest.mark.parametrize("burst", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["without drafts", "with drafts"])
def test_constrained_rows_on_the_device_yield_the_tokens_of_the_cpu_executor(drawn: Drawn, burst: int) -> None:
    wanted = outputs_of(results_of(on_cpu()))
    executor = TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), replace(SHAPE, burst=burst), step_tokens=64, proposer=PROPOSER, batch_invariant=True,
        backends=lambda _: [ScriptedBackend()],
    )  # fmt: skip
    results = results_of(executor)
    outputs = outputs_of(results)
    for epoch, tokens in wanted.items():
        assert outputs[epoch][: len(tokens)] == tokens, f"the {epoch}. request"
    assert [fits(SOURCES[1], outputs[epoch]) for epoch in (4, 6)] == [True, True]
    assert fits(SOURCES[0], outputs[1])
    assert outputs[3] == [], "its constraint does not compile"
    assert results[0].outcomes.tolist() == [RowOutcome.TOKENS, RowOutcome.TOKENS, RowOutcome.CONSTRAINT_FAILED]
    assert (drawn.masked, drawn.by_host, drawn.plain) == (5, 1, 9), "of nine steps three had no constraint"


@pytest.mark.parametrize("burst", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["without drafts", "with drafts"])
def test_a_row_that_sits_out_on_the_device_draws_the_same_token_in_a_later_step(
    monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    wanted = outputs_of(results_of(on_cpu()))
    steps = 0

    def late(self: SlotMatchers, slots: Int32s, patient: Bools, **_: object) -> Bools:
        """Every second time."""
        nonlocal steps
        steps += 1
        return self.held[slots] & patient & (steps % 2 == 0)

    monkeypatch.setattr(SlotMatchers, "late", late)
    executor = TorchCudaExecutor.of(
        load_shape(MODEL, "float32"), replace(SHAPE, burst=burst), step_tokens=64, proposer=PROPOSER, batch_invariant=True,
        backends=lambda _: [ScriptedBackend()],
    )  # fmt: skip
    results = results_of(executor)
    sat_out = [
        (int(epoch), int(count), int(known))
        for result in results
        for epoch, count, known, outcome in zip(result.epochs, result.counts, result.known, result.outcomes, strict=True)
        if outcome == RowOutcome.SAT_OUT
    ]
    assert sat_out[0] == (1, 0, len(PROMPT) + 1), "as many are known as before"
    assert len(sat_out) >= 2
    outputs = outputs_of(results)
    for epoch, tokens in wanted.items():
        both = min(len(tokens), len(outputs[epoch]))
        assert outputs[epoch][:both] == tokens[:both], f"the {epoch}. request"
    assert outputs[2] == wanted[2] or burst > 1, "it has no constraint, and waits for nobody"
    assert fits(SOURCES[0], outputs[1])


def test_masks_of_a_step_replace_those_of_the_step_before() -> None:
    cpu = torch.device("cpu")
    uploads = MaskUploads(MaskTable.of(40, 70, 6, cpu), cpu)
    masks = np.arange(1, 10, dtype=np.uint32).reshape(3, 3)
    for entries, rows in (([2, 4, 30], [5, 0, 1]), ([0, 1, 39], [2, 3, 4])):
        uploads.send(masks, np.array(entries), np.array(rows))
        uploads.done()
        assert uploads.table.entries[entries].tolist() == masks.tolist()
        named = uploads.table.rows.tolist()
        assert [named[row] for row in rows] == entries
        assert named.count(NO_MASK) == 3
    uploads.send(masks[:0], np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert set(uploads.table.rows.tolist()) == {NO_MASK}


def test_a_report_that_was_read_once_stays_after_its_memory_is_used_again() -> None:
    downloads = StepDownloads(4, torch.device("cpu"))
    downloads.next().fill_(7)
    report = downloads.fetch(4)
    assert report.wait().tolist() == [7] * 4
    for number in range(RING):
        downloads.next().fill_(number)
        downloads.fetch(4).wait()
    assert report.wait().tolist() == [7] * 4


def test_a_slot_for_which_nothing_could_be_drawn_draws_nothing_any_more() -> None:
    matchers = SlotMatchers(1, VOCABULARY, CompiledConstraints([ScriptedBackend()]))
    matchers.start(0, np.array(PROMPT, dtype=np.int32), len(PROMPT), DRAWN)
    slot, position = np.zeros(1, dtype=np.int32), np.array([len(PROMPT)])
    matchers.prepare(slot, position, no_drafts(1))
    assert matchers.masks(slot, position).failed == ()
    matchers.fail(0)
    matchers.prepare(slot, position + 1, no_drafts(1))
    assert matchers.masks(slot, position + 1).failed == (0,)
    matchers.close()
