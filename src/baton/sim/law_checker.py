"""Checks the laws of a world, the promises to clients and operators, while it runs.

Owns the verdict. A broken promise raises `LawBroken` with the law's name; so does a broken invariant of the core, and any
exception of our own code. The invariants of the core are checked on the worker that handled an event: cheap ones after each
event, all of them every 32 events, after each order to end something, when a phase ends, and after every event when a
failure is replayed.

Every refusal, loss and failure needs a cause. Causes are the faults that did hit that instance at that time (`KnownCauses`),
not the faults that the seed could inject.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Protocol, TypeVar

from baton.core.config import DECODE, PREFILL, WorkerConfig
from baton.core.engine.ended import EndedRequest
from baton.core.engine.laws import LAWS
from baton.core.engine.orders import Accepted, Cancel, Drain, StopAt, Submit
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.request import FinishReason, Phase, RequestId, Serial, Submission
from baton.core.engine.worker import Deliver, Effect, Event, FrontEndLost, GroupRefused, StepDone, Withdrawn, Worker
from baton.core.errors import InvariantViolated, Refusal, RefusalCode
from baton.core.routing.events import ChoiceOutcome
from baton.core.tiers.transfers import TransferId
from baton.executor.constraints.scripted_backend import fits
from baton.executor.scripted import undisturbed
from baton.sim.faults import Fault
from baton.sim.handover_laws import HandoverLaws
from baton.sim.instance import SimulatedInstance
from baton.sim.law_names import (
    CAN_RESUME,
    DEADLOCK,
    DESERVED_ERROR,
    DESERVED_LOSS,
    DESERVED_REFUSAL,
    ENDS_AT_ONCE,
    FITTING,
    HANDOVERS_END,
    LEDGER_SUMS,
    LINE_BOUND,
    NOT_YOUNGER,
    NOTHING_HELD,
    OWN_CHECKS,
    OWN_PREFIXES,
    QUEUE_BOUND,
    RECOVERY,
    SAME_TOKENS,
    TRUE_BILL,
    TRUE_DRAIN,
    TRUE_END,
    WHOLE_KEY,
    LawBroken,
)
from baton.sim.transfer_laws import TRANSFER_ENDS, TransferLaws
from baton.sim.world import World
from baton.wire.request_table import LostEntry

AUDIT_EVERY = 32
FOR_NOW = (RefusalCode.QUEUE_FULL, RefusalCode.DRAINING, RefusalCode.NO_INSTANCE, RefusalCode.RATE_LIMITED)
Ended = EndedRequest | ChoiceOutcome
"""The end of a choice, as an instance or a router reports it."""

State = TypeVar("State", bound=Enum)
Move = TypeVar("Move", bound=Enum)


def move_name(machine: str, state: Enum, move: Enum) -> str:
    return f"{machine}: {state.name} ─{move.value}→"


def peer_tables() -> list[tuple[str, list[tuple[Enum, Enum]]]]:
    """The state machines of a worker with peers, and every transition of each."""
    tables: list[tuple[str, list[tuple[Enum, Enum]]]] = []
    for role in (PREFILL, DECODE):
        worker = Worker(WorkerConfig(slots=1, blocks=1, role=role), PrefixIndex(bytes(16), b"", 1))
        if worker.prefill_side is not None:
            tables.append(("giver", list(worker.prefill_side.moves())))
        if worker.decode_side is not None:
            tables.append(("taker", list(worker.decode_side.moves())))
    return tables


def transfer_table() -> tuple[str, list[tuple[Enum, Enum]]]:
    """Every kind of transfer of KV outside the pool, with every way in which it can end."""
    return "haul", [(kind, end) for kind, end in TRANSFER_ENDS]


class KnownCauses(Protocol):
    """The faults that were injected, as causes of losses that clients see."""

    def may_be_lost(self, instance: int, accepted: bool) -> bool:
        """Whether a fault hit this instance, or its connection, that can end a session now.

        A restart after a drain is no cause for losing an accepted request: open requests end before it.
        """

    def may_be_forgotten(self, origin: bytes, lost_us: int) -> bool:
        """Whether a fault since `lost_us` hit an instance that kept this request for a lost router."""


class _Behind:
    """State of a worker that laws need beyond its events and effects."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def knows(self, serial: Serial) -> bool:
        return self._worker.scheduler.request(serial) is not None

    def loads(self) -> list[tuple[TransferId, Serial]]:
        if self._worker.prefill_side is not None:
            return []
        return [
            (transfer.id, transfer.serial) for transfer in self._worker.scheduler.tiers.open() if transfer.serial is not None
        ]


class InstanceRecord:
    """Per life of an instance: accepted requests, requests that must end, and the laws of hand-overs and transfers."""

    def __init__(self, audit_in: int, laws: HandoverLaws | None, transfers: TransferLaws | None = None) -> None:
        self.audit_in = audit_in
        self._steps = 0
        self._accepted_us: dict[int, int] = {}
        self._doomed: dict[int, int] = {}
        """Requests that were ordered to end, and the step by which each must be gone."""
        self.peers = laws
        self.transfers = transfers

    @property
    def awaited_blocks(self) -> int:
        """Blocks reserved for KV that arrives from a peer or from host memory."""
        leased = 0 if self.peers is None else self.peers.leased_blocks
        return leased if self.transfers is None else leased + self.transfers.arriving_blocks

    def note(self, worker: Worker, event: Event, effects: Sequence[Effect], deadline_us: int | None, now_us: int) -> bool:
        """Returns whether the event is rare enough to check all invariants after it."""
        for effect in effects:
            match effect:
                case Accepted(_, serials):
                    self._accepted_us.update(dict.fromkeys(serials, now_us))
                case Deliver(settled):
                    for ended in settled.ended:
                        self._time_is_billed(ended, now_us)
                case Withdrawn(ended):
                    self._time_is_billed(ended, now_us)
        if self.transfers is not None:
            self.transfers.note(_Behind(worker), event, effects, self._accepted_us, deadline_us, now_us)
        match event:
            case StepDone():
                self._steps += 1
                if self._doomed:
                    self._look_for_the_doomed(worker)
                return False
            case Cancel(serial) | StopAt(serial, _):
                self._doom(worker, [serial])
                return True
            case FrontEndLost():
                if worker.prefill_side is None:  # requests at a giver belong to its peers
                    self._doom(worker, [request.serial for request in worker.scheduler.requests()])
                return True
        return False

    def _time_is_billed(self, ended: EndedRequest, now_us: int) -> None:
        bill, took_us = ended.bill, now_us - self._accepted_us.pop(ended.serial)
        spent_us = bill.queue_us + bill.prefill_us + bill.transfer_us + bill.decode_us
        if spent_us != took_us or (bill.recomputed_tokens and not bill.preemptions):
            raise LawBroken(TRUE_BILL, f"request {ended.serial} was open for {took_us} µs: {bill}")

    def _doom(self, worker: Worker, serials: Sequence[int]) -> None:
        """A running request must end with the step after those in flight; a waiting one at once."""
        for serial in serials:
            request = worker.scheduler.request(Serial(serial))
            if worker.decode_side is not None and worker.decode_side.knows(Serial(serial)):
                continue  # it ends with its fence, which HandoverLaws checks
            if request is not None and request.slot is not None and worker.scheduler.slots.restoring[request.slot]:
                continue  # it ends with its fence, which TransferLaws checks
            if request is not None:
                if request.phase is Phase.WAITING:
                    raise LawBroken(ENDS_AT_ONCE, f"request {serial} still waits after the order to end it")
                self._doomed.setdefault(serial, self._steps + worker.config.depth + 1)

    def _look_for_the_doomed(self, worker: Worker) -> None:
        for serial, by_step in tuple(self._doomed.items()):
            if worker.scheduler.request(Serial(serial)) is None:
                del self._doomed[serial]
            elif self._steps >= by_step:
                raise LawBroken(ENDS_AT_ONCE, f"request {serial} was told to end {worker.config.depth + 1} steps ago")


class LawChecker:
    def __init__(
        self, world: World, causes: KnownCauses, vocabulary: int, undelivered_max: int | None, always_audit: bool = False
    ) -> None:
        self.ends: Counter[str] = Counter()
        """Number of requests by how they ended, over the whole world."""
        self.moves: Counter[str] = Counter()
        """Number of times each transition was taken, over all lives of all processes."""
        self.calm = False
        """Whether everything has recovered: from then on no fault is a cause."""
        self._world = world
        self._causes = causes
        self._vocabulary = vocabulary
        self._undelivered_max = undelivered_max
        self._audit_every = 1 if always_audit else AUDIT_EVERY
        self._records: dict[tuple[int, int], InstanceRecord] = {}
        self._asked: defaultdict[bytes, list[bytes]] = defaultdict(list)
        """The prompt and expected answer of each submission, by salt."""
        self._keys: dict[int, list[bytes]] = {}
        """The prefix keys that the lives of each instance have made."""
        self._errors = 0
        self.peers_share_a_store = False
        """Whether a prefill by a peer that failed may be found in the store by the instance that then prefills itself."""
        self.behind_router = False
        """Whether there is a router: without members it cannot tell an impossible request from one that must wait."""

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def began(self, instance: SimulatedInstance, secret: bytes, made: bool) -> None:
        """Check that the key was made by this life or an earlier one, and not damaged by the disk."""
        keys = self._keys.setdefault(instance.spec.number, [])
        if made:
            keys.append(secret)
        elif secret not in keys:
            raise LawBroken(WHOLE_KEY, f"{instance.host.name} took a damaged key from its disk")

    def handled(self, instance: SimulatedInstance, event: Event, effects: Sequence[Effect]) -> None:
        """Called after each event of its worker."""
        worker, record = instance.require_worker(), self._record(instance)
        deadline_us = worker.next_deadline()
        arriving = self._cheap_laws(worker, deadline_us)
        if self._undelivered_max is not None and instance.undelivered > self._undelivered_max:
            raise LawBroken(LINE_BOUND, f"{instance.undelivered} frames wait at {instance.host.name}")
        if type(event) is Submit:
            self._answered(instance, worker, event, effects[0])
        if record.peers is not None:
            record.peers.note(event, effects, deadline_us, self._world.now_us)
        rare = record.note(worker, event, effects, deadline_us, self._world.now_us)
        if arriving != record.awaited_blocks:
            raise LawBroken(LEDGER_SUMS, f"{record.awaited_blocks} blocks wait for KV, {arriving} are marked for it")
        record.audit_in -= 1
        if rare or record.audit_in <= 0:
            record.audit_in = self._audit_every
            self.audit(worker)

    def _record(self, instance: SimulatedInstance) -> InstanceRecord:
        place = instance.spec.number, instance.life
        record = self._records.get(place)
        if record is None:
            config = instance.spec.config
            laws = HandoverLaws(config, instance.host.name) if config.role.takes or config.role.gives else None
            transfers = TransferLaws(config, instance.host.name) if config.tiers.host_rows else None
            record = self._records[place] = InstanceRecord(self._audit_every, laws, transfers)
        return record

    def _cheap_laws(self, worker: Worker, deadline_us: int | None) -> int:
        """Returns the number of blocks that the pool reserves for KV that arrives."""
        config, scheduler = worker.config, worker.scheduler
        blocks, held = scheduler.pool.gauges(), scheduler.pool.referenced
        used = blocks.running + blocks.leased + blocks.receiving + blocks.leaving
        if used != held or min(blocks.free, blocks.evictable, blocks.running, blocks.leaving) < 0:
            raise LawBroken(LEDGER_SUMS, f"{held} blocks are held: {blocks}")
        if deadline_us is None and scheduler.requests() and not scheduler.asleep:
            raise LawBroken(DEADLOCK, "no pass is due")
        # Preempted requests return to the queue even if it is full.
        waiting, most = scheduler.waiting, config.waiting_max + config.slots
        if worker.prefill_side is not None:
            waiting, most = worker.prefill_side.queued, config.waiting_max
        if waiting > most:
            raise LawBroken(QUEUE_BOUND, f"{waiting} wait, {config.waiting_max} may")
        return blocks.leased + blocks.receiving

    def _answered(self, instance: SimulatedInstance, worker: Worker, event: Submit, answer: Effect) -> None:
        if isinstance(answer, Accepted) and Drain in instance.ordered:
            raise LawBroken(TRUE_DRAIN, f"{instance.host.name} accepts ticket {event.ticket}")
        if isinstance(answer, GroupRefused):
            self._refusal_at_the_worker(instance, worker, event, answer.refusal)

    def _refusal_at_the_worker(self, instance: SimulatedInstance, worker: Worker, event: Submit, refusal: Refusal) -> None:
        waiting = sum(request.phase is Phase.WAITING for request in worker.scheduler.requests())
        if refusal.code is RefusalCode.QUEUE_FULL and waiting + len(event.group) <= worker.config.waiting_max:
            raise LawBroken(DESERVED_REFUSAL, f"{waiting} wait and {len(event.group)} come: {refusal}")
        if refusal.code is RefusalCode.DRAINING and Drain not in instance.ordered:
            raise LawBroken(DESERVED_REFUSAL, f"{instance.host.name} was never told to drain: {refusal}")

    def audit(self, worker: Worker) -> None:
        for name, law in LAWS.items():
            try:
                law(worker.scheduler)
            except InvariantViolated as error:
                raise LawBroken(name, str(error)) from error

    def buried(self, instance: SimulatedInstance) -> None:
        """A life has ended: add its transitions to the totals."""
        if instance.worker is not None:
            worker = instance.worker
            self.took_moves("request", worker.scheduler.moves())
            if worker.prefill_side is not None:
                self.took_moves("giver", worker.prefill_side.moves())
            if worker.decode_side is not None:
                self.took_moves("taker", worker.decode_side.moves())
            transfers = self._record(instance).transfers
            if transfers is not None:
                self.took_moves("haul", transfers.moves)
                self._world.fired[Fault.STORE_LEFT_ALONE] += transfers.left_alone

    def took_moves(self, machine: str, moves: Mapping[tuple[State, Move], int]) -> None:
        for (state, move), times in moves.items():
            if times:
                self.moves[move_name(machine, state, move)] += times

    def cached_names(self, instance: SimulatedInstance) -> set[bytes]:
        """The keys of all prefixes that it has cached."""
        return set(instance.require_worker().scheduler.pool.prefix.names().values())

    def handovers_to(self, instance: SimulatedInstance) -> int:
        laws = self._record(instance).peers
        return 0 if laws is None else laws.made

    def names_of(self, instance: SimulatedInstance, number: TransferId) -> tuple[Key, ...]:
        """The keys of the blocks that an open transfer moves."""
        tiers = instance.require_worker().scheduler.tiers
        return next((transfer.keys for transfer in tiers.open() if transfer.id == number), ())

    def waits_for(self, instance: SimulatedInstance, number: TransferId) -> RequestId | None:
        """The request whose KV an open copy brings back."""
        scheduler = instance.require_worker().scheduler
        serials = [transfer.serial for transfer in scheduler.tiers.open() if transfer.id == number]
        request = scheduler.request(serials[0]) if serials and serials[0] is not None else None
        return None if request is None else request.submission.request_id

    def store_looks(self, instance: SimulatedInstance) -> int:
        """Number of Look orders to the store in this life."""
        laws = self._record(instance).transfers
        return 0 if laws is None else laws.looks

    def nothing_held_for(
        self, instance: SimulatedInstance, peer: str, peer_life: SimulatedInstance | None, since_us: int
    ) -> None:
        laws = self._record(instance).peers
        held = None if laws is None else laws.held_for(peer, since_us, _queued_at(peer_life, instance.host.name))
        if held is not None:
            raise LawBroken(HANDOVERS_END, f"{held}; {peer} died or the world healed at {since_us}")

    def nothing_lands(self, name: str, inflows: int, outflows: int) -> None:
        if inflows or outflows:
            raise LawBroken(NOTHING_HELD, f"{name} still expects {inflows} transfers and has {outflows} open")

    def nothing_held(self, instance: SimulatedInstance) -> None:
        gauges = instance.require_worker().gauges()
        blocks, laws = gauges.blocks, self._record(instance).peers
        held = gauges.running, gauges.waiting, gauges.handovers.open, gauges.storage.transfers
        kept = blocks.running, blocks.leased, blocks.receiving, blocks.leaving
        if any(held + kept):
            what = "running, waiting, hand-overs, hauls; blocks running, leased, receiving, leaving"
            raise LawBroken(NOTHING_HELD, f"{instance.host.name} still has {held + kept} {what}")
        if laws is not None and laws.open:
            raise LawBroken(NOTHING_HELD, f"{instance.host.name} has {laws.open} asked, leased or on their way out")

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def expected(self, submission: Submission, tokens: int) -> list[int]:
        """The tokens of an undisturbed run of this submission."""
        outputs = undisturbed(submission.prompt, submission.sampling, tokens, self._vocabulary)
        # One byte per token: the vocabulary is small.
        self._asked[submission.salt].append(bytes(submission.prompt.tolist() + outputs))
        return outputs

    def tokens(self, name: str, before: int, new: Sequence[int], expected: Sequence[int]) -> None:
        if list(new) != list(expected[before : before + len(new)]):
            raise LawBroken(SAME_TOKENS, f"{name} got {list(new)} at {before}, not {expected[before : before + len(new)]}")

    def ended(
        self,
        name: str,
        ended: Ended,
        submission: Submission,
        expected: list[int],
        got: int,
        keep: int | None,
        left: bool,
        resumed: bool = False,
    ) -> None:
        """Check the end of an answer: the client `got` a number of the `expected` tokens, stopped it at `keep`, or `left`.

        A client that has `resumed` may have received more than the router that reports the end has delivered.
        """
        self.ends[ended.reason if ended.fault is None else f"{ended.reason}: {int(ended.fault.code)}"] += 1
        match FinishReason(ended.reason):
            case FinishReason.ABORT:
                # Tokens after a client has left are not searched for stop strings, so it may run on to its limit.
                if not left or got > ended.generated_tokens:
                    raise LawBroken(TRUE_END, f"{name}, {got} tokens, client {'gone' if left else 'there'}: {ended}")
            case FinishReason.RESCHEDULE:
                # The cause is checked at the worker.
                whole = (
                    left or keep is not None or got == ended.generated_tokens or (resumed and got > ended.generated_tokens)
                )
                if ended.fault is None or not whole or ended.generated_tokens >= len(expected):
                    raise LawBroken(TRUE_END, f"{name}, {got} of {len(expected)} tokens: {ended}")
            case FinishReason.ERROR:
                self._errors += 1
                if self._errors > self._world.fired[Fault.DISAGREEMENT]:
                    raise LawBroken(DESERVED_ERROR, f"{name} ended with an error")
            case FinishReason.CONSTRAINT_FAILED:
                raise LawBroken(FITTING, f"{name}: after {got} tokens nothing was permitted")
            case FinishReason.STOP | FinishReason.LENGTH:
                _fits(name, submission, expected)
                self._whole_answer(name, ended, submission, expected, got, keep, left)
                self._whole_bill(name, submission, ended)

    def _whole_answer(
        self,
        name: str,
        ended: Ended,
        submission: Submission,
        expected: list[int],
        got: int,
        keep: int | None,
        left: bool,
    ) -> None:
        sampling, whole = submission.sampling, ended.generated_tokens == len(expected)
        cut = keep is not None and ended.generated_tokens == min(keep, len(expected))
        complete = got == ended.generated_tokens or keep is not None or left
        drew_stop = expected[-1] in sampling.stop_token_ids and len(expected) > sampling.min_tokens
        right = FinishReason.STOP if drew_stop else FinishReason.LENGTH
        said = FinishReason(ended.reason)
        if not complete or not ((whole and said is right) or (cut and said is FinishReason.STOP)):
            raise LawBroken(TRUE_END, f"{name}: {got} of {len(expected)} tokens came, cut at {keep}: {ended}")

    def bill(
        self,
        name: str,
        submission: Submission,
        ended: Ended,
        cached_tokens: int | None,
        preemptions_max: int,
        resumed: bool = False,
    ) -> None:
        """`cached_tokens`: as reported to the client with its first token."""
        bill = ended.bill
        # A restarted router may know only a later attempt.
        if cached_tokens is not None and cached_tokens != bill.cached_tokens and not resumed:
            raise LawBroken(TRUE_BILL, f"{name} was told of {cached_tokens} cached tokens first: {bill}")
        if min(bill.queue_us, bill.prefill_us, bill.decode_us, bill.recomputed_tokens, bill.computed_tokens) < 0:
            raise LawBroken(TRUE_BILL, f"{name}: {bill}")
        known, attempts = len(submission.prompt), 1
        if isinstance(ended, ChoiceOutcome):
            known, attempts = known + ended.generated_tokens, max(1, bill.attempts)
        if bill.cached_tokens >= known:
            raise LawBroken(TRUE_BILL, f"{name}, {len(submission.prompt)} tokens in the prompt: {bill}")
        if bill.preemptions > preemptions_max:
            raise LawBroken(NOT_YOUNGER, f"{name} is protected after {preemptions_max} preemptions anywhere: {bill}")
        if attempts > 1 or resumed or (self.peers_share_a_store and bill.attempts):
            return  # an earlier attempt, or a peer that had begun it, may have cached it
        found = bytes(submission.prompt[: bill.cached_tokens].tolist())
        if found and sum(whole.startswith(found) for whole in self._asked[submission.salt]) < 2:  # one is its own
            raise LawBroken(OWN_PREFIXES, f"{name} found {len(found)} tokens that nobody of its tenant has asked for")

    def _whole_bill(self, name: str, submission: Submission, ended: Ended) -> None:
        """Check the bill of a complete answer: all but the last token were fed, and perhaps tokens past a stop string."""
        if isinstance(ended, ChoiceOutcome):
            return  # AttemptLaws checks the sum over its attempts
        prompt, fed = len(submission.prompt), ended.bill.cached_tokens + ended.bill.computed_tokens
        least = prompt + ended.generated_tokens - 1
        if fed < least or (ended.reason is FinishReason.LENGTH and fed > least):
            raise LawBroken(TRUE_BILL, f"{name}: {fed} tokens fed, {least} had to be: {ended}")

    def refused(self, name: str, refusal: Refusal, impossible: bool) -> None:
        self.ends[f"refused: {refusal.code}"] += 1
        if self.calm:
            raise LawBroken(RECOVERY, f"{name} was refused: {refusal}")
        # That the queue is full or the instance drains is checked at the worker.
        for_now = refusal.code in FOR_NOW
        instead = for_now and not self.behind_router and refusal.code is not RefusalCode.DRAINING
        if instead if impossible else not for_now:
            raise LawBroken(DESERVED_REFUSAL, f"{name}: {refusal}")

    def lost(self, name: str, instance: int, end: LostEntry) -> None:
        self.ends["lost"] += 1
        if self.calm or not self._causes.may_be_lost(instance, accepted=end.serial is not None):
            raise LawBroken(DESERVED_LOSS, f"{name} at instance {instance}: {end.reason}")
        if not end.retryable or not end.reason:
            raise LawBroken(TRUE_END, f"{name} lost its instance and is not told that it may try again: {end}")

    def not_resumed(self, name: str, origin: bytes, lost_us: int) -> None:
        """A client tried to resume its answer for as long as it may, and the router did not find it."""
        if not self._causes.may_be_forgotten(origin, lost_us):
            raise LawBroken(CAN_RESUME, f"{name} lost its router at {lost_us} and finds nothing of its answer")

    def found_nobody(self, name: str, choices: int, serving: Mapping[int, bool]) -> None:
        """No instance could take the request; those that serve have full lines."""
        self.ends["nobody serves"] += choices
        for instance, serves in serving.items():
            if self.calm or not (serves or self._causes.may_be_lost(instance, accepted=False)):
                raise LawBroken(DESERVED_LOSS, f"{name} finds nobody, though nothing has happened to instance {instance}")


def as_law(work: Callable[[], None]) -> None:
    """Run `work`; turn any exception of our code into a LawBroken."""
    try:
        work()
    except LawBroken:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{PurePath(frame.filename).name}:{frame.lineno}, {frame.name}"
        raise LawBroken(OWN_CHECKS, f"{type(error).__name__} in {where}: {error}") from error


def _queued_at(prefill: SimulatedInstance | None, peer: str) -> set[tuple[int, int]]:
    """(request, attempt) of what this peer has asked it for and whose turn has not come."""
    side = None if prefill is None or prefill.worker is None else prefill.worker.prefill_side
    entries = () if side is None else side.open()
    return {
        (entry.handover.request, entry.handover.attempt)
        for entry in entries
        if entry.handover.peer == peer and entry.serial is None
    }


def _fits(name: str, submission: Submission, tokens: list[int]) -> None:
    """Checks an answer against its own words, apart from what the executor made of them."""
    sampling = submission.sampling
    if sampling.constraint is not None and not fits(sampling.constraint.source, tokens):
        raise LawBroken(FITTING, f"{name} got {tokens}, which its constraint does not allow")
    if sampling.allowed_token_ids and not set(tokens) <= set(sampling.allowed_token_ids):
        raise LawBroken(FITTING, f"{name} got {tokens}, and only {sampling.allowed_token_ids} are allowed")
    for word in sampling.bad_words:
        if any(tuple(tokens[at : at + len(word)]) == word for at in range(len(tokens))):
            raise LawBroken(FITTING, f"{name} got {tokens}, and {word} is a bad word")
