"""An engine for the HTTP surface whose requests the dashboard shows.

A burst of tokens costs one more call here: tokens are counted by choice, and given to the dashboard's state when the first
one comes, at the end, and at every `sample`. When a prefill began is known from the bill, so it is shown from the end on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.api.engine import Engine, EngineInfo, Gauges, NotServing, Sink, TokenBurst, TokenStream
from baton.api.original_request import OriginalRequest
from baton.core.engine.gauges import SchedulerGauges
from baton.core.engine.request import Submission
from baton.core.errors import Refused
from baton.core.routing.events import FleetChanged, Instance, Join, RequestDeclined, TimelineNoted, TimelineStage
from baton.core.routing.identity import RequestNumber
from baton.node.dashboard_state import DashboardState


@dataclass(frozen=True, slots=True)
class OwnView:
    """This instance, as the dashboard shows one."""

    facts: Join
    ledger: SchedulerGauges
    state: str
    open: int


class WatchedEngine:
    def __init__(self, engine: Engine, state: DashboardState, facts: Join, clock_us: Callable[[], int]) -> None:
        self._engine = engine
        self._state = state
        self._facts = facts
        self._clock_us = clock_us
        self._numbers = 0
        self._open: dict[WatchedStream, None] = {}
        state.take(FleetChanged(facts.name, facts.incarnation, "joined", facts.role), clock_us())

    # ── the Engine protocol ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def death(self) -> NotServing | None:
        return self._engine.death

    @property
    def draining(self) -> bool:
        return self._engine.draining

    @property
    def gauges(self) -> Gauges:
        return self._engine.gauges

    async def submit(self, group: Sequence[Submission], origin: OriginalRequest | None = None) -> list[TokenStream]:
        if origin is None:
            return await self._engine.submit(group)
        self._numbers += 1
        number, began_us = RequestNumber(self._numbers), self._clock_us()
        prompt_tokens = sum(len(one.prompt) for one in group if one.leader is None)
        self._state.request_received(number, origin.request_id, origin.path, prompt_tokens, len(group), began_us)
        self._note_all(number, len(group), TimelineStage.QUEUED, None, began_us)
        try:
            streams = await self._engine.submit(group, origin)
        except Refused as error:
            self._state.take(RequestDeclined(number, error.refusal), self._clock_us())
            raise
        except BaseException as error:
            self._note_all(number, len(group), TimelineStage.ENDED, None, self._clock_us(), type(error).__name__)
            raise
        self._note_all(number, len(group), TimelineStage.PLACED, self._facts.name, began_us)
        watched = [WatchedStream(self, stream, number, choice, began_us) for choice, stream in enumerate(streams)]
        self._open.update(dict.fromkeys(watched))
        return list[TokenStream](watched)

    # ── for the dashboard ────────────────────────────────────────────────────────────────────────────────────────────────

    def view(self) -> OwnView:
        state = "draining" if self.draining else "ready"
        return OwnView(self._facts, self.gauges.scheduler, state, len({stream.number for stream in self._open}))

    def sample(self) -> None:
        """Call once a second."""
        now_us = self._clock_us()
        for stream in self._open:
            self._give(stream, now_us)
        self._state.sample([self.view()], 0, now_us)

    def turned(self, stream: WatchedStream, burst: TokenBurst | Exception) -> None:
        """A stream has begun or ended."""
        now_us = self._clock_us()
        self._give(stream, now_us)
        if isinstance(burst, TokenBurst) and burst.ended is None:
            return
        self._open.pop(stream, None)
        if isinstance(burst, Exception):
            self._note(stream.number, stream.choice, TimelineStage.ENDED, None, now_us, str(burst))
        elif burst.ended is not None:
            bill = burst.ended.bill
            if bill.prefill_us:
                at_us = stream.began_us + bill.queue_us
                self._note(stream.number, stream.choice, TimelineStage.PREFILL, self._facts.name, at_us)
            self._note(stream.number, stream.choice, TimelineStage.ENDED, None, now_us, burst.ended.reason.value)

    def _give(self, stream: WatchedStream, now_us: int) -> None:
        tokens, stream.tokens = stream.tokens, 0
        if tokens:
            self._state.count_tokens(stream.number, stream.choice, tokens, now_us)

    def _note_all(
        self, number: RequestNumber, choices: int, stage: TimelineStage, where: Instance | None, at_us: int, why: str = ""
    ) -> None:
        for choice in range(choices):
            self._note(number, choice, stage, where, at_us, why)

    def _note(
        self, number: RequestNumber, choice: int, stage: TimelineStage, where: Instance | None, at_us: int, why: str = ""
    ) -> None:
        self._state.take(TimelineNoted(number, choice, stage, where, at_us, why), at_us)


class WatchedStream:
    """A TokenStream that counts its tokens."""

    __slots__ = ("_engine", "_has_begun", "_inner", "_sink", "began_us", "choice", "number", "tokens")

    def __init__(self, engine: WatchedEngine, inner: TokenStream, number: RequestNumber, choice: int, began_us: int) -> None:
        self._engine = engine
        self._inner = inner
        self._has_begun = False
        self._sink: Sink | None = None
        self.number = number
        self.choice = choice
        self.began_us = began_us
        self.tokens = 0
        """Of those that came, how many the dashboard's state does not know yet."""

    def pour(self, sink: Sink) -> None:
        self._sink = sink
        self._inner.pour(self._take)

    def stop(self, keep: int) -> None:
        self._inner.stop(keep)

    def abort(self) -> None:
        self._inner.abort()

    def _take(self, burst: TokenBurst | Exception) -> None:
        if isinstance(burst, TokenBurst):
            self.tokens += len(burst.tokens)
            if burst.ended is not None or (self.tokens and not self._has_begun):
                self._has_begun = True
                self._engine.turned(self, burst)
        else:
            self._engine.turned(self, burst)
        if self._sink is not None:
            self._sink(burst)
