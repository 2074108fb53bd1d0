"""The host of a simulated router: the production RouterSessions and Router, with one line per instance, serving all clients.

Owns the lives of the router and the client of each request. A life begins without state, except for requests that instances
have kept and report. Clients are on other machines: they notice a crash at once, and may come back to resume an answer. This
class carries out the acts of RouterSessions; all decisions are the production objects'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.engine.request import PromptLogprobs, Submission
from baton.core.errors import Refusal
from baton.core.routing.config import RouterConfig
from baton.core.routing.events import (
    ChoiceOutcome,
    DeliverTokens,
    FleetChanged,
    Instance,
    Join,
    RequestDeclined,
    RequestOpened,
    Session,
    TimelineNoted,
    TimelineStage,
    UnclaimedDropped,
    UnclaimedFound,
    WantMask,
)
from baton.core.routing.identity import RequestNumber
from baton.core.routing.router import Router
from baton.executor.constraints.version_skew import digest_after
from baton.executor.scripted import SCRIPTED_CONSTRAINTS
from baton.sim.client_requests import VOCABULARY
from baton.sim.instance_front_end import ROUTER, number_of
from baton.sim.law_names import STRANGERS, LawBroken
from baton.sim.lines import LineEndpoint, Lines
from baton.sim.router_watcher import RouterWatcher
from baton.sim.twin import TwinCheck, has_twins
from baton.sim.world import Alarm, Host, World
from baton.wire.engine_messages import LogprobLine, WireError
from baton.wire.router_messages import FromRouter, decode_from_instance, encode_membership
from baton.wire.router_sessions import Act, CloseConnection, RouterSessions, SayToInstance
from baton.wire.watched_sessions import WatchedSessions

MASK_US = 3_000
"""Time to compile a constraint and compute a mask of it."""
STRANGER = "stranger"
"""Name in the Join of a process that was never a member."""
TOLD = (TimelineStage.PLACED, TimelineStage.PREEMPTED, TimelineStage.MOVED, TimelineStage.ENDED)
"""Stages of a choice that are noted in the story; the others are noted by its instance and its client."""


class RequestListener(Protocol):
    """Made a request and gets its events. `place` is the index of a choice."""

    def opened(self) -> None: ...

    def declined(self, refusal: Refusal) -> None: ...

    def progress(
        self,
        place: int,
        tokens: list[int],
        begin: int,
        end: int,
        cached_tokens: int | None,
        ended: ChoiceOutcome | None,
        logprobs: Sequence[LogprobLine] | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None: ...

    def placed(self, where: str) -> None:
        """One choice was placed at this instance."""

    def gone(self) -> None:
        """The router crashed, and the connection broke."""


@dataclass(slots=True)
class UnclaimedAnswer:
    """A request kept by an instance after a router crash, with the tokens known so far."""

    number: RequestNumber
    origin: bytes
    tokens: list[list[int] | None]
    """By choice; None: nothing is known of the choice."""
    cached: list[int | None]
    outcomes: list[ChoiceOutcome | None]
    prompts: list[tuple[PromptLogprobs, ...]]


class RouterRequest:
    """A request, for its client. It belongs to one life of the router and has no effect after that."""

    def __init__(self, router_host: RouterHost, listener: RequestListener) -> None:
        self.number: RequestNumber | None = None
        """None until the router has taken it."""
        self.listener = listener
        self.is_early = True
        """Whether no instance has accepted it yet."""
        self.is_there = True
        """Whether the client is still connected."""
        self._router_host = router_host
        self._life = router_host.host.lives

    @property
    def where(self) -> str:
        return f"the router, as body {self.number}"

    def leave(self) -> bool:
        """Cancel: the client is gone. Returns True: it gets no further events."""
        self.is_there = False
        self._run(self._router_host.leave, self)
        return True

    def stop(self, place: int, keep: int) -> None:
        self._run(self._router_host.cut, self, place, keep)

    def _run(self, act: Callable[..., None], *arguments: object) -> None:
        if self._life == self._router_host.host.lives:
            self._router_host.host.run(act, *arguments)


class RouterHost:
    def __init__(
        self,
        world: World,
        lines: Lines,
        config: RouterConfig,
        secret: bytes,
        watcher: RouterWatcher | None = None,
        seed: int = 0,
    ) -> None:
        self.host = Host(world, ROUTER)
        self.has_masks = True
        """Whether it has the version of the backend for constraints that requests name."""
        self.config = config
        self.watcher = RouterWatcher() if watcher is None else watcher
        self._secret = secret
        self._seed = seed
        self.sessions: RouterSessions
        self._watched: RouterSessions | WatchedSessions
        """The sessions; where laws are checked, beside twins that are restored from snapshots of them."""
        self._checks_twins = watcher is not None and has_twins(world.seed)
        self.former_sessions: list[RouterSessions] = []
        self.found: dict[bytes, UnclaimedAnswer] = {}
        """Unclaimed requests, by their origin."""
        self.forged: set[tuple[int | None, bytes]] = set()
        """Frames that no member sends, with the number of the connection; a member that does must be disconnected."""
        self.kept: dict[tuple[bytes, int], set[int]] = {}
        """By origin and time of a crash: the instances that were computing the request."""
        self.disturbed_us = 0
        """When the router last crashed or was resumed."""
        self.began_us = 0
        """When its present life began."""
        self._lines = lines
        self._unseen: list[RouterRequest] = []
        """Requests that the router has not taken yet, because it is paused."""
        self._requests: dict[RequestNumber, RouterRequest] = {}
        self._unclaimed: dict[RequestNumber, UnclaimedAnswer] = {}
        self._by_session: dict[Session, RouterLine] = {}
        self._acts: deque[Act] = deque()
        self._acting = False
        self._alarm = Alarm(self.host, self._tick)
        self._begin()

    # ── lives ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def boot_if_down(self) -> None:
        if not self.host.up:
            self.host.restart()
            self._begin()

    def _begin(self) -> None:
        self.sessions = RouterSessions(Router(self.config, self._secret, self._seed + self.host.lives), ROUTER)
        self._watched = self.sessions
        if self._checks_twins:
            twin = TwinCheck(ROUTER, self.sessions, self.sessions.router.hashes)
            self._watched = WatchedSessions(self.sessions, twin)
        self.began_us = self.host.world.now_us
        self.watcher.begin(self.began_us)
        self._alarm = Alarm(self.host, self._tick)
        self._lines.listen(self.host, ROUTER, self._accept)
        self._note(f"starts life {self.host.lives + 1}")

    def crash(self) -> None:
        if not self.host.up:
            return
        self.watcher.died()
        now_us = self.host.world.now_us
        if not self.host.paused:  # else it has missed what became of them during the pause
            self.kept.update({(origin, now_us): instances for origin, instances in self.watcher.kept.items()})
        self.disturbed_us = now_us
        self.former_sessions.append(self.sessions)
        self.host.resume()
        self.host.crash()
        self._lines.process_died(self.host)
        self._note("is down")
        requests = [*self._requests.values(), *self._unseen]
        self._requests.clear()
        self._unseen.clear()
        self._acts.clear()
        self._unclaimed.clear()
        self.found.clear()
        self._by_session.clear()
        for request in requests:
            if request.is_there:
                request.listener.gone()

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, group: Sequence[Submission], listener: RequestListener) -> RouterRequest | None:
        """None if the router is down; else it is taken now, or when the router is resumed."""
        if not self.host.up:
            return None
        request = RouterRequest(self, listener)
        self._unseen.append(request)
        self.host.run(self._submit, request, group)
        return request

    def serving(self) -> dict[int, bool]:
        """Empty: clients of a router do not know the instances."""
        return {}

    def _submit(self, request: RouterRequest, group: Sequence[Submission]) -> None:
        origin = group[0].request_id.encode()
        self._unseen.remove(request)
        number, acts = self._watched.submit(group[0].salt.decode(), group, origin, self.host.world.now_us)
        request.number = number
        self._requests[number] = request
        self.watcher.asked(number, group, origin, self.host.world.now_us)
        self._carry_out(acts)

    def leave(self, request: RouterRequest) -> None:
        if request.number is not None and self._requests.pop(request.number, None) is not None:
            self.watcher.left(request.number)
            self._carry_out(self._watched.leave(request.number, self.host.world.now_us))

    def cut(self, request: RouterRequest, place: int, keep: int) -> None:
        if request.number is not None and request.number in self._requests:
            self.watcher.cut(request.number, place)
            self._carry_out(self._watched.stop_choice(request.number, place, keep, self.host.world.now_us))

    def claim(self, group: Sequence[Submission], listener: RequestListener) -> tuple[RouterRequest, UnclaimedAnswer] | None:
        """Resume a request whose router crashed. None: no instance has reported it (yet).

        The client sends the group again, so that choices which no instance has kept can start anew.
        """
        origin = group[0].request_id.encode()
        found = self.found.pop(origin, None) if self.host.up and not self.host.paused else None
        if found is None:
            return None
        request = RouterRequest(self, listener)
        request.number, request.is_early = found.number, False
        self._requests[found.number] = request
        self.watcher.claimed(found.number)
        self._acts.extend(self._watched.claim(found.number, self.host.world.now_us, group))
        self.host.after(0, self._drain)
        return request, found

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, line: LineEndpoint) -> RouterLine:
        return RouterLine(self, line)

    def connected(self, connection: RouterLine) -> Session:
        session = self._watched.connected(self.host.world.now_us)
        self._by_session[session] = connection
        if connection.number is not None:
            self.watcher.connected(session, connection.number)
        self._alarm.set(self.sessions.next_deadline())
        return session

    def heard(self, session: Session, frame: bytes) -> None:
        """A frame arrived from an instance, or from another process with the key of the cluster."""
        now_us = self.host.world.now_us
        connection = self._by_session.get(session)
        is_forged = bool(self.forged) and connection is not None and (connection.line.session, frame) in self.forged
        try:
            message = decode_from_instance(frame)
            self.watcher.heard(session, message, now_us)
            acts = self._watched.receive(session, message, now_us)
        except WireError as error:
            self._shut(session, str(error))
            self.lost(session, str(error))
        else:
            self._carry_out(acts)
        # Tokens of an unknown request are accepted: the instance may have had it before this session.
        if is_forged and session in self._by_session and b"step" not in frame:
            raise LawBroken(STRANGERS, f"a member said {frame[:60]!r}, and is still listened to")

    def heard_stranger(self, session: Session, frame: bytes) -> None:
        """A frame of a process with the key that is no member: the members must not change by it."""
        before = self._lives()
        try:
            message = decode_from_instance(frame)
            if isinstance(message, Join) and message.name != STRANGER and not _is_outlived(message, before):
                self._shut(session, "no later life of whom it pretends to be is a member")  # it could join as that one
                return
            acts = self._watched.receive(session, message, self.host.world.now_us)
        except WireError as error:
            self._shut(session, str(error))
            acts = self._watched.lost(session, str(error), self.host.world.now_us)
        self._carry_out(acts)
        if self._lives() != before:
            raise LawBroken(STRANGERS, f"{before} were members, and after {frame[:40]!r} it was {self._lives()}")

    def lost_stranger(self, session: Session, reason: str) -> None:
        self._by_session.pop(session, None)
        self._carry_out(self._watched.lost(session, reason, self.host.world.now_us))

    def lost(self, session: Session, reason: str) -> None:
        self._by_session.pop(session, None)
        self.watcher.lost(session, self.host.world.now_us)
        self._carry_out(self._watched.lost(session, reason, self.host.world.now_us))

    def _lives(self) -> list[tuple[str, int]]:
        return [(view.facts.name, view.facts.incarnation) for view in self.sessions.router.views()]

    def connection_of(self, name: str) -> RouterLine | None:
        """The connection in which the instance of this name is a member; None: it is none.

        It need not be the one that was opened last: the router may read the proof of a connection of an earlier life after
        that of the present one.
        """
        member = self.sessions.router.fleet.by_name.get(Instance(name))
        return None if member is None else self._by_session.get(member.session)

    def wake(self) -> None:
        self.disturbed_us = self.host.world.now_us
        self.watcher.woke(self.host.world.now_us)
        self.host.resume()
        self._tick()  # before messages that arrived during the pause are read

    def drain(self, name: str) -> None:
        """Drain an instance, as `baton drain` does."""
        self._carry_out(self._watched.drain(name, self.host.world.now_us))

    # ── RouterView ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_at(self) -> dict[Session, int]:
        fleet = self.sessions.router.fleet
        return {session: len(member.choices) for session, member in fleet.members.items()}

    def yields_of(self, origin: bytes) -> tuple[int, ...]:
        return self.sessions.router.preemptions(origin)

    def holders(self, key: bytes) -> tuple[Session, ...]:
        return self.sessions.router.holders(key)

    # ── acts of RouterSessions ───────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        deadline = self._watched.next_deadline()
        if deadline is not None and deadline <= self.host.world.now_us:
            self._carry_out(self._watched.tick(self.host.world.now_us))
        else:
            self._alarm.set(deadline)

    def _carry_out(self, acts: Sequence[Act]) -> None:
        """Carry out in order. Acts caused by clients' reactions come after those already queued."""
        self._acts.extend(acts)
        self._drain()

    def _drain(self) -> None:
        if self._acting:
            return
        self._acting = True
        try:
            while self._acts:
                self._act(self._acts.popleft())
        finally:
            self._acting = False
        self._alarm.set(self._watched.next_deadline())
        self.watcher.looked(self, self.host.world.now_us)

    def _act(self, act: Act) -> None:
        self.watcher.acted(act, self.host.world.now_us)
        match act:
            case DeliverTokens():  # by far the most frequent
                self._deliver(act)
            case SayToInstance(session, message):
                if session in self._by_session:
                    self._by_session[session].say(message)
            case CloseConnection(session, reason):
                self._shut(session, reason)
            case RequestOpened(number):
                if (request := self._requests.get(number)) is not None and request.is_there:
                    request.is_early = False
                    request.listener.opened()
            case RequestDeclined(number, refusal):
                if (request := self._requests.pop(number, None)) is not None and request.is_there:
                    request.listener.declined(refusal)
            case UnclaimedFound(number, origin, delivered, _, cached, outcomes, prompts):
                tokens_known = [None if tokens is None else list(tokens) for tokens in delivered]
                parts = [part if isinstance(part, tuple) else () for part in prompts]
                found = UnclaimedAnswer(number, origin, tokens_known, list(cached), list(outcomes), parts)
                self.found[origin] = self._unclaimed[number] = found
            case UnclaimedDropped(number):
                self.found.pop(self._unclaimed.pop(number).origin, None)
            case WantMask():
                self.host.after(MASK_US, _tell_mask, self, act)
            case FleetChanged(name, incarnation, what, why):
                self._note(f"sees {name}, life {incarnation}: {what}, {why}")
            case TimelineNoted(number, choice, stage, where, _, why):
                if stage in TOLD:
                    self._note(f"body {number}.{choice} {stage.value} {where or ''} {why}")
                if stage is TimelineStage.PLACED and (request := self._requests.get(number)) is not None:
                    request.listener.placed(where or "")

    def _deliver(self, act: DeliverTokens) -> None:
        number, choice, tokens, extras, cached, outcome, prompt = act
        request = self._requests.get(number)
        if request is not None and request.is_there:
            lines = extras if isinstance(extras, Sequence) else None
            parts = prompt if isinstance(prompt, tuple) else ()
            request.listener.progress(choice, tokens, 0, len(tokens), cached, outcome, lines, parts)
        elif (found := self._unclaimed.get(number)) is not None:
            known = found.tokens[choice]
            found.tokens[choice] = (known or []) + tokens
            found.cached[choice] = cached if found.cached[choice] is None else found.cached[choice]
            found.outcomes[choice] = outcome
            found.prompts[choice] += prompt if isinstance(prompt, tuple) else ()

    def _shut(self, session: Session, reason: str) -> None:
        connection = self._by_session.pop(session, None)
        if connection is not None:
            connection.close(reason)

    def _note(self, what: str) -> None:
        if self.host.world.keeps_notes:
            self.host.world.note(ROUTER, what)


def _tell_mask(router_host: RouterHost, act: WantMask) -> None:
    """Answer as the router's processes for constraints do."""
    known = router_host.has_masks
    digest = digest_after(SCRIPTED_CONSTRAINTS, act.constraint, act.outputs, VOCABULARY) if known else b""
    which, now_us = (act.request, act.choice, len(act.outputs)), router_host.host.world.now_us
    router_host._carry_out(router_host._watched.mask_came(*which, digest or b"", now_us))


class RouterLine:
    """The router's end of one connection."""

    def __init__(self, router_host: RouterHost, line: LineEndpoint) -> None:
        self.number = number_of(line.peer)
        """Of the instance or old life; None: a stranger."""
        self.session: Session | None = None
        self.line = line
        self._router_host = router_host

    def say(self, message: FromRouter) -> None:
        self.line.send(encode_membership(message))

    def close(self, reason: str) -> None:
        self.session = None
        self.line.close(reason)

    def opened(self) -> None:
        self.session = self._router_host.connected(self)

    def lost(self, reason: str) -> None:
        session, self.session = self.session, None
        if session is None:
            return
        if self.number is None:
            self._router_host.lost_stranger(session, reason)
        else:
            self._router_host.lost(session, reason)

    def took(self, frames: list[bytes]) -> None:
        for frame in frames:
            if self.session is None:  # an earlier frame closed it
                return
            if self.number is None:
                self._router_host.heard_stranger(self.session, frame)
            else:
                self._router_host.heard(self.session, frame)


def _is_outlived(join: Join, members: Iterable[tuple[str, int]]) -> bool:
    """Whether a later life of the instance that joins is a member."""
    return any(name == join.name and incarnation > join.incarnation for name, incarnation in members)
