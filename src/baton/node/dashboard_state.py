"""The state that the dashboard shows, collected from a router's effects: instances, gauges over time, requests, events.

A lone instance gives it the same effects (`watched_engine`).

Owns bounded rings of all of it. Pure: no clock and no socket. Contains no text of prompts or answers. `snapshot(since)`
returns the changes after a revision, ready to be encoded as JSON. Costs one lookup per delivery.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from baton.api.original_request import BadOrigin, decode_origin
from baton.core.engine.gauges import SchedulerGauges
from baton.core.routing.events import (
    DeliverTokens,
    FleetChanged,
    Join,
    RequestDeclined,
    TimelineNoted,
    TimelineStage,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.identity import RequestNumber
from baton.node.choice_timeline import ChoiceTimeline, PhaseTimes
from baton.node.quantiles import QuantileWindow

SAMPLES = 300
"""One a second: five minutes."""
REQUESTS_MAX = 200
OPEN_MAX = 4096
"""Open requests that are followed; more are served, but not shown."""
LANES_MAX = 16
EVENTS_MAX = 100
INSTANCES_MAX = 64
GONE_US = SAMPLES * 1_000_000
"""Microseconds for which an instance that has left is shown: as long as its samples."""

LEFT = frozenset({"lost", "left", "suspected", "stuck", "fenced"})
T = TypeVar("T")

COUNTED = {TimelineStage.PREEMPTED: "preemptions", TimelineStage.HANDOVER: "handovers"}


class ShownInstance(Protocol):
    """The router's view of an instance in session."""

    @property
    def facts(self) -> Join: ...
    @property
    def ledger(self) -> SchedulerGauges: ...
    @property
    def state(self) -> str: ...
    @property
    def open(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Request:
    number: RequestNumber
    request_id: str
    path: str
    prompt_tokens: int | None
    """None for a request of a router that was lost."""
    choices: int
    began_us: int
    lanes: list[ChoiceTimeline]
    rev: int = 0
    open_lanes: int = 0

    def shown(self) -> dict[str, object]:
        return {
            "body": self.number,
            "id": self.request_id,
            "path": self.path,
            "prompt_tokens": self.prompt_tokens,
            "choices": self.choices,
            "began_us": self.began_us,
            "lanes": [lane.shown() for lane in self.lanes],
        }


@dataclass(slots=True, eq=False)
class _InstanceHistory:
    """An instance, over all of its incarnations."""

    facts: Join
    ledger: SchedulerGauges
    state: str
    open: int
    lives: int
    seen_us: int
    samples: deque[tuple[int, list[int]]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(revision, [at_us, free, evictable, used, leased, receiving, leaving, running, waiting])"""

    def shown(self) -> dict[str, object]:
        facts, ledger = self.facts, self.ledger
        return {
            "name": facts.name,
            "role": facts.role,
            "state": self.state,
            "incarnation": str(facts.incarnation),  # exceeds JavaScript's safe integers
            "lives": self.lives,
            "pid": facts.pid,
            "url": facts.url,
            "slots": facts.slots,
            "blocks": facts.blocks,
            "block_size": facts.block_size,
            "open": self.open,
            "seen_us": self.seen_us,
            "running": ledger.running,
            "waiting": ledger.waiting,
            "ledger": _blocks(ledger),
            "host_blocks": ledger.storage.host_rows,
            "host_used": ledger.storage.host_used,
            "preemptions": ledger.preemptions,
            "handovers": ledger.handovers.made,
            "prefix_queries": ledger.prefix_queries,
            "prefix_hits": ledger.prefix_hits,
        }


class DashboardState:
    def __init__(self, started_us: int, window_s: int = 60) -> None:
        self._started_us = started_us
        self._rev = 0
        self._requests: dict[RequestNumber, _Request] = {}
        self._ended: deque[RequestNumber] = deque()
        self._instances: dict[str, _InstanceHistory] = {}
        self._events: deque[tuple[int, dict[str, object]]] = deque(maxlen=EVENTS_MAX)
        self._fleet: deque[tuple[int, list[int | None]]] = deque(maxlen=SAMPLES)
        """(revision, [at_us, waiting, open, tokens, ttft_p50, ttft_p95, tpot_p50, tpot_p95, moves])"""
        self._totals = {"requests": 0, "tokens": 0, "moves": 0, "preemptions": 0, "handovers": 0}
        self._sampled = dict(self._totals)
        """`_totals` at the last sample."""
        self._first_token = QuantileWindow(window_s)
        self._per_token = QuantileWindow(window_s)

    # ── events of the router ─────────────────────────────────────────────────────────────────────────────────────────────

    def request_received(
        self, number: RequestNumber, request_id: str, path: str, prompt_tokens: int, choices: int, now_us: int
    ) -> None:
        """Follow a client's new request."""
        self._totals["requests"] += 1
        self._follow(_Request(number, request_id, path, prompt_tokens, choices, now_us, _lanes(choices)))

    def take(self, act: object, now_us: int) -> None:
        """Take any act of the router; those that are not shown are ignored."""
        match act:
            case DeliverTokens():
                self._delivered(act, now_us)
            case TimelineNoted():
                self._noted(act)
            case FleetChanged():
                self._fleet_changed(act, now_us)
            case RequestDeclined(number, refusal):
                self._end_all(number, f"declined: {refusal.code.value}", now_us)
            case UnclaimedFound():
                self._found(act, now_us)
            case UnclaimedDropped(number):
                self._end_all(number, "dropped: its router was lost, and nobody came for it", now_us)
            case _:
                pass

    def timeline(self, number: RequestNumber, choice: int) -> ChoiceTimeline | None:
        """The timeline of a choice; None where it is not followed."""
        request = self._requests.get(number)
        return None if request is None or choice >= len(request.lanes) else request.lanes[choice]

    def sample(self, views: Iterable[ShownInstance], waiting: int, now_us: int) -> None:
        """Sample gauges and latencies. Call once a second."""
        rev = self._next()
        for seen in self._instances.values():
            seen.state, seen.open = "gone", 0
        for view in views:
            self._update_instance(view, rev, now_us)
        self._forget_gone(now_us)
        since = {name: total - self._sampled[name] for name, total in self._totals.items()}
        self._sampled = dict(self._totals)
        ttft = self._first_token.quantiles((0.5, 0.95), now_us)
        tpot = self._per_token.quantiles((0.5, 0.95), now_us)
        counts = [waiting, len(self._requests) - len(self._ended), since["tokens"]]
        self._fleet.append((rev, [now_us, *counts, *ttft, *tpot, since["moves"]]))

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self, now_us: int, since: int = 0, epoch: str = "") -> dict[str, object]:
        """The changes after revision `since` of `epoch`; everything where the epoch is another router's."""
        if epoch != self.epoch or since > self._rev:
            since = 0
        return {
            "epoch": self.epoch,
            "rev": self._rev,
            "now_us": now_us,
            "started_us": self._started_us,
            "totals": dict(self._totals),
            "instances": [self._instances[name].shown() for name in sorted(self._instances)],
            "ledgers": {name: _after(seen.samples, since) for name, seen in self._instances.items()},
            "fleet": _after(self._fleet, since),
            "events": _after(self._events, since),
            "requests": [request.shown() for request in self._latest() if request.rev > since],
        }

    def phases(self, number: RequestNumber, choice: int) -> PhaseTimes | None:
        """Of an ended choice; None where it was not followed."""
        request = self._requests.get(number)
        return None if request is None or choice >= len(request.lanes) else request.lanes[choice].phases()

    @property
    def epoch(self) -> str:
        return str(self._started_us)

    def _latest(self) -> list[_Request]:
        latest = sorted(self._requests.values(), key=lambda request: (request.began_us, request.number))
        return latest[-REQUESTS_MAX:]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, request: _Request) -> None:
        if len(self._requests) - len(self._ended) >= OPEN_MAX:
            return
        request.open_lanes = len(request.lanes)
        request.rev = self._next()
        self._requests[request.number] = request

    def _found(self, unclaimed: UnclaimedFound, now_us: int) -> None:
        try:
            origin = decode_origin(unclaimed.origin)
        except BadOrigin:
            return
        choices = len(unclaimed.delivered)
        request = self._requests.get(unclaimed.request)
        if request is None:
            self._follow(request := _Request(unclaimed.request, "", "", None, choices, now_us, _lanes(choices)))
        more = _lanes(choices)[len(request.lanes) :]
        request.lanes += more
        request.open_lanes += len(more)
        request.request_id, request.path, request.choices, request.rev = (
            origin.request_id,
            origin.path,
            choices,
            self._next(),
        )
        for lane, tokens, outcome in zip(request.lanes, unclaimed.delivered, unclaimed.outcomes, strict=False):
            lane.found(len(tokens or ()), now_us)
            if outcome is not None and lane.end(now_us, outcome.reason.value):
                self._lane_ended(request)

    def _delivered(self, act: DeliverTokens, now_us: int) -> None:
        self.count_tokens(act.request, act.choice, len(act.tokens), now_us)
        request = self._requests.get(act.request)
        if request is None or act.choice >= len(request.lanes) or act.outcome is None:
            return
        if request.lanes[act.choice].end(now_us, act.outcome.reason.value):
            self._lane_ended(request)

    def count_tokens(self, number: RequestNumber, choice: int, count: int, now_us: int) -> None:
        """So many tokens of a choice have come since it was last told."""
        self._totals["tokens"] += count
        request = self._requests.get(number)
        if request is None or choice >= len(request.lanes):
            return
        lane = request.lanes[choice]
        if count:
            if lane.last_token_us is None:
                self._first_token.add(now_us - request.began_us, now_us)
            else:
                self._per_token.add((now_us - lane.last_token_us) // count, now_us, count)
            lane.delivered(count, now_us)
        request.rev = self._next()

    def _noted(self, note: TimelineNoted) -> None:
        if note.stage in COUNTED:
            self._totals[COUNTED[note.stage]] += 1
        request = self._requests.get(note.request)
        if request is None and note.stage is TimelineStage.RESUMED and note.choice < LANES_MAX:
            # Of a router that was lost. UnclaimedFound will bring its origin and its number of choices.
            request = _Request(note.request, "", "", None, note.choice + 1, note.at_us, _lanes(note.choice + 1))
            self._follow(request)
        if request is None or note.choice >= len(request.lanes):
            return
        lane = request.lanes[note.choice]
        if note.stage is TimelineStage.PLACED and lane.place:
            self._totals["moves"] += 1
        if not lane.note(note.stage, note.where or "", note.at_us, note.why):
            return
        request.rev = self._next()
        if note.stage is TimelineStage.ENDED:
            self._lane_ended(request)

    def _end_all(self, number: RequestNumber, finish: str, now_us: int) -> None:
        request = self._requests.get(number)
        if request is None:
            return
        for lane in request.lanes:
            if lane.end(now_us, finish):
                self._lane_ended(request)
        request.rev = self._next()

    def _lane_ended(self, request: _Request) -> None:
        request.open_lanes -= 1
        if request.open_lanes == 0:
            self._ended.append(request.number)
            if len(self._ended) > REQUESTS_MAX:
                del self._requests[self._ended.popleft()]

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fleet_changed(self, change: FleetChanged, now_us: int) -> None:
        name, incarnation = change.name, change.incarnation
        event = {"at_us": now_us, "name": name, "incarnation": str(incarnation), "what": change.what, "why": change.why}
        self._events.append((self._next(), event))
        seen = self._instances.get(name)
        if seen is not None and change.what in LEFT and seen.facts.incarnation == incarnation:
            seen.state, seen.open = "gone", 0

    def _update_instance(self, view: ShownInstance, rev: int, now_us: int) -> None:
        facts, ledger = view.facts, view.ledger
        seen = self._instances.get(facts.name)
        if seen is None:
            seen = self._instances[facts.name] = _InstanceHistory(facts, ledger, view.state, view.open, 1, now_us)
        if facts.incarnation != seen.facts.incarnation:
            seen.lives += 1
        seen.facts, seen.ledger, seen.state, seen.open, seen.seen_us = facts, ledger, view.state, view.open, now_us
        if any(_blocks(ledger)):  # otherwise its first heartbeat is yet to come
            seen.samples.append((rev, [now_us, *_blocks(ledger), ledger.running, ledger.waiting]))

    def _forget_gone(self, now_us: int) -> None:
        gone = sorted((seen.seen_us, name) for name, seen in self._instances.items() if seen.state == "gone")
        excess = len(self._instances) - INSTANCES_MAX
        for index, (seen_us, name) in enumerate(gone):
            if index < excess or now_us - seen_us > GONE_US:
                del self._instances[name]

    def _next(self) -> int:
        self._rev += 1
        return self._rev


def _lanes(choices: int) -> list[ChoiceTimeline]:
    return [ChoiceTimeline() for _ in range(min(choices, LANES_MAX))]


def _blocks(ledger: SchedulerGauges) -> list[int]:
    return [
        ledger.free_blocks,
        ledger.evictable_blocks,
        ledger.running_blocks,
        ledger.leased_blocks,
        ledger.receiving_blocks,
        ledger.leaving_blocks,
    ]


def _after(ring: Iterable[tuple[int, T]], since: int) -> list[T]:
    return [value for rev, value in ring if rev > since]
