"""A small engine in memory: it plays a script of bursts for each submission and honours the protocol.

A script is a function from a submission to the token ids it will give. The engine cuts them into bursts, ends at stop
tokens and at max_tokens, continues after what was generated elsewhere, invents log-probabilities when asked, and notes
what was stopped and aborted. As the real one, it goes on for a while after a stop, then tells how the stream ended and what
it cost. Where told to, it ends an attempt early with a fault, as an instance does that cannot hold a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import numpy as np

from baton.api.engine import EngineDead, EngineInfo, Gauges, NotServing, Sink, StreamEnd, TokenBurst
from baton.api.logprob_columns import TokenLogprob
from baton.api.original_request import OriginalRequest
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import FinishReason, PromptLogprobs, Submission
from baton.core.errors import Refusal, Refused
from baton.core.handover.faults import PdFault

Script = Callable[[Submission], Sequence[int]]


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, submission: Submission) -> None:
        self.submission = submission
        self.kept: int | None = None
        self.aborted = False
        self.ended = False
        self._engine = engine
        self._let_go = asyncio.Event()

    def stop(self, keep: int) -> None:
        self.kept = keep if self.kept is None else self.kept
        self._let_go.set()

    def abort(self) -> None:
        self.aborted = self.aborted or not self.ended
        self._let_go.set()

    def pour(self, sink: Sink) -> None:
        self._pouring = asyncio.create_task(self._pour(sink))

    async def _pour(self, sink: Sink) -> None:
        try:
            async for burst in self._bursts():
                sink(burst)
        except Exception as error:  # noqa: BLE001  whatever it is, the answer hears of it
            sink(error)

    async def _bursts(self) -> AsyncIterator[TokenBurst]:
        tokens, reason = self._plan()
        engine, size = self._engine, self._engine.burst_tokens
        chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)] or [()]
        if reason is FinishReason.RESCHEDULE and engine.faults_come_alone:
            chunks.append(())
        for part in self._prompt():
            yield TokenBurst((), (), None, prompt_logprobs=(part,))
        for number, chunk in enumerate(chunks):
            await self._pause(number * size)
            last = number == len(chunks) - 1
            if self._let_go.is_set() and not last:
                yield TokenBurst(chunk, (), None)  # it was in flight
                await asyncio.sleep(engine.pause_s)
                self.ended = True
                yield TokenBurst((), (), self._end(FinishReason.ABORT if self.aborted else FinishReason.STOP))
                return
            self.ended = last
            yield TokenBurst(
                chunk,
                tuple(self._logprob(token) for token in chunk) if self.submission.sampling.logprobs is not None else (),
                self._end(reason) if last else None,
                cached_tokens=engine.cached_tokens,
            )

    def _end(self, reason: FinishReason) -> StreamEnd:
        fault = self._engine.fault(self.submission) if reason is FinishReason.RESCHEDULE else None
        return StreamEnd(reason, self._engine.cached_tokens, self._engine.bill(self.submission), fault)

    def _plan(self) -> tuple[tuple[int, ...], FinishReason]:
        sampling, limit = self.submission.sampling, self.submission.max_tokens
        if limit is None:
            limit = self._engine.info.context_tokens - len(self.submission.prompt)
        tokens: list[int] = []
        had = len(self.submission.generated)
        if self._engine.fault(self.submission) is not None:
            return tuple(self._engine.script(self.submission))[had:], FinishReason.RESCHEDULE
        for token in self._engine.script(self.submission):
            tokens.append(token)
            if token in sampling.stop_token_ids:
                return tuple(tokens[had:]), FinishReason.STOP
            if len(tokens) == limit:
                break
        return tuple(tokens[had:]), self._engine.reason or FinishReason.LENGTH

    async def _pause(self, done: int) -> None:
        engine = self._engine
        if engine.dies_after is not None and done >= engine.dies_after:
            engine.death = NotServing("killed by the test")
            raise EngineDead(str(engine.death))
        if engine.hangs_after is not None and done >= engine.hangs_after:
            await self._let_go.wait()
        await asyncio.sleep(engine.pause_s)

    def _prompt(self) -> Iterator[PromptLogprobs]:
        """Log-probabilities of the prompt, in parts; some come again, as after a move, and differ a little."""
        prompt, asked = self.submission.prompt, self.submission.sampling.prompt_logprobs
        if asked is None or len(self.submission.generated) or self._engine.loses_prompts:
            return
        first = range(1, min(len(prompt), 4))
        for value, places in ((-0.25, first), (-0.26, range(1, len(prompt)))):
            if not len(places):
                continue
            tokens = prompt[places.start : places.stop]
            top_ids = (tokens[:, None] + np.arange(asked, dtype=np.int32)) % self._engine.info.vocabulary
            top = np.float32(value) - np.arange(asked, dtype=np.float32) + np.zeros_like(top_ids, dtype=np.float32)
            chosen, ranks = np.full(len(tokens), value, dtype=np.float32), np.full(len(tokens), 1, dtype=np.int32)
            yield PromptLogprobs(0, places.start, chosen, ranks, top_ids, top)

    def _logprob(self, token: int) -> TokenLogprob:
        count = self.submission.sampling.logprobs or 0
        top = tuple(((token + i) % self._engine.info.vocabulary, -0.5 - i) for i in range(count))
        return TokenLogprob(token, -0.5, top)


class ScriptedEngine:
    def __init__(self, script: Script, vocabulary: int, context_tokens: int = 512) -> None:
        self.info = EngineInfo(context_tokens, vocabulary, slots=64, blocks=256, block_size=16)
        self.script = script
        self.burst_tokens = 1
        self.pause_s = 0.0
        self.cached_tokens = 0
        self.bill: Callable[[Submission], Bill] = lambda _: Bill()
        self.gauges = Gauges(
            SchedulerGauges(
                running=2,
                waiting=1,
                free_blocks=192,
                running_blocks=64,
                prefix_queries=7,
                preemptions_for_others=3,
                recomputed_tokens=41,
                chunk_prefill_unsatisfied=5,
                reserve_ratio=0.25,
            ),
            victim_policy="newest",
        )
        self.reason: FinishReason | None = None
        self.fault: Callable[[Submission], PdFault | None] = lambda _: None
        """Whose attempt ends after the script, and how."""
        self.loses_prompts = False
        """Log-probabilities of prompts never come."""
        self.faults_come_alone = False
        """Else with the last tokens."""
        self.dies_after: int | None = None
        self.hangs_after: int | None = None
        self.refusal: Refusal | None = None
        self.death: NotServing | None = None
        self.draining = False
        self.groups: list[list[Submission]] = []
        self.origins: list[OriginalRequest | None] = []
        self.streams: list[ScriptedStream] = []

    async def submit(self, group: Sequence[Submission], origin: OriginalRequest | None = None) -> list[ScriptedStream]:
        self.origins.append(origin)
        if self.death is not None:
            raise EngineDead(str(self.death))
        if self.refusal is not None:
            raise Refused(self.refusal)
        self.groups.append(list(group))
        streams = [ScriptedStream(self, submission) for submission in group]
        self.streams += streams
        return streams
