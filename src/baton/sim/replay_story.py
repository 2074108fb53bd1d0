"""A replayed recording as a story: one line a call."""

from __future__ import annotations

from typing import Any

from baton.core.engine.change_journal import EngineChanges
from baton.core.engine.orders import Accepted, Cancel, StopAt, Submit
from baton.core.engine.worker import Deliver, StepDone, Tick, Withdrawn
from baton.core.handover.messages import Heard
from baton.core.routing.events import DeliverTokens, FleetChanged, RequestDeclined, RequestOpened, TimelineNoted
from baton.sim.story import words_of
from baton.wire.engine_messages import StepOutput
from baton.wire.flight_recorder import Raised
from baton.wire.replaying import ReplayedCall
from baton.wire.router_sessions import CloseConnection, SayToInstance

WORDS_MAX = 400


class Story:
    """Writes lines; knows the time of the first call, and which serials a request that is asked for has."""

    def __init__(self, request: str | None = None) -> None:
        """`request`: only lines about this one, by request id or by the number of the engine or router."""
        self._request = request
        self._numbers: set[int] = set() if request is None or not request.isdecimal() else {int(request)}
        self._began_us: int | None = None

    def line(self, call: ReplayedCall) -> str | None:
        """None where it is about other requests."""
        if call.method == "snapshot":
            return f"{call.number:7}  the next snapshot"
        now_us = next((item for item in reversed(call.arguments) if type(item) is int), 0)
        self._began_us = now_us if self._began_us is None else self._began_us
        if self._request is not None and not self._is_about(call):
            return None
        did = "; ".join(self._results(call.result)) or "nothing"
        at_s = (now_us - self._began_us) / 1e6
        return f"{call.number:7}  {at_s:12.6f} s  {self._event(call):.{WORDS_MAX}} → {did:.{WORDS_MAX}}"

    def _event(self, call: ReplayedCall) -> str:
        match call.method, call.arguments:
            case "handle", (Submit(ticket, group), _):
                asked = ", ".join(f"{item.request_id} ({item.known_tokens} tokens)" for item in group)
                return f"Submit {ticket}: {asked}"
            case "handle", (StepDone(result), _):
                return f"step {result.step} done: {len(result.slots)} rows, {len(result.tokens)} tokens"
            case "handle", (Tick(), _):
                return "tick"
            case "handle", (Heard(peer, message), _):
                return f"{peer} says {type(message).__name__} {message.request}.{message.attempt}"
            case "handle", (event, _):
                return f"{event!r}"
            case "receive", (session, StepOutput() as output, _):
                return f"session {session}: a step with {len(output.serials) // 8} rows, {len(output.ended)} ends"
            case "receive", (session, message, _):
                return f"session {session}: {type(message).__name__}"
            case "submit", (tenant, group, *_):
                asked = ", ".join(f"{item.request_id} ({item.known_tokens} tokens)" for item in group)
                return f"{tenant or 'a client'} asks: {asked}"
            case method, arguments:
                return f"{method} {', '.join(map(repr, arguments[:-1]))}"

    def _results(self, result: Any) -> list[str]:
        match result:
            case Raised(error, text):
                return [f"raises {error}: {text}"]
            case EngineChanges(names, notes):
                return [f"{len(names.named)} cached, {len(names.forgotten)} evicted, {len(notes)} phases"]
            case list():
                return [_words(effect) for effect in result]
            case (number, [*acts]):
                return [f"request {number}", *map(_words, acts)]
            case _:
                return [f"{result!r}"]

    # ── the request that is asked for ────────────────────────────────────────────────────────────────────────────────────

    def _is_about(self, call: ReplayedCall) -> bool:
        group = next((item for item in call.arguments if isinstance(item, Submit)), None)
        asked = group.group if group is not None else call.arguments[1] if call.method == "submit" else ()
        places = [place for place, item in enumerate(asked) if item.request_id == self._request]
        effects = call.result if isinstance(call.result, list) else []
        for effect in effects:
            if isinstance(effect, Accepted):
                self._numbers |= {effect.serials[place] for place in places}
        if places and call.method == "submit" and isinstance(call.result, tuple):
            self._numbers.add(call.result[0])
        named = {number for item in (*call.arguments, *effects) for number in _numbers_of(item)}
        return bool(places or named & self._numbers)


def _numbers_of(item: object) -> list[int]:
    match item:
        case Cancel(serial) | StopAt(serial):
            return [serial]
        case Deliver(settled):
            return [*settled.serials.tolist(), *(ended.serial for ended in settled.ended)]
        case Withdrawn(ended):
            return [ended.serial]
        case DeliverTokens() | RequestOpened() | RequestDeclined():
            return [item.request]
        case _:
            return []


def _words(effect: Any) -> str:
    match effect:
        case SayToInstance(session, message):
            return f"tells session {session} {type(message).__name__}"
        case CloseConnection(session, reason):
            return f"closes session {session}: {reason}"
        case DeliverTokens():
            end = "" if effect.outcome is None else f", ends: {effect.outcome.reason}"
            return f"gives {len(effect.tokens)} tokens to {effect.request}.{effect.choice}{end}"
        case FleetChanged(name, incarnation, what, why):
            return f"{name} ({incarnation}) {what}: {why}"
        case TimelineNoted():
            return "notes it"
        case RequestOpened() | RequestDeclined():
            return f"{type(effect).__name__} {effect.request}"
        case _ if type(effect).__module__.startswith("baton.core.routing"):
            return type(effect).__name__
        case _:
            return words_of(effect)
