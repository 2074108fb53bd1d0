"""The rows of a step that have a constraint, drawn on the device with masks that the host computes meanwhile.

    device   … draw k ─▶ report k    forward of k+1 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━▶ draw k+1
    host                  └▶ what was drawn ─▶ matchers, on a few threads ─▶ masks, on a stream beside ┘

Which tokens may come follows from the token before, so a step with such rows is launched in full only when the report of the
step before has come; its forward runs by then. A step without such rows waits for nothing. A decode whose masks are not
there when the forward has ended sits the step out: the draw has no mask for it, and what is drawn for it is dropped.

Owns what the host has learnt of the slots that have a constraint: how many tokens each knows. The matchers belong to the
sampler of the host, which draws such rows too where a step needs it; either may draw the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from baton.core.engine.plan import Int32s, Int64s
from baton.executor.constraints.slot_matchers import SlotMatchers
from baton.executor.contract import ExecutorShape
from baton.executor.cuda.drafting import Propose
from baton.executor.cuda.forced_tokens import ForcedPlan, ForcedTokens
from baton.executor.cuda.masks import MaskTable, MaskUploads, permit_something
from baton.executor.cuda.report import ReportShape, StepReport, read_report
from baton.executor.cuda.staging import StepDownload, StepDownloads
from baton.executor.drafts import DraftTokens, no_drafts

ALIGNMENT = 16
Holds = Callable[[int, int], bool]
"""(slot, epoch): whether the slot is still that request's."""


@dataclass(frozen=True, slots=True)
class DrawnSlots:
    """The slots that a step draws for."""

    sampled: Int32s
    """Of chunks."""
    decodes: Int32s
    """With the spare slot in place of those that do not decode."""
    first_rows: Int64s
    """Of each decode, the first of its rows among those of decodes."""

    @property
    def all(self) -> Int32s:
        return np.concatenate([self.sampled, self.decodes]).astype(np.int32)


class SentMasks(NamedTuple):
    failed: list[int]
    """Rows of the draw for which no token may be drawn."""
    late: Int64s
    """Decodes that sit the step out, because their masks are not there."""


@dataclass(slots=True)
class _Expected:
    """A step whose report has not been read yet."""

    report: StepDownload
    shape: ReportShape
    chunks: list[tuple[int, int, int]]
    """(nth chunk that samples, slot, epoch)"""
    decodes: list[tuple[int, int, int]]
    """(nth sequence, slot, epoch)"""
    is_recorded: bool
    """The matchers know already what was drawn."""
    failed: dict[int, int] = field(default_factory=dict)
    """Slot → the first of its draws for which no token could be drawn."""


class MaskedDraws:
    def __init__(
        self,
        shape: ExecutorShape,
        vocabulary: int,
        rows_max: int,
        matchers: SlotMatchers,
        device: torch.device,
        capable: bool,
    ) -> None:
        """Without backends for constraints (`capable`) there is no memory for masks."""
        self._matchers = matchers
        self._vocabulary = vocabulary
        self._queries = shape.burst_max
        self.forced = ForcedTokens(shape, device) if capable and shape.constrained_burst else None
        """What the grammars force; None where it is not drafted."""
        table = MaskTable.of(rows_max if capable else 1, vocabulary, rows_max, device)
        self._uploads = MaskUploads(table, device)
        self._known: Int64s = np.zeros(shape.slots, dtype=np.int64)
        self._expected: list[_Expected] = []
        cells = shape.slots * (self._queries - 1)
        self._counts_at = cells + -cells % ALIGNMENT
        self._proposals = StepDownloads(self._counts_at + shape.slots, device)
        self._proposed: StepDownload | None = None
        self._drafts_most = 0
        self._forward = torch.cuda.Event()
        """Whether the device has computed what the step draws from."""

    @property
    def table(self) -> MaskTable:
        return self._uploads.table

    def start(self, slot: int, known: int) -> None:
        """A request begins in the slot with so many known tokens."""
        self._known[slot] = known
        if self.forced is not None:
            self.forced.start(slot)

    def concern(self, drawn: DrawnSlots) -> bool:
        """Whether some row has a constraint."""
        if not self._matchers.held.any():
            return False
        return bool(len(self._held(drawn.sampled)) or len(self._held(drawn.decodes)))

    def propose(self, propose: Propose | None, named: torch.Tensor, most: int, drawn: DrawnSlots) -> None:
        """Ask for the drafts, at most so many each, that the next forward will feed to the slots `named`, so that they are
        here while it runs."""
        self._proposed = None
        if propose is None or not len(self._held(drawn.decodes)):
            return
        there, sequences, self._drafts_most = self._proposals.next(), len(named), most
        propose(named, there, there[self._counts_at :])
        self._proposed = self._proposals.fetch(self._counts_at + sequences)

    def catch_up(self, holds: Holds) -> None:
        """Read the reports of earlier steps: waits for the last of them."""
        for expected in self._expected:
            report = read_report(expected.report.wait(), expected.shape)
            for nth, slot, epoch in expected.chunks:
                if holds(slot, epoch):
                    self._learn(expected, slot, int(report.sampled_known[nth]), report.sampled_tokens[nth : nth + 1])
            for nth, slot, epoch in expected.decodes:
                if holds(slot, epoch):
                    self._learn(expected, slot, int(report.known[nth]), _stood(report, nth))
        self._expected.clear()

    def expect(
        self,
        report: StepDownload,
        shape: ReportShape,
        drawn: DrawnSlots,
        epochs: Int64s,
        failed: dict[int, int],
        is_recorded: bool,
    ) -> None:
        """Remember a step with constrained rows until its report is needed. `epochs` are those of all slots."""
        chunks = [(nth, slot, int(epochs[slot])) for nth, slot in self._named(drawn.sampled)]
        decodes = [(nth, slot, int(epochs[slot])) for nth, slot in self._named(drawn.decodes)]
        self._expected.append(_Expected(report, shape, chunks, decodes, is_recorded, failed))

    def send(self, drawn: DrawnSlots, chunk_rows: int) -> SentMasks:
        """Compute the masks of a step's draw and copy them to the table. The forward is launched, `catch_up` was called."""
        self._forward.record()
        chunks, decodes = self._held(drawn.sampled), self._held(drawn.decodes)
        slots = np.concatenate([drawn.sampled[chunks], drawn.decodes[decodes]]).astype(np.int32)
        drafts, positions = self._drafts(len(chunks), decodes), self._known[slots]
        self._matchers.prepare(slots, positions, drafts, foresee=0 if self.forced is None else self._queries)
        late = self._matchers.late(
            slots,
            np.arange(len(slots)) >= len(chunks),
            others=len(slots) < len(drawn.sampled) + len(drawn.decodes),
            computes=lambda: not self._forward.query(),
        )
        draws = np.where(late, 0, drafts.counts.astype(np.int64) + 1)
        source = np.repeat(np.arange(len(slots)), draws)
        nth = np.arange(len(source)) - np.repeat(np.cumsum(draws) - draws, draws)
        rows = np.concatenate([chunks, chunk_rows + drawn.first_rows[decodes]])[source] + nth
        masks = self._matchers.masks(slots[source], positions[source] + nth)
        good = permit_something(masks.words, self._vocabulary)
        at = masks.rows[good]
        self._uploads.send(masks.words[good], np.arange(len(at)), rows[at])
        self._foresee(slots[~late])
        failed = sorted([*rows[list(masks.failed)].tolist(), *rows[masks.rows[~good]].tolist()])
        return SentMasks(failed, decodes[late[len(chunks) :]])

    def done(self) -> None:
        """The draw is launched."""
        self._uploads.done()

    def _learn(self, expected: _Expected, slot: int, known: int, stood: Int32s) -> None:
        self._known[slot] = known
        if slot in expected.failed and len(stood) > expected.failed[slot]:
            self._matchers.fail(slot)
        elif not expected.is_recorded:
            positions = np.arange(known - len(stood), known)
            self._matchers.record(np.full(len(stood), slot, dtype=np.int32), positions, stood)

    def _foresee(self, slots: Int32s) -> None:
        """Plan what is forced after the drafts of this step. A slot that sits out keeps its plan, which begins earlier."""
        if self.forced is None:
            return
        plans = []
        for slot in slots.tolist():
            ahead = self._matchers.ahead(slot)
            plans.append(ForcedPlan(slot, int(self._known[slot]), ahead.tokens, len(ahead.tokens) - ahead.fed - 1))
        self.forced.send(plans)

    def _drafts(self, chunks: int, decodes: Int64s) -> DraftTokens:
        if self._proposed is None:
            return no_drafts(chunks + len(decodes))
        words, most = self._proposed.wait(), self._drafts_most
        tokens = words[: self._counts_at][: (self._counts_at // most) * most].reshape(-1, most)[decodes]
        counts = words[self._counts_at :][decodes]
        return DraftTokens(
            np.concatenate([np.zeros((chunks, most), dtype=np.int32), tokens]),
            np.concatenate([np.zeros(chunks, dtype=np.int32), counts]),
        )

    def _held(self, slots: Int32s) -> Int64s:
        """Indexes of the slots that have a constraint; the spare slot has none."""
        held = self._matchers.held
        inside = np.flatnonzero(slots < len(held))
        return inside[held[slots[inside]]]

    def _named(self, slots: Int32s) -> list[tuple[int, int]]:
        held = self._held(slots)
        return list(zip(held.tolist(), slots[held].tolist(), strict=True))


def _stood(report: StepReport, nth: int) -> Int32s:
    return report.tokens[nth, : report.counts[nth]]
