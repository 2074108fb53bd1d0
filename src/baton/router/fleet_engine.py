"""A whole fleet as one engine for the HTTP surface.

Implements `api.engine.Engine` and `api.stream_resume.UnclaimedRequests`. Owns the requests of this router's clients, each
with one stream per choice, and the unclaimed requests of an earlier router. The router decides where a choice runs and what
happens when an instance is lost; here tokens become bursts, and calls of clients become orders. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from baton.api.engine import (
    ROUTER,
    UNKNOWN_CONTEXT,
    EngineDead,
    EngineInfo,
    Gauges,
    NotServing,
    StreamEnd,
    TokenBurst,
    TokenStream,
)
from baton.api.original_request import BadOrigin, OriginalRequest, decode_origin
from baton.api.stream_resume import UnclaimedRequest
from baton.api.submissions import RequestOwner
from baton.core.config import ROLES
from baton.core.engine.gauges import HandoverGauges, SchedulerGauges
from baton.core.engine.request import FinishReason, PromptLogprobs, Submission
from baton.core.errors import InvariantViolated, Refusal, RefusalCode, Refused
from baton.core.routing.events import (
    ChoiceOutcome,
    DeliverTokens,
    FleetChanged,
    RequestDeclined,
    RequestOpened,
    TimelineNoted,
    TimelineStage,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.expected_instances import ExpectedInstances
from baton.core.routing.fleet_members import InstanceView
from baton.core.routing.identity import RequestNumber
from baton.core.routing.router import SETTLE_US
from baton.node.dashboard_state import DashboardState
from baton.node.token_streams import BufferedTokenStream, ended_of, logprobs_of
from baton.router.instance_connections import InstanceConnections
from baton.router.lifetime_totals import LifetimeTotals
from baton.wire.engine_messages import LogprobLine
from baton.wire.router_sessions import Act

log = logging.getLogger("baton.router")

RoutedChoiceKey = tuple[RequestNumber, int]
"""A request and one of its choices."""


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that is not over."""

    number: RequestNumber
    owner: RequestOwner
    streams: list[BufferedTokenStream[RoutedChoiceKey]]
    opening: asyncio.Future[None] | None
    """Resolved when the request is accepted or refused; None where no submitter waits."""
    ends: list[FinishReason | None]
    """By choice: the finish reason decided here (stopped or aborted); None while it runs."""
    over: list[bool]
    """By choice: whether its stream has the last burst."""
    places: list[tuple[str, ...]]
    """By choice: the instances it ran on, for the access log."""


@dataclass(slots=True, eq=False)
class _UnclaimedEntry:
    open: _OpenRequest
    found: UnclaimedRequest


class FleetEngine:
    def __init__(self, connections: InstanceConnections, state: DashboardState, vocabulary: int) -> None:
        """`vocabulary` is the tokenizer's; prompts are checked against it before any instance has joined."""
        self._connections = connections
        self._state = state
        self._requests: dict[RequestNumber, _OpenRequest] = {}
        self._unclaimed: dict[RequestOwner, _UnclaimedEntry] = {}
        self._totals = LifetimeTotals()
        self._began_us = connections.clock_us()
        self.info = EngineInfo(UNKNOWN_CONTEXT, vocabulary, slots=0, blocks=0, block_size=0, carries=True)
        self._found = asyncio.Event()
        self._request_closed = asyncio.Event()
        self.draining = False
        connections.watch(self._take)

    # ── the Engine protocol ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def death(self) -> NotServing | None:
        return self._connections.death

    @property
    def gauges(self) -> Gauges:
        router, views = self._connections.router_sessions.router, self.sample_views()
        ledgers = [view.ledger for view in views]
        return Gauges(
            SchedulerGauges(
                running=sum(one.running for one in ledgers),
                waiting=sum(one.waiting for one in ledgers) + router.waiting,
                free_blocks=sum(one.free_blocks for one in ledgers),
                evictable_blocks=sum(one.evictable_blocks for one in ledgers),
                running_blocks=sum(one.running_blocks for one in ledgers),
                leased_blocks=sum(one.leased_blocks for one in ledgers),
                receiving_blocks=sum(one.receiving_blocks for one in ledgers),
                leaving_blocks=sum(one.leaving_blocks for one in ledgers),
                prefix_queries=self._totals.of("prefix_queries"),
                prefix_hits=self._totals.of("prefix_hits"),
                steps=self._totals.of("steps"),
                handovers=HandoverGauges(made=self._totals.of("handovers")),
            ),
            stalls=router.counts.suspicions["stuck"],
            role=ROUTER,
            fleet_preemptions=self._totals.of("preemptions"),
        )

    async def submit(self, group: Sequence[Submission], origin: OriginalRequest | None = None) -> list[TokenStream]:
        if origin is None:
            raise InvariantViolated("a router cannot carry a request whose origin it does not know")
        owner = RequestOwner(origin.tenant, origin.request_id)
        self._check(owner)
        opening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        made: list[_OpenRequest] = []

        def on_number(number: RequestNumber, now_us: int) -> None:
            made.append(self._begin(number, owner, len(group), opening))
            prompt_tokens = sum(len(one.prompt) for one in group if one.leader is None)
            self._state.request_received(number, origin.request_id, origin.path, prompt_tokens, len(group), now_us)

        self._connections.submit(origin.tenant, group, origin.encode(), on_number)
        try:
            await opening
        except asyncio.CancelledError:
            self._leave(made[0])
            raise
        return list[TokenStream](made[0].streams)

    def _check(self, owner: RequestOwner) -> None:
        self._connections.refuse_if_dead()
        if self.draining:
            raise Refused(Refusal(RefusalCode.DRAINING, "this router is being stopped", retry_after_s=1))
        if owner in self._unclaimed:
            message = f"the request id '{owner.request_id}' is in use: its answer waits to be resumed"
            raise Refused(Refusal(RefusalCode.DUPLICATE_ID, message))

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self, key: RoutedChoiceKey, keep: int) -> None:
        number, choice = key
        entry = self._requests.get(number)
        if entry is not None and entry.ends[choice] is None:
            entry.ends[choice] = FinishReason.STOP
            self._connections.stop_choice(number, choice, keep)

    def abort(self, key: RoutedChoiceKey) -> None:
        """Abort a choice. Once every choice is over or aborted, the request is cancelled."""
        number, choice = key
        entry = self._requests.get(number)
        if entry is None or entry.over[choice]:
            return
        if entry.ends[choice] is None:
            entry.ends[choice] = FinishReason.ABORT
        if all(over or end is not None for over, end in zip(entry.over, entry.ends, strict=True)):
            self._leave(entry)

    def _leave(self, entry: _OpenRequest) -> None:
        if entry.number in self._requests:
            self._connections.leave(entry.number)
            self._drop(entry)

    def _drop(self, entry: _OpenRequest) -> None:
        """Forget the request; streams that are still read get an end."""
        for choice, (stream, over, end) in enumerate(zip(entry.streams, entry.over, entry.ends, strict=True)):
            if not over:
                stream.push(TokenBurst((), (), self._told(entry, choice, StreamEnd(end or FinishReason.ABORT, 0))))
        self._close(entry)

    # ── events of the router ─────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, act: Act, now_us: int) -> None:
        self._state.take(act, now_us)
        match act:
            case DeliverTokens():
                self._delivered(act)
            case RequestOpened(number):
                entry = self._requests.get(number)
                if entry is not None and entry.opening is not None and not entry.opening.done():
                    entry.opening.set_result(None)
            case RequestDeclined(number, refusal):
                self._declined(number, refusal)
            case UnclaimedFound():
                self._unclaimed_found(act)
            case UnclaimedDropped(number):
                self._unclaimed_dropped(number)
            case FleetChanged():
                self.info = info_of(self.views(), self.info)
            case TimelineNoted(number, choice, TimelineStage.PLACED | TimelineStage.RESUMED, where) if where is not None:
                entry = self._requests.get(number)
                if entry is not None and entry.places[choice][-1:] != (where,):
                    entry.places[choice] += (where,)
            case _:
                pass

    def _begin(
        self, number: RequestNumber, owner: RequestOwner, choices: int, opening: asyncio.Future[None] | None
    ) -> _OpenRequest:
        streams = [BufferedTokenStream(self, (number, choice)) for choice in range(choices)]
        entry = _OpenRequest(number, owner, streams, opening, [None] * choices, [False] * choices, [()] * choices)
        self._requests[number] = entry
        return entry

    def _close(self, entry: _OpenRequest) -> None:
        self._requests.pop(entry.number, None)
        self._request_closed.set()

    def _delivered(self, act: DeliverTokens) -> None:
        entry = self._requests.get(act.request)
        if entry is None:
            return
        stream, unclaimed = entry.streams[act.choice], self._unclaimed.get(entry.owner)
        lines = _lines(act.extras)
        if lines is not None and len(lines) < len(act.tokens):
            # Reported late by an instance to which it had moved: of earlier tokens only the ids are known.
            if unclaimed is None:
                stream.fail("log-probabilities were lost with an instance")
                return
            unclaimed.found.logprobs_from[act.choice] = len(act.tokens) - len(lines)
        outcome = act.outcome
        if outcome is not None and outcome.reason is FinishReason.ABORT:
            outcome = self._with_times(outcome, act)
        for burst in bursts_of(tuple(act.tokens), lines, act.cached_tokens, outcome, _parts(act.prompt_extras)):
            ended = None if burst.ended is None else self._told(entry, act.choice, burst.ended)
            stream.push(burst if ended is None else replace(burst, ended=ended))
        if act.outcome is not None:
            entry.over[act.choice] = True
            if all(entry.over) and unclaimed is None:
                self._close(entry)

    def _told(self, entry: _OpenRequest, choice: int, ended: StreamEnd) -> StreamEnd:
        """With where it ran, and when."""
        return replace(ended, places=entry.places[choice], history=self._state.timeline(entry.number, choice))

    def _with_times(self, outcome: ChoiceOutcome, act: DeliverTokens) -> ChoiceOutcome:
        """A cancelled choice gets no bill of the instance that it was at: its times are those that were seen from here."""
        times = self._state.phases(act.request, act.choice)
        if times is None:
            return outcome
        bill = msgspec.structs.replace(
            outcome.bill, queue_us=times.queue_us, prefill_us=times.prefill_us, decode_us=times.decode_us
        )
        return msgspec.structs.replace(outcome, bill=bill)

    def _declined(self, number: RequestNumber, refusal: Refusal) -> None:
        entry = self._requests.get(number)
        if entry is None or entry.opening is None:
            return
        self._close(entry)
        if not entry.opening.done():
            entry.opening.set_exception(Refused(refusal))

    # ── the UnclaimedRequests protocol ───────────────────────────────────────────────────────────────────────────────────

    async def find(self, owner: RequestOwner) -> UnclaimedRequest | None:
        while owner not in self._unclaimed:
            # Before an id is denied, instances that may hold it must have had time to join.
            left_us = self._began_us + SETTLE_US - self._connections.clock_us()
            if left_us <= 0:
                return None
            self._found.clear()
            try:
                await asyncio.wait_for(self._found.wait(), left_us / 1e6)
            except TimeoutError:
                return None
        return self._unclaimed[owner].found

    def claim(self, owner: RequestOwner, group: Sequence[Submission]) -> list[TokenStream]:
        self._connections.refuse_if_dead()
        unclaimed = self._unclaimed.pop(owner, None)
        if unclaimed is None:
            raise Refused(Refusal(RefusalCode.DUPLICATE_ID, "somebody else has just come for it"))
        entry = unclaimed.open
        self._connections.claim(entry.number, group)
        if all(entry.over):
            self._close(entry)
        return list[TokenStream](entry.streams)

    def drop(self, owner: RequestOwner) -> bool:
        unclaimed = self._unclaimed.pop(owner, None)
        if unclaimed is None:
            return False
        self._leave(unclaimed.open)
        return True

    def _unclaimed_found(self, act: UnclaimedFound) -> None:
        try:
            origin = decode_origin(act.origin)
        except BadOrigin as error:
            log.error("an instance holds a request that cannot be resumed: %s", error)
            asyncio.get_running_loop().call_soon(self._connections.leave, act.request)
            return
        owner = RequestOwner(origin.tenant, origin.request_id)
        known = self._requests.get(act.request)
        if known is not None:
            self._close(known)
        entry = self._begin(act.request, owner, len(act.delivered), None)
        for choice, stream in enumerate(entry.streams):
            entry.over[choice] = act.outcomes[choice] is not None
            for burst in history_of(act, choice):
                stream.push(burst)
        self._unclaimed[owner] = _UnclaimedEntry(entry, UnclaimedRequest(origin, _logprobs_from(act)))
        self._found.set()

    def _unclaimed_dropped(self, number: RequestNumber) -> None:
        entry = self._requests.get(number)
        if entry is not None:
            self._unclaimed.pop(entry.owner, None)
            self._drop(entry)

    # ── for the router's service ─────────────────────────────────────────────────────────────────────────────────────────

    def views(self) -> list[InstanceView]:
        return self._connections.router_sessions.router.views()

    @property
    def expected(self) -> ExpectedInstances:
        return self._connections.router_sessions.router.expected

    def sample_views(self) -> list[InstanceView]:
        """`views`, and update the lifetime totals. Call regularly: counts of an instance that was never looked at are
        lost."""
        self._totals.update(views := self.views())
        return views

    def request_id(self, number: RequestNumber) -> str:
        """The client's id of an open request; "-" where it is over."""
        entry = self._requests.get(number)
        return "-" if entry is None else entry.owner.request_id

    @property
    def unclaimed(self) -> int:
        return len(self._unclaimed)

    @property
    def open_requests(self) -> int:
        """Requests with a client."""
        return len(self._requests) - len(self._unclaimed)

    async def wait_idle(self) -> None:
        while self.open_requests:
            self._request_closed.clear()
            await self._request_closed.wait()

    def give_up(self) -> None:
        """The router stops now: open streams end with an error. Nothing is cancelled."""
        error, reason = self._ending()
        for entry in list(self._requests.values()):
            if entry.opening is not None and not entry.opening.done():
                entry.opening.set_exception(error)
            for stream, over in zip(entry.streams, entry.over, strict=True):
                if not over:
                    stream.fail(reason)
        self._requests, self._unclaimed = {}, {}
        self._request_closed.set()

    def _ending(self) -> tuple[EngineDead | Refused, str]:
        """For requests that wait to be accepted, and for open streams."""
        if (death := self.death) is not None:
            return EngineDead(str(death)), str(death)
        refusal = Refusal(RefusalCode.DRAINING, "this router was stopped", 1)
        if absent := self.expected.missing:
            text = f"{refusal.message}, and {absent} of {self.expected.number} expected instances never came"
            return Refused(replace(refusal, code=RefusalCode.NO_INSTANCE, message=text)), refusal.message
        return Refused(refusal), refusal.message


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def info_of(views: Sequence[InstanceView], before: EngineInfo) -> EngineInfo:
    """What every serving instance supports; while there is none, `before`."""
    serving = [view.facts for view in views if ROLES[view.facts.role].serves]
    if not serving:
        return before
    return EngineInfo(
        context_tokens=min(facts.context_tokens for facts in serving),
        vocabulary=serving[0].vocabulary,
        slots=sum(facts.slots for facts in serving),
        blocks=sum(facts.blocks for facts in serving),
        block_size=serving[0].block_size,
        carries=True,
    )


def bursts_of(
    tokens: tuple[int, ...],
    lines: Sequence[LogprobLine] | None,
    cached_tokens: int | None,
    outcome: ChoiceOutcome | None,
    prompt: Sequence[PromptLogprobs] = (),
) -> list[TokenBurst]:
    """Usually one burst. Tokens whose log-probabilities were lost come first, in a burst of their own."""
    ended = None if outcome is None else ended_of(outcome)
    bare = 0 if lines is None else len(tokens) - len(lines)
    rest = TokenBurst(tokens[bare:], logprobs_of(tokens[bare:], lines), ended, cached_tokens, prompt)
    return [TokenBurst(tokens[:bare], (), None, cached_tokens), rest] if bare else [rest]


def _lines(extras: object) -> Sequence[LogprobLine] | None:
    """The router's extras are a list of log-probabilities or empty."""
    return extras if isinstance(extras, Sequence) and len(extras) else None


def history_of(act: UnclaimedFound, choice: int) -> list[TokenBurst]:
    """The whole output of a choice so far."""
    tokens, cached, outcome = act.delivered[choice], act.cached_tokens[choice], act.outcomes[choice]
    if tokens is None:
        return []
    prompt = _parts(act.prompt_extras[choice]) if act.prompt_extras else ()
    return bursts_of(tokens, _lines(act.extras[choice]), cached, outcome, prompt)


def _parts(extras: object) -> Sequence[PromptLogprobs]:
    """The router's prompt extras are a tuple of log-probabilities or None."""
    return extras if isinstance(extras, tuple) else ()


def _logprobs_from(act: UnclaimedFound) -> list[int]:
    """By choice: the index of the first token with log-probabilities. Where they were asked for, the last token has some."""
    return [
        len(tokens or ()) - len(extras) if extras else 0 for tokens, extras in zip(act.delivered, act.extras, strict=True)
    ]
