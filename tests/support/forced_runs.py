"""Constraints that force long runs of tokens, and requests whose every step is given by hand, on any executor."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from baton.core.engine.plan import NO_INT32S, Chunk, RowOutcome, Start, StepPlan, StepResult, Stop
from baton.core.engine.request import Constraint, Sampling, frozen_tokens
from baton.executor.constraints.contract import Words, set_bits
from baton.executor.contract import Executor

NAME, VERSION = "runs", "1"
BLOCKS = 4
"""Of a slot."""


def runs(seed: int, vocabulary: int, forced: int) -> Constraint:
    """Of the tokens of an answer one may be any even one, then so many are forced by what came before, and so on."""
    return Constraint(NAME, VERSION, f"{seed} {vocabulary} {forced}")


@dataclass
class RunsMatcher:
    seed: int
    vocabulary: int
    forced: int
    came: list[int] = field(default_factory=list)

    def mask(self, out: Words) -> None:
        set_bits(out, self._next())

    def consume(self, token: int) -> bool:
        if token not in self._next():
            return False
        self.came.append(token)
        return True

    def copy(self) -> RunsMatcher:
        return RunsMatcher(self.seed, self.vocabulary, self.forced, list(self.came))

    def forced_tokens(self) -> list[int]:
        ahead, found = self.copy(), list[int]()
        while len(only := ahead._next()) == 1:
            found += only
            ahead.consume(only[0])
        return found

    @property
    def is_stopped(self) -> bool:
        return False

    def _next(self) -> list[int]:
        if len(self.came) % (1 + self.forced) == 0:
            return list(range(0, self.vocabulary, 2))
        return [(self.seed + 31 * self.came[-1] + 7 * len(self.came)) % self.vocabulary]


class RunsConstraint:
    def __init__(self, source: str) -> None:
        self._numbers = [int(number) for number in source.split()]

    def matcher(self) -> RunsMatcher:
        return RunsMatcher(*self._numbers)


class RunsBackend:
    name, version = NAME, VERSION

    def compile(self, source: str) -> RunsConstraint:
        return RunsConstraint(source)


@dataclass
class Answer:
    slot: int
    prompt: list[int]
    limit: int
    wish: Sampling
    outputs: list[int] = field(default_factory=list)
    bursts: list[int] = field(default_factory=list)
    """Tokens of each step."""


@dataclass
class StepsByHand:
    """Each slot has `BLOCKS` blocks of its own. Two steps are in flight."""

    executor: Executor
    step: int = 0
    epoch: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    """By epoch."""
    results: list[StepResult] = field(default_factory=list)
    _in_flight: deque[int] = field(default_factory=deque)

    def begin(self, *answers: Answer, decodes: bool = True, stops: tuple[int, ...] = ()) -> None:
        """One step that stops slots, starts these and feeds all that they have, beside the others if `decodes`."""
        stopped = [Stop(answer.slot, epoch) for epoch, answer in self.answers.items() if answer.slot in stops]
        for stop in stopped:
            self._ended(stop.epoch)
        running = dict(self.answers) if decodes else {}
        starts, chunks = [], []
        for answer in answers:
            self.epoch += 1
            self.answers[self.epoch] = answer
            tokens = [*answer.prompt, *answer.outputs]
            table = np.arange(BLOCKS * answer.slot, BLOCKS * (answer.slot + 1), dtype=np.int32)
            starts.append(
                Start(
                    answer.slot, self.epoch, frozen_tokens(tokens), len(answer.prompt), 0, answer.limit, answer.wish, table
                )
            )  # fmt: skip
            chunks.append(Chunk(answer.slot, self.epoch, 0, len(tokens), True))
        self._launch(tuple(stopped), tuple(starts), tuple(chunks), running)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._launch((), (), (), self.answers)

    def drain(self) -> None:
        while self._in_flight:
            self._collect()

    def preempt(self, slot: int) -> Answer:
        """Stop the slot; its tokens are those that the executor says it knows."""
        ((epoch, answer),) = [(epoch, answer) for epoch, answer in self.answers.items() if answer.slot == slot]
        self._launch((Stop(slot, epoch),), (), (), {})
        self.drain()
        assert self.results[-1].outcomes[0] == RowOutcome.PREEMPTED
        assert self.results[-1].known[0] == len(answer.prompt) + len(answer.outputs)
        del self.answers[epoch]
        return answer

    def _ended(self, epoch: int) -> None:
        self.drain()
        del self.answers[epoch]

    def _launch(
        self,
        stops: tuple[Stop, ...],
        starts: tuple[Start, ...],
        chunks: tuple[Chunk, ...],
        decoding: dict[int, Answer],
    ) -> None:
        self.step += 1
        slots = [answer.slot for answer in decoding.values()]
        self.executor.launch(
            StepPlan(
                self.step, self.step - 1, stops=stops, starts=starts, chunks=chunks,
                decode_slots=np.array(slots, dtype=np.int32) if slots else NO_INT32S,
                decode_epochs=np.array(list(decoding), dtype=np.int64),
            )
        )  # fmt: skip
        self._in_flight.append(self.step)
        if len(self._in_flight) == 2:
            self._collect()

    def _collect(self) -> None:
        self._in_flight.popleft()
        result, at = self.executor.collect(), 0
        self.results.append(result)
        for epoch, count in zip(result.epochs.tolist(), result.counts.tolist(), strict=True):
            tokens, at = result.tokens[at : at + count].tolist(), at + count
            if epoch in self.answers:
                self.answers[epoch].outputs += tokens
                self.answers[epoch].bursts.append(count)


def undisturbed(executor: Executor, answers: list[Answer]) -> list[list[int]]:
    """Each answer up to its limit, one token a step, one after the other in its slot."""
    found = []
    for answer in answers:
        alone = StepsByHand(executor, *_where(found))
        fresh = Answer(0, answer.prompt, answer.limit, answer.wish)
        alone.begin(fresh)
        alone.decode(answer.limit - len(answer.prompt))
        alone.preempt(0)
        found.append((fresh.outputs, alone.step, alone.epoch))
    return [outputs for outputs, _, _ in found]


def _where(found: list[tuple[list[int], int, int]]) -> tuple[int, int]:
    return (found[-1][1], found[-1][2]) if found else (0, 0)
