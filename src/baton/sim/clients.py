"""Clients of a fuzzed world: users who send one request after another; some disconnect early, some read slowly.

Owns the tokens that each client has received. A user is a chain of requests: a chain of one is an arrival of an open loop, a
longer one waits for each answer before the next request (a closed loop), and one that keeps its history is a conversation.
Every client compares the tokens it gets with those of an undisturbed run, as they arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.engine.request import PromptLogprobs, Submission
from baton.core.errors import Refusal
from baton.sim.client_requests import VOCABULARY, ClientRequest
from baton.sim.faults import Fault
from baton.sim.front_end import FrontEnd, SubmittedGroup
from baton.sim.law_checker import Ended, LawChecker
from baton.sim.law_names import ENDS_ONCE, SAME_TOKENS, TRUE_LOGPROBS, TRUE_PROMPT_LOGPROBS, LawBroken
from baton.sim.router_host import RouterHost, RouterRequest, UnclaimedAnswer
from baton.sim.world import Host
from baton.wire.engine_messages import LogprobLine
from baton.wire.request_table import LostEntry

RETRY_US = 30_000
"""Pause before a user's next request, on top of its think time."""
RESUME_SHARE = 0.75
"""Share of clients that resume after the router crashed during their answer; the others give up."""
RESUME_EVERY_US = 40_000
RESUME_PATIENCE_US = 1_500_000
NOTICED_US = 400_000
"""Longest delay until a client that lost its router comes back."""

Entrance = FrontEnd | RouterHost
"""The process to which users send requests."""


@dataclass(slots=True)
class _Answer:
    """One choice of a request, as its client sees it."""

    name: str
    submission: Submission
    expected: list[int]
    got: list[int] = field(default_factory=list)
    keep: int | None = None
    """The number of tokens at which the client stopped it."""
    cached_tokens: int | None = None
    """As reported with the first token."""
    heard: list[int] = field(default_factory=list)
    """All tokens received, read or not."""
    position: int = 0
    """Tokens received on this connection; after a resumption, tokens are repeated."""
    prompt_scored: int = 1
    """Positions of its prompt, the first included, whose log-probabilities it has."""
    cut_again: bool = False
    """It was stopped, but the router that got the order is gone, so the order must be repeated."""
    over: bool = False

    def new_of(self, tokens: list[int]) -> list[int]:
        """The tokens beyond those received before; repeated tokens must be equal."""
        again = self.heard[self.position : self.position + len(tokens)]
        if tokens[: len(again)] != again:
            raise LawBroken(SAME_TOKENS, f"{self.name} had {again} at {self.position}, and now hears {tokens}")
        self.position += len(tokens)
        new = tokens[len(again) :]
        self.heard += new
        return new


def _scripted_logprobs(token: int, alternatives: int) -> LogprobLine:
    """As `executor.scripted` gives them."""
    return float(-token), tuple(((token + after) % VOCABULARY, float(-token - after)) for after in range(alternatives))


def _scripted_lines(tokens: list[int], alternatives: int) -> list[LogprobLine]:
    return [_scripted_logprobs(token, alternatives) for token in tokens]


class SimulatedClient:
    """One request, from submission until every choice has ended."""

    def __init__(self, user: SimulatedUser, ask: ClientRequest, before: tuple[int, ...]) -> None:
        self.ask = ask
        self.checker = user.checker
        self.host = user.host
        self._user = user
        self._group = ask.group(before, user.host.world.now_us)
        self._answers: list[_Answer] = []
        self._booking: SubmittedGroup | RouterRequest | None = None
        self._left = False
        self._unread: deque[tuple[int, list[int], Ended | None]] = deque()
        self._reading = False
        self._entrance: Entrance | None = None
        self._resumed = False
        """The router was lost during its answer."""

    @property
    def first_answer(self) -> tuple[int, ...]:
        """Prompt and answer, which the next round of a conversation continues."""
        return tuple(int(token) for token in self._group[0].prompt) + tuple(self._answers[0].got)

    @property
    def _tokens_at_most(self) -> int:
        asked = self.ask.max_tokens
        return self._user.tokens_max - len(self._group[0].prompt) if asked is None else asked

    @property
    def open(self) -> bool:
        return any(not answer.over for answer in self._answers)

    def submit(self, front: Entrance) -> None:
        for submission in self._group:
            expected = [] if self.ask.impossible else self.checker.expected(submission, self._tokens_at_most)
            self._answers.append(_Answer(submission.request_id, submission, expected))
        self._entrance = front
        self._note(f"asks: {len(self._group[0].prompt)} tokens, {len(self._group)} choices")
        self._booking = front.submit(self._group, self)
        if self._booking is None:
            self._note("finds nobody to serve it")
            self.checker.found_nobody(self.name, len(self._answers), front.serving())
            self._end_all()
            return
        if self.ask.patience_us is not None:
            self.host.after(self.ask.patience_us, self.leave)

    # ── called by the front end or router ────────────────────────────────────────────────────────────────────────────────

    def opened(self) -> None:
        if self._booking is not None:
            self._note(f"is accepted by {self._booking.where}")

    def declined(self, refusal: Refusal) -> None:
        if self.ask.impossible:
            self.host.world.fire(Fault.NONSENSE, self.name)
        self._note(f"is refused: {refusal.code}")
        self.checker.refused(self.name, refusal, self.ask.impossible)
        self._end_all()

    def progress(
        self,
        place: int,
        tokens: list[int],
        begin: int,
        end: int,
        cached: int | None,
        ended: Ended | None,
        logprobs: Sequence[LogprobLine] | None = None,
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        answer = self._answers[place]
        self._compare_logprobs(answer, tokens[begin:end], logprobs)
        self._compare_prompt(answer, prompt_logprobs, end > begin)
        if answer.over and self._resumed:
            return  # an earlier router has delivered this choice
        tokens = answer.new_of(tokens[begin:end])
        answer.cached_tokens = cached if cached is not None else answer.cached_tokens
        self._hear(place, tokens, ended)
        # Last: a router that has no instance computing it ends it at once, and that end must follow the tokens before it.
        if answer.cut_again and answer.keep is not None and answer.position >= answer.keep and self._booking is not None:
            answer.cut_again = False
            if not answer.over:
                self._booking.stop(place, answer.keep)

    def _compare_logprobs(self, answer: _Answer, tokens: list[int], lines: Sequence[LogprobLine] | None) -> None:
        """The scripted executor's are minus the id of a token; those of tokens before a router's crash may be gone."""
        asked = self.ask.sampling.logprobs
        wanted = [] if asked is None else [_scripted_logprobs(token, asked) for token in tokens]
        got = list(lines or ())
        if self._resumed and len(got) <= len(wanted):
            wanted = wanted[len(wanted) - len(got) :]
        if got != wanted:
            raise LawBroken(TRUE_LOGPROBS, f"{answer.name} got {got} for {tokens}, not {wanted}")

    def _compare_prompt(self, answer: _Answer, parts: Sequence[PromptLogprobs], has_tokens: bool) -> None:
        """Each position once, in order, before the first token or with it. After a move they come again from the first;
        with a router's crash those that another instance than the last had computed may be gone."""
        prompt, asked = answer.submission.prompt.tolist(), answer.submission.sampling.prompt_logprobs
        for part in parts:
            if asked is None or part.begin > max(1, answer.prompt_scored) or part.end > len(prompt):
                raise LawBroken(TRUE_PROMPT_LOGPROBS, f"{answer.name} got those from {part.begin} to {part.end}")
            tokens = prompt[part.begin : part.end]
            got = list(zip(part.chosen.tolist(), part.top_ids.tolist(), part.top.tolist(), strict=True))
            wanted = [(line, [i for i, _ in top], [v for _, v in top]) for line, top in _scripted_lines(tokens, asked)]
            if got != wanted or part.ranks.tolist() != [1] * len(tokens):
                raise LawBroken(TRUE_PROMPT_LOGPROBS, f"{answer.name} got {got} for {tokens}, not {wanted}")
            answer.prompt_scored = max(answer.prompt_scored, part.end)
        if has_tokens and asked is not None and not self._resumed and answer.prompt_scored < len(prompt):
            raise LawBroken(TRUE_PROMPT_LOGPROBS, f"{answer.name} has those up to {answer.prompt_scored} at its first token")

    def _hear(self, place: int, tokens: list[int], ended: Ended | None) -> None:
        if self.ask.reads_every_us is None:
            self._read(place, tokens, ended)
            return
        self._unread.append((place, tokens, ended))
        if not self._reading:
            self._reading = True
            self.host.world.fire(Fault.SLOW_READER, self.name)
            self.host.after(self.ask.reads_every_us, self._read_next)

    def lost(self, place: int | None, end: LostEntry) -> None:
        while self._unread:
            self._read(*self._unread.popleft())
        self._note(f"loses its instance: {end.reason}")
        instance = self._booking.instance if isinstance(self._booking, SubmittedGroup) else 0
        self.checker.lost(self.name, instance, end)
        for answer in self._answers if place is None else [self._answers[place]]:
            self._end(answer)

    def placed(self, where: str) -> None:
        """Ignored: the router may place it anywhere."""

    # ── router crashes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def gone(self) -> None:
        """The connection broke. A client whose answer has begun may come back for the rest."""
        while self._unread:
            self._read(*self._unread.popleft())
        if not self.open:
            return
        stream = self.host.world.stream(f"resume {self.ask.index} {self.host.world.now_us}")
        begun = self._booking is not None and not self._booking.is_early
        if not (begun and isinstance(self._entrance, RouterHost) and stream.random() < RESUME_SHARE) or self._left:
            self._give_up("the router is gone", "router gone")
            return
        self._note("loses its router, and will come back")
        self._booking = None
        self._resumed = True
        self.host.after(stream.randrange(1, NOTICED_US), self._resume, self.host.world.now_us)

    def _resume(self, lost_us: int) -> None:
        router_host = self._entrance
        if not isinstance(router_host, RouterHost) or not self.open:
            return
        claimed = router_host.claim(self._group, self)
        if claimed is not None:
            self._go_on(*claimed)
        elif self.host.world.now_us - lost_us > RESUME_PATIENCE_US:
            self.checker.not_resumed(self.name, self._group[0].request_id.encode(), lost_us)
            self._give_up("finds nothing of its answer", "not resumed")
        else:
            self.host.after(RESUME_EVERY_US, self._resume, lost_us)

    def _go_on(self, request: RouterRequest, found: UnclaimedAnswer) -> None:
        """Continue with the tokens an instance has kept, after those already received."""
        self._booking = request
        self.host.world.fire(Fault.RESUMED, self.name)
        for place, answer in enumerate(self._answers):
            answer.position = 0
            answer.cut_again = answer.keep is not None
            known = found.tokens[place]
            if known is not None and not answer.over:
                self._compare_prompt(answer, found.prompts[place], bool(known))
                self.progress(place, known, 0, len(known), found.cached[place], found.outcomes[place])

    def _give_up(self, why: str, end: str) -> None:
        self._note(why)
        self._unread.clear()
        for answer in self._answers:
            if not answer.over:
                self.checker.ends[end] += 1
                self._end(answer)

    # ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read_next(self) -> None:
        if not self._unread:
            self._reading = False
            return
        self._read(*self._unread.popleft())
        if self.ask.reads_every_us is not None:
            self.host.after(self.ask.reads_every_us, self._read_next)

    def _read(self, place: int, tokens: list[int], ended: Ended | None) -> None:
        answer = self._answers[place]
        self.host.world.progressed()
        if answer.over:
            raise LawBroken(ENDS_ONCE, f"{answer.name} heard {tokens} {ended} after its end")
        if answer.keep is None:
            self.checker.tokens(answer.name, len(answer.got), tokens, answer.expected)
            answer.got.extend(tokens)
            if len(answer.got) > len(answer.expected):
                raise LawBroken(SAME_TOKENS, f"{answer.name} got {len(answer.got)} of {len(answer.expected)} tokens")
            self._look_for_stop(place, answer)
        if ended is not None:
            self._note(f"{place} ends: {ended.reason} after {ended.generated_tokens}")
            self.checker.ended(
                answer.name,
                ended,
                answer.submission,
                answer.expected,
                len(answer.got),
                answer.keep,
                self._left,
                self._resumed,
            )
            self.checker.bill(
                answer.name, answer.submission, ended, answer.cached_tokens, self._user.preemptions_max, self._resumed
            )
            self._end(answer)

    def _look_for_stop(self, place: int, answer: _Answer) -> None:
        after = self.ask.stop_after
        if after is not None and len(answer.got) >= after and self._booking is not None:
            answer.keep = after
            del answer.got[after:]
            self._booking.stop(place, after)

    def leave(self) -> None:
        """Disconnect, if a choice is open."""
        if self._booking is None or not self.open or self._left:
            return
        self._left = True
        early = self._booking.is_early
        self.host.world.fire(Fault.EARLY_DISCONNECT if early else Fault.DISCONNECT, self.name)
        if self._booking.leave():  # no further events will be delivered
            self._give_up("leaves", "left early" if early else "left")

    def _end_all(self) -> None:
        for answer in self._answers:
            self._end(answer)

    def _end(self, answer: _Answer) -> None:
        if answer.over:
            raise LawBroken(ENDS_ONCE, f"{answer.name} ended twice")
        answer.over = True
        if not self.open:
            self._user.finished(self)

    @property
    def name(self) -> str:
        return f"client {self.ask.index}"

    def _note(self, what: str) -> None:
        self.host.world.progressed()
        if self.host.world.keeps_notes:
            self.host.world.note(self.name, what)


class SimulatedUser:
    def __init__(
        self,
        host: Host,
        front: Entrance,
        checker: LawChecker,
        asks: Sequence[ClientRequest],
        *,
        converses: bool,
        tokens_max: int,
        preemptions_max: int,
    ) -> None:
        self.host = host
        self.checker = checker
        self.preemptions_max = preemptions_max
        self.client: SimulatedClient | None = None
        """The open one."""
        self.made = 0
        self._front = front
        self._asks = deque(asks)
        self._converses = converses
        self.tokens_max = tokens_max
        self._history: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        return not self._asks and self.client is None

    def start(self, at_us: int) -> None:
        self.host.at(at_us, self._ask)

    def finished(self, client: SimulatedClient) -> None:
        self.client = None
        if self._converses:
            self._history = client.first_answer
        if self._asks:
            self.host.after(RETRY_US + self._asks[0].think_us, self._ask)

    def _ask(self) -> None:
        ask = self._asks.popleft()
        self.made += 1
        room = self.tokens_max - len(ask.prompt) - (ask.max_tokens or 1)
        fits = self._converses and not ask.impossible and len(self._history) <= room
        before = self._history if fits else ()
        self.client = SimulatedClient(self, ask, before)
        self.client.submit(self._front)
