"""Drives an executor by hand: StepPlans for a few prompts without any scheduler, so that executors are tested alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from baton.core.engine.plan import Chunk, Copy, RowOutcome, Start, StepPlan, StepResult, Stop
from baton.core.engine.request import Sampling, frozen_tokens
from baton.executor.contract import Executor

GREEDY = Sampling(seed=0, temperature=0.0)


@dataclass
class Lane:
    """One request in one slot, as the planner sees it."""

    slot: int
    epoch: int
    prompt: list[int]
    limit: int
    blocks: list[int]
    fed: int
    """Positions already planned to be computed."""
    planned: int
    """Tokens known once everything planned has settled."""
    sampling: Sampling = GREEDY
    outputs: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.planned >= self.limit


@dataclass
class Planner:
    """Blocks are handed out from a counter and never reused, unless a test does so itself."""

    executor: Executor
    chunk_tokens: int = 1 << 30
    depth: int = 1
    """How many steps are in flight at once."""
    lanes: list[Lane] = field(default_factory=list)
    step: int = 0
    next_block: int = 0
    next_epoch: int = 1
    starts: list[Start] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def take_blocks(self, count: int) -> list[int]:
        taken = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        return taken

    def add(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        slot: int | None = None,
        computed: int = 0,
        blocks: list[int] | None = None,
        sampling: Sampling = GREEDY,
    ) -> Lane:
        """A request that starts with the next step; all blocks it will ever need unless `blocks` gives its first ones."""
        limit = len(prompt) + new_tokens
        needed = -(-limit // self.executor.shape.block_size)
        given = list(blocks or [])
        given += self.take_blocks(needed - len(given))
        lane = Lane(
            slot=len(self.lanes) if slot is None else slot,
            epoch=self.next_epoch,
            prompt=prompt,
            limit=limit,
            blocks=given,
            fed=computed,
            planned=len(prompt),
            sampling=sampling,
        )
        self.next_epoch += 1
        self.lanes.append(lane)
        first = np.array(given, dtype=np.int32)
        self.starts.append(
            Start(lane.slot, lane.epoch, frozen_tokens(prompt), len(prompt), computed, limit, sampling, first)
        )
        return lane

    def stop(self, lane: Lane) -> None:
        self.stops.append(Stop(lane.slot, lane.epoch))
        self.lanes.remove(lane)

    def clear(self) -> None:
        """Let go of every lane with the next step, and hand all blocks out anew."""
        for lane in list(self.lanes):
            self.stop(lane)
        self.next_block = 0

    def take_step(self) -> StepResult:
        self.executor.launch(self.plan())
        self.settle(self.executor.collect())
        return self.results[-1]

    def plan(self) -> StepPlan:
        self.step += 1
        chunks, decodes = [], []
        for lane in self.lanes:
            if lane.fed < len(lane.prompt):
                chunks.append(self._chunk(lane))
            elif not lane.is_done:
                decodes.append(lane)
                lane.fed += 1
                lane.planned += 1
        plan = StepPlan(
            step=self.step,
            base_step=self.step - 1,
            stops=tuple(self.stops),
            copies=tuple(self.copies),
            starts=tuple(self.starts),
            chunks=tuple(chunks),
            decode_slots=np.array([lane.slot for lane in decodes], dtype=np.int32),
            decode_epochs=np.array([lane.epoch for lane in decodes], dtype=np.int64),
        )
        self.stops, self.copies, self.starts = [], [], []
        return plan

    def _chunk(self, lane: Lane) -> Chunk:
        begin = lane.fed
        end = min(len(lane.prompt), begin + self.chunk_tokens)
        lane.fed = end
        samples = end == len(lane.prompt)
        lane.planned += int(samples)
        return Chunk(lane.slot, lane.epoch, begin, end, samples)

    def settle(self, result: StepResult) -> None:
        self.results.append(result)
        by_epoch = {lane.epoch: lane for lane in self.lanes}
        cursor = 0
        for row, count in enumerate(result.counts.tolist()):
            taken = result.tokens[cursor : cursor + count].tolist()
            cursor += count
            if result.outcomes[row] == RowOutcome.TOKENS:
                by_epoch[int(result.epochs[row])].outputs.extend(taken)

    def run(self) -> list[list[int]]:
        """Until every lane has all its tokens; outputs in the order the lanes were added."""
        in_flight: deque[int] = deque()
        while self.starts or not all(lane.is_done for lane in self.lanes) or in_flight:
            if self.starts or not all(lane.is_done for lane in self.lanes):
                self.executor.launch(self.plan())
                in_flight.append(self.step)
            if len(in_flight) >= self.depth or all(lane.is_done for lane in self.lanes):
                self.settle(self.executor.collect())
                in_flight.popleft()
        return [lane.outputs for lane in self.lanes]


def generate(
    executor: Executor, prompts: list[list[int]], new_tokens: int, *, chunk_tokens: int = 1 << 30, depth: int = 1
) -> list[list[int]]:
    planner = Planner(executor, chunk_tokens=chunk_tokens, depth=depth)
    for prompt in prompts:
        planner.add(prompt, new_tokens)
    return planner.run()
