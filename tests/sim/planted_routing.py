"""Bugs planted in the router and in what instances do for it, one at a time; see `planted` for what becomes of them.

Each is one that routers have had, or could have: continuations that repeat or lose a token, retries without a limit or an
end, members that nobody suspects or everybody does, drains that drain nothing, orphans that live for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from baton.core.engine.admission import Admission
from baton.core.engine.arriving_rows import ArrivingRows
from baton.core.engine.change_journal import CachedKeysChanged, PrefixJournal
from baton.core.engine.ended import Bill
from baton.core.engine.progress_watch import EngineBeat, ProgressWatch
from baton.core.engine.records import Request
from baton.core.engine.request import NO_TOKENS, FinishReason, Submission, frozen_tokens
from baton.core.engine.settling import StepSettling
from baton.core.errors import RefusalCode
from baton.core.routing.adoption import Adoption
from baton.core.routing.attempts import Attempts
from baton.core.routing.events import AttemptRefused, Heartbeat, HeldChoice, Instance, Session, TellPrefillPeers
from baton.core.routing.fleet_members import FleetMember, FleetMembers, MemberMove, MemberState, Suspicion
from baton.core.routing.identity import RequestNumber
from baton.core.routing.placement import Placement, PlacementDemand
from baton.core.routing.placement_queue import PlacementQueue
from baton.core.routing.prefix_directory import PrefixDirectory
from baton.core.routing.routed_request import ChoiceMove, ChoiceState, RoutedChoice, RoutedRequest, loss_of
from baton.core.routing.routed_requests import MoveCause, RoutedRequests
from baton.core.routing.router import Router
from baton.core.routing.server_absence import ServerAbsence
from baton.wire import router_sessions
from baton.wire.engine_messages import StepOutput
from baton.wire.held_choices import HeldChoices, HeldState
from baton.wire.instance_sessions import InstanceSessions, InstanceSessionState, SessionEffects
from baton.wire.router_messages import TurnedAway
from tests.sim.planted import Patch, core, wire
from tests.sim.planted_peers import BUGS

__all__ = ["BUGS"]

LONG_US = 10**12


# ── continuations ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _regrouped(patch: Patch, change: Any) -> None:
    group_then = patch.original("routing.group_of")

    def group_of(choices: Sequence[tuple[RoutedChoice, Submission]], *more: Any) -> tuple[Submission, ...]:
        return tuple(change(item, asked) for item, (_, asked) in zip(group_then(choices, *more), choices, strict=True))

    patch.set("routing.group_of", group_of)


@core("a leg starts from the beginning, and the client gets the whole answer again behind what it has")
def forget_what_was_generated(patch: Patch) -> None:
    _regrouped(patch, lambda item, _: msgspec.structs.replace(item, generated=NO_TOKENS))


@core("the last delivered token is left out of a continuation, and comes twice")
def repeat_the_last_token(patch: Patch) -> None:
    _regrouped(patch, lambda item, _: msgspec.structs.replace(item, generated=frozen_tokens(item.generated[:-1])))


@core("choices that go on without their first sibling still name it, and have no prompt")
def leave_the_leader_behind(patch: Patch) -> None:
    _regrouped(patch, lambda item, asked: msgspec.structs.replace(item, leader=asked.leader))


@core("a continuation may generate as many tokens as the whole answer, behind what there is already")
def count_the_limit_anew(patch: Patch) -> None:
    _regrouped(patch, lambda item, _: msgspec.structs.replace(item, max_tokens=(item.max_tokens or 0) + len(item.generated)))


@core("tokens that an instance held while nobody listened are delivered from the first, not from where the client was")
def deliver_held_tokens_from_the_first(patch: Patch) -> None:
    take_over_then = patch.original("_take_over")

    def take_over(self: Adoption, choice: RoutedChoice, item: HeldChoice, member: FleetMember) -> Any:
        if choice.delivered and not choice.request.orphan:
            choice.delivered = choice.delivered[:-1]
        return take_over_then(self, choice, item, member)

    patch.set("_take_over", take_over)


@core("a choice is resumed at an instance that knows less of it than its client")
def resume_a_shorter_history(patch: Patch) -> None:
    def wanted(choice: RoutedChoice, item: HeldChoice) -> bool:
        return choice.outcome is None

    patch.set("_wanted", wanted)


@core("a choice whose instance was lost after the last token is asked for once more, though nothing is left of it")
def go_on_after_the_last_token(patch: Patch) -> None:
    patch.set("finished_as", lambda choice: None, used_by="end_all")
    patch.set("finished_as", lambda choice: None, used_by="go_on_elsewhere")


@core("only the last leg of a request is billed")
def bill_the_last_leg(patch: Patch) -> None:
    def add_bill(choice: RoutedChoice, bill: Bill) -> None:
        choice.bill = msgspec.structs.replace(
            bill, cached_tokens=bill.cached_tokens if choice.attempts <= 1 else choice.bill.cached_tokens
        )

    patch.set("add_bill", add_bill)


@core("the end of an attempt is billed again whenever its instance joins again")
def bill_an_end_at_every_join(patch: Patch) -> None:
    bill = patch.original("add_bill")
    patch.set("_count_once", lambda self, choice, end, member: bill(choice, end.bill))


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("losses are not counted: what kills the instances it meets goes round for ever")
def count_no_retries(patch: Patch) -> None:
    may_then = patch.original("_may_go_on")

    def may_go_on(self: Attempts, choice: RoutedChoice, cause: MoveCause, where: Instance | None) -> bool:
        return may_then(self, choice, cause, where) or True

    patch.set("_may_go_on", may_go_on)


@core("a request is given up at its first loss")
def give_up_at_the_first_loss(patch: Patch) -> None:
    may_then = patch.original("_may_go_on")

    def may_go_on(self: Attempts, choice: RoutedChoice, cause: MoveCause, where: Instance | None) -> bool:
        return may_then(self, choice, cause, where) and cause is not MoveCause.LOST

    patch.set("_may_go_on", may_go_on)


@core("what backs off never comes back")
def back_off_for_ever(patch: Patch) -> None:
    enter_then = patch.original("PlacementQueue.enter")

    def enter(self: PlacementQueue, choice: RoutedChoice, due_us: int) -> None:
        enter_then(self, choice, due_us + (LONG_US if choice.attempts else 0))

    patch.set("PlacementQueue.enter", enter)


@core("a leg that was refused is tried again at once, at the same full instance")
def never_back_off(patch: Patch) -> None:
    patch.set("jittered_us", lambda config, seed, request, nth: 0)


@core("a retry that was reserved for a choice stays reserved when the choice is found where it was")
def keep_unused_retries(patch: Patch) -> None:
    patch.set("RetryBudget.give_back", lambda self: None)


@core("an instance that had no room for a request gets it again, though another is there")
def go_back_to_who_had_no_room(patch: Patch) -> None:
    def candidates(self: Placement, wanted: PlacementDemand, holders: list[FleetMember], known: Any) -> list[FleetMember]:
        return [m for m in holders if wanted.yielded_at and m.name == wanted.yielded_at[-1]] or holders

    patch.set("_candidates", candidates)


@core("who had to yield moves from one full instance to the next, and computes its KV again at each")
def move_in_circles(patch: Patch) -> None:
    def candidates(self: Placement, wanted: PlacementDemand, holders: list[FleetMember], known: Any) -> list[FleetMember]:
        return [m for m in holders if m.name not in wanted.yielded_at[-1:]] or holders

    patch.set("_candidates", candidates)


@core("the answer that a leg was refused is forgotten, and its choices wait for an answer for ever")
def forget_a_refusal(patch: Patch) -> None:
    def refused(self: Attempts, event: AttemptRefused) -> None:
        self._requests.counts.late += 1

    patch.set("Attempts.refused", refused)


@core("choices that found no room are not put back in line")
def lose_who_was_passed_over(patch: Patch) -> None:
    patch.set("put_back", lambda self, party: None)


@core("an instance gets more than it has room for, and refuses it")
def send_beyond_the_limit(patch: Patch) -> None:
    patch.set("routing.has_room", lambda self, member: True)


@core("a body has no deadline")
def wait_beyond_the_deadline(patch: Patch) -> None:
    open_then = patch.original("RoutedRequests.open")

    def opened(self: RoutedRequests, number: RequestNumber, tenant: str | None, origin: bytes, choices: int) -> Any:
        request = open_then(self, number, tenant, origin, choices)
        request.deadline_us += LONG_US
        return request

    patch.set("RoutedRequests.open", opened)


@core("where no instance serves, newcomers wait for one for ever")
def wait_for_an_instance_for_ever(patch: Patch) -> None:
    def expire(self: ServerAbsence) -> None:
        self.due_us = None

    patch.set("ServerAbsence.expire", expire)


@core("what a tenant has open is never taken off its account")
def never_close_an_account(patch: Patch) -> None:
    patch.set("RateLimits.close", lambda self, tenant, generated_tokens, now_us: None)


# ── seniority ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a request that has moved is the youngest wherever it comes")
def arrive_anew_with_every_move(patch: Patch) -> None:
    _regrouped(
        patch,
        lambda item, _: msgspec.structs.replace(item, arrived_us=item.arrived_us + LONG_US) if len(item.generated) else item,
    )


@core("a request that has moved may be preempted as often again")
def count_preemptions_anew(patch: Patch) -> None:
    _regrouped(patch, lambda item, _: msgspec.structs.replace(item, preemptions=0))


@core("a request goes on where it was found, though it was preempted elsewhere meanwhile")
def resume_where_preemptions_are_unknown(patch: Patch) -> None:
    wanted_then = patch.original("_wanted")

    def wanted(choice: RoutedChoice, item: HeldChoice) -> bool:
        known = max(item.preemptions, choice.preemptions)
        return bool(wanted_then(choice, replace(item, preemptions=known)))

    patch.set("_wanted", wanted)


@core("an instance protects only what it has itself preempted too often")
def protect_for_own_preemptions_only(patch: Patch) -> None:
    def protects(self: Admission, request: Request) -> bool:
        config = self._running.config
        return not config.role.gives and request.bill.preemptions >= config.max_preemptions

    patch.set("Admission.protects", protects)


@core("who has moved here waits behind those who came here before it")
def queue_by_serial(patch: Patch) -> None:
    patch.set("waiting_queue._place", lambda request: ((request.submission.priority, 0, request.serial), request))


@core("the last move may have to yield like the others, for ever")
def never_stay(patch: Patch) -> None:
    patch.set("_moves_no_more", lambda self, choice: False)


@core("peers are asked for a prefill however often none came in time")
def ask_peers_for_ever(patch: Patch) -> None:
    patch.set("RoutedChoice.prefills_in_place", property(lambda self: False))


@core("an instance asks a peer for a prefill that it was told to compute itself")
def ask_a_peer_nonetheless(patch: Patch) -> None:
    def prefills_here(self: ArrivingRows, request: Request) -> bool:
        return not self.may_ask or request.prefills_here or not request.is_fresh or request.leader is not None

    patch.set("ArrivingRows.prefills_here", prefills_here)


@core("who was sent to stay is sent away when blocks run out")
def send_away_who_was_to_stay(patch: Patch) -> None:
    judge_then = patch.original("_judge_acknowledgement")

    def judge(self: StepSettling, request: Request, agreed: bool) -> None:
        asked, request.submission = request.submission, msgspec.structs.replace(request.submission, resumes_in_place=False)
        judge_then(self, request, agreed)
        request.submission = asked

    patch.set("_judge_acknowledgement", judge)


@core("a request ends at the first instance that has no room for it")
def end_for_want_of_blocks(patch: Patch) -> None:
    may_then = patch.original("_may_go_on")

    def may_go_on(self: Attempts, choice: RoutedChoice, cause: MoveCause, where: Instance | None) -> bool:
        return may_then(self, choice, cause, where) and cause is not MoveCause.PREEMPTED

    patch.set("_may_go_on", may_go_on)


@core("preemptions of a request that resumed in place are forgotten when its instance is lost")
def overlook_reported_preemptions(patch: Patch) -> None:
    patch.set("Attempts.preempted", lambda self, member, counts: None)


@core("a router takes what it adopts for requests that nobody has preempted")
def adopt_as_never_preempted(patch: Patch) -> None:
    patch.set("_keep_seniority", lambda self, choice, item: None)


@core("an answer that has begun ends at the deadline of its request")
def end_what_is_overdue(patch: Patch) -> None:
    def end_overdue(self: RoutedRequests) -> None:
        for request in list(self.by_number.values()):
            if request.deadline_us <= self.now_us and not request.orphan and request.opened:
                self.end_all(request, FinishReason.RESCHEDULE, self.overdue())
            elif request.deadline_us <= self.now_us and not request.orphan:
                self.decline(request, RefusalCode.NO_INSTANCE, self.overdue().reason)
        self._in_time.clear()

    patch.set("end_overdue", end_overdue)


# ── members ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("an older life of an instance joins beside, and instead of, the newer one")
def welcome_an_old_life(patch: Patch) -> None:
    objection_then = patch.original("FleetMembers.objection")

    def objection(self: FleetMembers, *given: Any) -> Any:
        made = objection_then(self, *given)
        return None if made is not None and made.fenced else made

    patch.set("FleetMembers.objection", objection)


@core("a silent instance is never suspected: its requests wait for the connection to break")
def suspect_nobody(patch: Patch) -> None:
    patch.set("FleetMembers.silent", lambda self, now_us: [])


@core("only an engine without work counts as one that makes progress: who always computes is taken out as stuck")
def take_work_for_a_hang(patch: Patch) -> None:
    beaten_then = patch.original("FleetMembers.beaten")

    def beaten(self: FleetMembers, member: FleetMember, sign: Heartbeat, now_us: int) -> Any:
        member.ledger = msgspec.structs.replace(member.ledger, steps=sign.ledger.steps)
        return beaten_then(self, member, sign, now_us)

    patch.set("FleetMembers.beaten", beaten)


@core("a router that has slept takes that for silence of all its instances, and does not look twice")
def blame_others_for_its_own_sleep(patch: Patch) -> None:
    def silent(self: FleetMembers, now_us: int) -> list[Suspicion]:
        unheard = [member for member in self.members.values() if now_us - member.heard_us >= self._config.suspect_us]
        return [Suspicion(member, "suspected", "no sign of life") for member in unheard]

    patch.set("FleetMembers.silent", silent)
    patch.set("FleetMembers.excuse", lambda self, late_us: None)


@core("an engine that stands still is not noticed behind a front end that does not")
def overlook_a_silent_engine(patch: Patch) -> None:
    beaten_then = patch.original("FleetMembers.beaten")

    def beaten(self: FleetMembers, member: FleetMember, sign: Heartbeat, now_us: int) -> Any:
        return beaten_then(self, member, replace(sign, engine_silent_us=0), now_us)

    patch.set("FleetMembers.beaten", beaten)


@core("who beats is kept, though it says that it hears nothing of the router")
def keep_who_hears_nothing(patch: Patch) -> None:
    beaten_then = patch.original("FleetMembers.beaten")

    def beaten(self: FleetMembers, member: FleetMember, sign: Heartbeat, now_us: int) -> Any:
        return beaten_then(self, member, replace(sign, router_silent_us=0), now_us)

    patch.set("FleetMembers.beaten", beaten)


@wire("an instance tells nobody that it hears nothing")
def hide_the_silence_of_the_router(patch: Patch) -> None:
    beat_then = patch.original("Heartbeats.beat")
    patch.set("Heartbeats.beat", lambda self, engine, silent_us, now_us: beat_then(self, engine, 0, now_us))


@core("a leg may wait for its answer for ever, as long as its instance beats")
def wait_for_an_answer_for_ever(patch: Patch) -> None:
    beaten_then = patch.original("FleetMembers.beaten")

    def beaten(self: FleetMembers, member: FleetMember, sign: Heartbeat, now_us: int) -> Any:
        return beaten_then(self, member, replace(sign, unanswered=None), now_us)

    patch.set("FleetMembers.beaten", beaten)


@wire("a restarted instance whose clock was set back insists on its own number")
def insist_on_ones_own_number(patch: Patch) -> None:
    patch.set("InstanceSessions._exceed", lambda self, known: None)


@wire("a restarted instance whose clock was set back counts up from its own number instead of the one that it is told")
def count_up_from_ones_own_number(patch: Patch) -> None:
    exceed_then = patch.original("InstanceSessions._exceed")
    patch.set("InstanceSessions._exceed", lambda self, known: exceed_then(self, self._join.incarnation))


@wire("a restarted instance whose clock was set back believes that it was outlived, and ends")
def take_a_former_life_for_a_later_one(patch: Patch) -> None:
    turned_then = patch.original("_on_turned_away")

    def on_turned_away(self: InstanceSessions, message: TurnedAway) -> SessionEffects:
        self._was_welcomed = True
        return turned_then(self, message)

    patch.set("_on_turned_away", on_turned_away)


@wire("an instance that was outlived takes the next number, and drives its later life out")
def come_back_above_the_later_life(patch: Patch) -> None:
    turned_then = patch.original("_on_turned_away")

    def on_turned_away(self: InstanceSessions, message: TurnedAway) -> SessionEffects:
        self._was_welcomed = False
        return turned_then(self, message)

    patch.set("_on_turned_away", on_turned_away)


@core("nobody looks whether steps end: an engine that beats is healthy")
def overlook_a_step_that_hangs(patch: Patch) -> None:
    patch.set("ProgressWatch.limit_us", property(lambda self: LONG_US))


@core("every beat is taken for progress of the step in flight")
def take_beats_for_progress(patch: Patch) -> None:
    beaten_then = patch.original("ProgressWatch.beaten")

    def beaten(self: ProgressWatch, beat: EngineBeat, now_us: int) -> None:
        beaten_then(self, beat, now_us)
        self._settled_us = now_us

    patch.set("ProgressWatch.beaten", beaten)


@core("an engine that was stopped for good is waited for, for ever")
def wait_for_a_stopped_engine(patch: Patch) -> None:
    patch.set("SILENT_US", LONG_US, used_by="ProgressWatch.look")


@core("the limit for a step does not grow with the steps that a model takes: a slow one is killed")
def kill_who_is_slow(patch: Patch) -> None:
    patch.set("ProgressWatch.limit_us", property(lambda self: self._stall_us))


@core("time in which an engine could not run counts as time of its step")
def count_time_without_beats(patch: Patch) -> None:
    patch.set("BEAT_US", LONG_US, used_by="ProgressWatch.beaten")


@core("an instance that drains still gets requests")
def go_on_placing_where_it_drains(patch: Patch) -> None:
    def drain(self: FleetMembers, member: FleetMember, now_us: int) -> None:
        self._move(member, MemberMove.DRAIN)
        member.drain_by_us = now_us + self._config.drain_us

    patch.set("FleetMembers.drain", drain)


@core("what an instance that drains has open stays there, however long that takes")
def never_clear_out(patch: Patch) -> None:
    patch.set("move_all", lambda self, member: None)


@core("what an instance that drains has open goes on elsewhere, and it is not told: two instances compute one answer")
def clear_out_without_a_word(patch: Patch) -> None:
    def move_all(self: Attempts, member: FleetMember) -> None:
        if not self._requests.fleet.servers:
            return
        for choice in [choice for choice in member.choices.values() if choice.state is ChoiceState.OPEN]:
            self.go_on_elsewhere(choice, MoveCause.DRAINED, loss_of(choice, f"{member.name} drains"))

    patch.set("Attempts.move_all", move_all)


@core("an instance that is gone still counts as one that can prefill")
def send_to_a_giver_that_is_gone(patch: Patch) -> None:
    list_then = patch.original("FleetMembers._list")

    def make_lists(self: FleetMembers) -> None:
        before = self.prefillers
        list_then(self)
        self.prefillers = [
            *self.prefillers,
            *(m for m in before if m.state is MemberState.GONE and m not in self.prefillers),
        ]

    patch.set("FleetMembers._list", make_lists)


@core("instances that decode are not told of a new one that prefills")
def tell_nobody_of_neighbours(patch: Patch) -> None:
    handle_then = patch.original("Router.handle")

    def handle(self: Router, event: Any, now_us: int) -> Any:
        return [effect for effect in handle_then(self, event, now_us) if not isinstance(effect, TellPrefillPeers)]

    patch.set("Router.handle", handle)


@core("an instance that connects again is let in beside its former session")
def keep_the_former_session(patch: Patch) -> None:
    joined_then = patch.original("_joined")

    def joined(self: Router, event: Any) -> None:
        self.fleet.by_name.pop(event.facts.name, None)
        joined_then(self, event)

    patch.set("_joined", joined)


# ── what is cached where ─────────────────────────────────────────────────────────────────────────────────────────────────


@core("the prefixes of an instance that is gone are credited to the next that takes its place")
def remember_a_dead_cache(patch: Patch) -> None:
    def close(self: PrefixDirectory, session: Session) -> None:
        del self._by_bit[self._holders.pop(session).bit]

    patch.set("PrefixDirectory.close", close)


@core("names that come with an instance's first sign of life are not taken in")
def overlook_the_first_names(patch: Patch) -> None:
    hear_then = patch.original("PrefixDirectory.hear")

    def hear(self: PrefixDirectory, session: Session, names: CachedKeysChanged) -> None:
        hear_then(self, session, replace(names, named=()) if names.fresh else names)

    patch.set("PrefixDirectory.hear", hear)


@core("an instance does not tell which prefixes it has dropped")
def never_tell_what_was_evicted(patch: Patch) -> None:
    take_then = patch.original("PrefixJournal.take")

    def take(self: PrefixJournal, keys_max: int) -> CachedKeysChanged:
        return replace(take_then(self, keys_max), forgotten=())

    patch.set("PrefixJournal.take", take)


# ── leaving, and what a router leaves behind ─────────────────────────────────────────────────────────────────────────────


@core("the legs of a client that has left are not called back")
def never_call_back(patch: Patch) -> None:
    patch.set("call_back", lambda self, choices: None)


@core("an orphan that nobody comes for is carried for ever")
def keep_orphans(patch: Patch) -> None:
    request_then = patch.original("_request_of")

    def request_of(self: Adoption, item: HeldChoice, digest: bytes) -> RoutedRequest | None:
        request = request_then(self, item, digest)
        if request is not None and request.grace_us is not None:
            request.grace_us = LONG_US
        return request

    patch.set("_request_of", request_of)


@core("a client that has come back is not noticed, and its answer is dropped when the grace is over")
def ignore_a_claim(patch: Patch) -> None:
    patch.set("Adoption.claimed", lambda self, event: None)


@core("what instances have kept for a lost router is thrown away when they join the next")
def throw_away_what_was_kept(patch: Patch) -> None:
    def adopt(self: Adoption, member: FleetMember, held: Sequence[HeldChoice]) -> Any:
        return (), tuple(item.serial for item in held)

    patch.set("Adoption.adopt", adopt)


@core("the longer of two histories of an orphan is taken up, and the instance with the shorter one goes on with it")
def leave_the_shorter_history_running(patch: Patch) -> None:
    wait_then = patch.original("_make_wait")

    def make_wait(self: Adoption, choice: RoutedChoice, item: HeldChoice) -> None:
        requests = self._requests
        if choice.state in (ChoiceState.ABSENT, ChoiceState.WAITING):
            wait_then(self, choice, item)
            return
        requests.leave(choice)
        requests.move(choice, ChoiceMove.LOSE)
        requests.queue.enter(choice, requests.now_us + requests.config.backoff_us_max)

    patch.set("_make_wait", make_wait)


@core("a body that is over is found again at an instance that comes back, and begins once more")
def find_what_is_over(patch: Patch) -> None:
    close_then = patch.original("RoutedRequests.close")

    def close(self: RoutedRequests, request: RoutedRequest) -> None:
        close_then(self, request)
        self.over.clear()

    patch.set("RoutedRequests.close", close)


@core("an end that came while nobody listened is taken for a loss")
def overlook_an_end_that_was_held(patch: Patch) -> None:
    patch.set("OVER", (), used_by="_take_over")
    patch.set("finished_as", lambda choice: None, used_by="_take_over")


# ── wire: the router's end ───────────────────────────────────────────────────────────────────────────────────────────────


@wire("the choices of a leg are taken for each other")
def mix_up_the_choices_of_a_leg(patch: Patch) -> None:
    open_then = patch.original("_open")

    def opened(self: router_sessions.RouterSessions, session: Any, sent: Any, serials: tuple[int, ...], now_us: int) -> Any:
        return open_then(self, session, sent, tuple(reversed(serials)), now_us)

    patch.set("_open", opened)


@wire("instances are never told to forget what is over")
def never_say_forget(patch: Patch) -> None:
    let_go_then = patch.original("router_sessions._release_if_over")

    def let_go(session: Any, sent: Any) -> list[Any]:
        let_go_then(session, sent)
        return []

    patch.set("router_sessions._release_if_over", let_go)


@wire("a leg that was called back before its answer is computed to the end, for nobody")
def forget_what_was_abandoned(patch: Patch) -> None:
    patch.set("RequestTable.abandon", lambda self, ticket: None)


@wire("that a client has found its stop string is not passed on")
def never_pass_on_a_cut(patch: Patch) -> None:
    patch.set("_stop_choice", lambda session, which, keep: [])


@wire("what an instance has held is not admitted to its session, and its next tokens break the rules")
def forget_to_take_up_what_was_held(patch: Patch) -> None:
    patch.set("RequestTable.adopt", lambda self, serial, wanted=True: None)


# ── wire: the instance's end ─────────────────────────────────────────────────────────────────────────────────────────────


@wire("an instance keeps what it had for a lost router for ever")
def keep_beyond_the_grace(patch: Patch) -> None:
    due_then = patch.original("InstanceSessions.next_deadline")

    def next_deadline(self: InstanceSessions) -> int | None:
        return due_then(self) if self.state is InstanceSessionState.JOINING else None

    patch.set("InstanceSessions.next_deadline", next_deadline)


@wire("of the rows that come while no router is there, the first is not written down")
def lose_a_row_of_history(patch: Patch) -> None:
    write_then = patch.original("record_output")

    def write_down(self: HeldChoices, output: StepOutput, serials: list[int]) -> None:
        before = {serial: bytes(self.open[serial].tokens) for serial in serials}
        lines = {serial: self.open[serial] for serial in serials}
        write_then(self, output, serials)
        for serial, line in lines.items():
            if len(before[serial]) == 4:  # its second row
                line.tokens[:] = before[serial]

    patch.set("record_output", write_down)


@wire("what the engine had not answered when the router was lost is computed for nobody, for ever unforgotten")
def keep_what_was_never_answered(patch: Patch) -> None:
    def next_session(self: HeldChoices) -> Any:
        unanswered, self.unanswered = self.unanswered, {}
        try:
            return session_then(self)
        finally:
            self.unanswered = unanswered

    session_then = patch.original("next_session")
    patch.set("next_session", next_session)


@wire("a router's order to cancel is not passed on to the engine")
def never_pass_on_a_cancel(patch: Patch) -> None:
    drop_then = patch.original("HeldChoices.drop")

    def drop(self: HeldChoices, serials: Any) -> Any:
        drop_then(self, serials)
        return []

    patch.set("HeldChoices.drop", drop)


@wire("the welcome does not order the engine to tell what it has cached")
def never_ask_for_names(patch: Patch) -> None:
    welcomed_then = patch.original("_on_welcome")

    def welcomed(self: InstanceSessions, message: Any) -> SessionEffects:
        out = welcomed_then(self, message)
        out.orders = out.orders[:-1]
        return out

    patch.set("_on_welcome", welcomed)


@wire("the history of a choice that has ended is dropped at once")
def forget_ended_choices_early(patch: Patch) -> None:
    end_then = patch.original("_end")

    def end(self: HeldChoices, choice: Any, ended: Any) -> None:
        end_then(self, choice, ended)
        if choice.state is HeldState.ENDED:
            self.drop_all([choice])

    patch.set("_end", end)
