"""Sending of the prefill side: orders blocks to be sent as steps compute them, and commits the attempt after the last."""

from __future__ import annotations

from baton.core.engine.plan import Chunk, Logprobs, StepPlan
from baton.core.engine.scheduler import Scheduler
from baton.core.handover.messages import Commit, OpenShip, Ship, Tell
from baton.core.handover.prefill_handovers import (
    PrefillHandover,
    PrefillHandoverMove,
    PrefillHandovers,
    PrefillHandoverState,
)
from baton.core.handover.protocol import Acts, prompt_digest


class PrefillSending:
    def __init__(self, scheduler: Scheduler, handovers: PrefillHandovers) -> None:
        self._scheduler = scheduler
        self._handovers = handovers
        self._block_size = scheduler.config.block_size
        self._prefix = scheduler.pool.prefix

    def planned(self, plan: StepPlan) -> Acts:
        """Before its launch: order the blocks that this step computes to be sent, layer by layer."""
        acts: Acts = []
        for start in plan.starts:
            acts += self._begun(self._entry_of_slot(start.slot), start.slot, start.computed)
        for chunk in plan.chunks:
            acts += self._ship_chunk(self._entry_of_slot(chunk.slot), chunk, plan.step)
        return acts

    def _entry_of_slot(self, slot: int) -> PrefillHandover:
        return self._handovers.of_row(int(self._scheduler.slots.serial[slot]))

    def _begun(self, entry: PrefillHandover, slot: int, computed: int) -> Acts:
        """A row starts in this plan: open its transfer and send its cached blocks at once, unless the attempt is ending."""
        if entry.grant is None or entry.state is not PrefillHandoverState.PREFILLING:
            return []
        first, found = entry.shipped_upto, computed // self._block_size
        blocks = self._scheduler.slots.blocks(slot)[first:]
        blocks.setflags(write=False)
        self._scheduler.pin(entry.row)
        acts: Acts = [OpenShip(entry.handover, entry.grant.token, first, blocks)]
        if found > first:
            acts.append(Ship(entry.handover, None, first, found, last=False))
            entry.shipped_upto = found
        return acts

    def _ship_chunk(self, entry: PrefillHandover, chunk: Chunk, step: int) -> Acts:
        """Send the blocks that this chunk completes; with the last chunk also the partial block. No block is sent twice."""
        if entry.state is not PrefillHandoverState.PREFILLING:
            return []
        upto = -(-chunk.end // self._block_size) if chunk.samples else chunk.end // self._block_size
        first = entry.shipped_upto
        if upto <= first:
            return []
        entry.shipped_upto = upto
        return [Ship(entry.handover, step, first, upto, last=chunk.samples)]

    def prefilled(self, entry: PrefillHandover, token: int, logprobs: Logprobs | None) -> Acts:
        if entry.state is not PrefillHandoverState.PREFILLING:
            return []
        entry.token, entry.logprobs = token, logprobs
        self._handovers.move(entry, PrefillHandoverMove.PREFILLED)
        return self._commit_if_ready(entry)

    def shipped(self, entry: PrefillHandover | None, checks: bytes) -> Acts:
        if entry is None or entry.state not in (PrefillHandoverState.PREFILLING, PrefillHandoverState.SHIPPING):
            return []
        entry.checks = checks
        return self._commit_if_ready(entry)

    def _commit_if_ready(self, entry: PrefillHandover) -> Acts:
        """Commit once the first token is known and the last piece has left, in whichever order these happen."""
        if (
            entry.state is not PrefillHandoverState.SHIPPING
            or entry.checks is None
            or entry.token is None
            or entry.serial is None
        ):
            return []
        request = self._scheduler.request(entry.serial)
        if request is None:
            return []
        self._handovers.move(entry, PrefillHandoverMove.COMMIT)
        commit = Commit(
            request=entry.handover.request,
            attempt=entry.handover.attempt,
            token=entry.token,
            logprobs=entry.logprobs,
            cached_tokens=request.bill.cached_tokens,
            restored_tokens=request.bill.restored_tokens,
            queue_us=max(0, request.since_us - entry.arrived_us - request.bill.prefill_us),
            prefill_us=request.bill.prefill_us,
            prompt_digest=self._prefix.hashes.noted(prompt_digest(entry.submission, self._prefix.fingerprint)),
            checks=entry.checks,
            queued_tokens=self._handovers.queued_tokens,
        )
        return [Tell(entry.handover.peer, commit)]
