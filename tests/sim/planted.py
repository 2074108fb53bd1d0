"""Bugs planted in the protocol, one at a time, for the simulator's laws to find.

A check that nothing can fail proves nothing. Each bug here is one that systems of this kind have had; it replaces a function
or two of `baton.core` or `baton.wire`, which `support.planting` finds by name, for the time of one run and leaves the
simulator alone. `search_planted` finds a seed that catches each, `catches.json` records it, and `test_planted` replays it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from baton.core.engine import settling
from baton.core.engine.admission import Admission
from baton.core.engine.billing import Billing
from baton.core.engine.blocks import BlockPool
from baton.core.engine.ended import EndedRequest
from baton.core.engine.ending import RequestEnding
from baton.core.engine.orders import Cancel, Drain, StopAt, Submit
from baton.core.engine.plan import Copy, Int32s, Int64s, StepPlan, StepResult
from baton.core.engine.prefix import Key, PrefixIndex
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.prefix_publisher import PrefixPublisher
from baton.core.engine.pressure import BlockPressure
from baton.core.engine.records import PrefixHit, Request, Settled
from baton.core.engine.request import FinishReason, Move, Phase, Serial, Submission, Tokens
from baton.core.engine.running_set import RunningSet
from baton.core.engine.scheduler import Scheduler
from baton.core.engine.settling import StepSettling
from baton.core.engine.slots import NO_REQUEST, Slots
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.step_rows import InFlightStep
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.engine.worker import Effect, Event, Worker
from baton.core.errors import Refusal, RefusalCode
from baton.wire import engine_messages as messages
from baton.wire import keyfile
from baton.wire import request_table as desking
from baton.wire.engine_messages import DecodedRows, StepOutput
from baton.wire.peer_session import KnownSessions, PeerSession
from baton.wire.request_table import EntryState, RequestTable
from baton.wire.seal import OVERHEAD_BYTES, TAG_BYTES, Seal, SealSide
from baton.wire.sealed_stream import ConnectionStage, SealedStream
from tests.support.planting import Patch, planted

CATCHES = Path(__file__).with_name("catches.json")


Plant = Callable[[Patch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    layer: str
    story: str
    """What an operator would see or write into the post-mortem."""
    plant: Plant

    def planted(self) -> AbstractContextManager[Patch]:
        return planted(self.name, self.plant)


class Catch(NamedTuple):
    """Where a bug is known to be caught."""

    seed: int
    law: str


BUGS: dict[str, Bug] = {}


def bug(layer: str, story: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        if plant.__name__ in BUGS:
            raise ValueError(f"there are two planted bugs {plant.__name__}")
        BUGS[plant.__name__] = Bug(plant.__name__, layer, story, plant)
        return plant

    return register


def read_catches() -> dict[str, Catch]:
    recorded = json.loads(CATCHES.read_text()) if CATCHES.exists() else {}
    return {name: Catch(item["seed"], item["law"]) for name, item in recorded.items()}


def write_catches(catches: dict[str, Catch]) -> None:
    """In the order of the registry; what is no longer in it is dropped."""
    kept = {name: catches[name]._asdict() for name in BUGS if name in catches}
    CATCHES.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


core, wire = partial(bug, "core"), partial(bug, "wire")


# ── core: slots and preemption ───────────────────────────────────────────────────────────────────────────────────────────


@core("a preempted request queues again before its last step is back, and repeats tokens")
def requeue_before_the_ack(patch: Patch) -> None:
    order_then = patch.original("RunningSet.order_stop")

    def order_stop(self: RunningSet, request: Request, move: Move) -> None:
        order_then(self, request, move)
        if move is Move.PREEMPT:
            request.outputs = self.slots.outputs(self.slot_of(request))
            known = np.concatenate((request.submission.prompt, request.outputs))
            request.keys = PrefixLookup(self).keys_of(request.submission, known)
            vars(self)["queue of the bug"].push(request)

    init_then = patch.original("RequestEnding.__init__")

    def init(self: RequestEnding, running: RunningSet, queue: WaitingQueue, *parts: Any) -> None:
        init_then(self, running, queue, *parts)
        vars(running)["queue of the bug"] = queue  # part of its state, so that it is in snapshots too

    patch.set("RequestEnding.__init__", init)
    patch.set("RunningSet.order_stop", order_stop)
    patch.set("RequestEnding.requeue", lambda self, request: self._running.move(request, Move.ACK_PREEMPTION))


@core("a preempted request comes back without its last token, and the client gets that one twice")
def forget_a_token_at_a_restart(patch: Patch) -> None:
    requeue_then = patch.original("RequestEnding.requeue")

    def requeue(self: RequestEnding, request: Request) -> None:
        requeue_then(self, request)
        request.outputs = request.outputs[:-1]

    patch.set("RequestEnding.requeue", requeue)


@core("blocks of a stopped request are free at the order, while a step in flight still writes them")
def free_blocks_at_the_order(patch: Patch) -> None:
    order_then = patch.original("RunningSet.order_stop")

    def order_stop(self: RunningSet, request: Request, move: Move) -> None:
        order_then(self, request, move)
        slot = self.slot_of(request)
        self.pool.drop(self.slots.blocks(slot))
        self.slots.held[slot] = 0

    patch.set("RunningSet.order_stop", order_stop)


@core("the result of a step is appended though its request has ended meanwhile")
def append_a_stale_result(patch: Patch) -> None:
    def fence(self: StepSettling, step: InFlightStep) -> Int64s:
        del self
        return np.arange(step.stops, len(step.rows.slots))

    patch.set("_fence", fence)


@core("a request that finishes while it is asked to yield gets a second stop")
def stop_twice_when_a_victim_finishes(patch: Patch) -> None:
    end_then = patch.original("RequestEnding.end")

    def end(self: RequestEnding, request: Request, reason: FinishReason, move: Move) -> EndedRequest:
        if request.phase is Phase.PREEMPTING and move is Move.FINISH:
            self._running.stopping.append(self._running.slot_of(request))
        return end_then(self, request, reason, move)

    patch.set("RequestEnding.end", end)


@core("half-filled prompts are asked to yield as if they were decoding")
def choose_a_prefilling_victim(patch: Patch) -> None:
    def candidates(slots: Slots, asker: int) -> Int64s:
        rows = slots.running()
        return rows[~slots.protected[rows] & (slots.priority[rows] >= slots.priority[asker])]

    patch.set("candidates", candidates)


@core("requests that have yielded often enough are asked again and again")
def protect_nobody(patch: Patch) -> None:
    start_then = patch.original("Admission.start")

    def start(self: Admission, step: StepBuilder, request: Request, hit: PrefixHit, protected: bool) -> None:
        del protected
        start_then(self, step, request, hit, False)

    patch.set("Admission.start", start)


@core("growth of others takes the blocks that a protected request was promised")
def let_growth_touch_what_is_promised(patch: Patch) -> None:
    grow_then, promised_then = patch.original("_grow_or_wait"), patch.original("BlockPromises.promised")
    growing: list[bool] = []

    def grow_or_wait(self: BlockPressure, step: StepBuilder, rows: Int64s, short: Int64s) -> Any:
        growing.append(True)
        try:
            return grow_then(self, step, rows, short)
        finally:
            growing.pop()

    patch.set("_grow_or_wait", grow_or_wait)
    patch.set("BlockPromises.promised", lambda self, slots: 0 if growing else promised_then(self, slots))


@core("the rows that decode are remembered over a move, and those that have ended decode on")
def remember_the_crew_over_a_move(patch: Patch) -> None:
    move_then = patch.original("RunningSet.move")

    def move(self: RunningSet, request: Request, move: Move) -> None:
        decoding = self._decoding
        move_then(self, request, move)
        self._decoding = decoding if move is Move.FINISH else None

    patch.set("RunningSet.move", move)


@core("newcomers are admitted without regard to what started prefills still lack")
def admit_without_reserve(patch: Patch) -> None:
    patch.set("BlockPromises.kept", lambda self, slots, asker=None: 0)


@core("every resumed request is found to disagree with the device, and ends with an error")
def distrust_resumed_requests(patch: Patch) -> None:
    split_then = patch.original("_split_broken")

    def split(self: StepSettling, step: InFlightStep, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        sound, broken = split_then(self, step, result, live)
        resumed = step.rows.epochs[sound] > 1
        return sound[~resumed], np.concatenate((broken, sound[resumed]))

    patch.set("_split_broken", split)


@core("one row on which device and scheduler disagree ends everybody in its step")
def blame_the_whole_step(patch: Patch) -> None:
    split_then = patch.original("_split_broken")

    def split(self: StepSettling, step: InFlightStep, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        sound, broken = split_then(self, step, result, live)
        return (sound[:0], live) if len(broken) else (sound, broken)

    patch.set("_split_broken", split)


@core("a row that is free keeps the phase of the request that was preempted in it")
def keep_the_phase_of_an_empty_row(patch: Patch) -> None:
    def vacate(self: Slots, slot: int) -> None:
        self.serial[slot] = NO_REQUEST
        self._empty.append(slot)

    patch.set("Slots.vacate", vacate)


# ── core: blocks and the prefix cache ────────────────────────────────────────────────────────────────────────────────────


@core("each finished request leaves one block behind that is never free again")
def leak_a_block_at_the_ack(patch: Patch) -> None:
    drop_then = patch.original("BlockPool.drop")
    patch.set("BlockPool.drop", lambda self, blocks: drop_then(self, blocks[1:]))


@core("the second user of a shared prefix block is not counted, so the first to leave frees it")
def count_shared_blocks_once(patch: Patch) -> None:
    def hold(self: BlockPool, blocks: Int32s) -> None:
        self._evictable_count -= self.unreferenced(blocks)
        self._references[blocks] = 1

    patch.set("BlockPool.hold", hold)


@core("a cached block that somebody uses is evicted all the same")
def evict_blocks_in_use(patch: Patch) -> None:
    patch.set("_is_evictable", lambda self, block: bool(self._cached[block]))


def _chained(patch: Patch, chain: Callable[[PrefixIndex, Key, bytes], Key]) -> None:
    """Let blocks be named in another way, wherever names are made."""

    def keys_of(self: PrefixIndex, tokens: Tokens, salt: bytes, block_size: int) -> list[Key]:
        keys = [self.root(salt)]
        for begin in range(0, len(tokens) - block_size + 1, block_size):
            keys.append(chain(self, keys[-1], tokens[begin : begin + block_size].tobytes()))
        return keys

    patch.set("PrefixIndex.chain", chain)
    patch.set("PrefixIndex.keys_of", keys_of)


@core("blocks are cached under their own tokens, whatever came before them")
def name_blocks_without_their_parent(patch: Patch) -> None:
    chain_then = patch.original("PrefixIndex.chain")
    _chained(patch, lambda self, parent, tokens: chain_then(self, Key(b""), tokens))


@core("only the first token of a block goes into its cache key")
def name_blocks_by_their_first_token(patch: Patch) -> None:
    chain_then = patch.original("PrefixIndex.chain")
    _chained(patch, lambda self, parent, tokens: chain_then(self, parent, tokens[:4]))


@core("one tenant's cached prefixes are found by another")
def forget_the_salt(patch: Patch) -> None:
    root_then = patch.original("PrefixIndex.root")
    patch.set("PrefixIndex.root", lambda self, salt: root_then(self, b""))


@core("all blocks of a prompt count as computed when its first chunk has run")
def publish_uncomputed_blocks(patch: Patch) -> None:
    def note_chunks(self: StepSettling, step: InFlightStep, live: Int64s) -> None:
        slots, size = self._slots, self._running.config.block_size
        first, last = step.stops, step.stops + len(step.chunks)
        for row in live[(live >= first) & (live < last)].tolist():
            slot = step.chunks[row - first].slot
            slots.computed[slot] = min(slots.known[slot], slots.held[slot] * size)

    patch.set("_note_chunks", note_chunks)


@core("the block of the last sampled token is cached before that token has KV")
def cache_the_last_sampled_tokens_block(patch: Patch) -> None:
    unpublished_then = patch.original("PrefixPublisher.unpublished")

    def unpublished(self: PrefixPublisher, at: Int64s) -> tuple[Int64s, Int64s]:
        slots = self._slots
        decoded = slots.known[at] > slots.prompt[at]
        slots.computed[at] = np.where(decoded, slots.known[at], slots.computed[at])
        return unpublished_then(self, at)

    patch.set("PrefixPublisher.unpublished", unpublished)


@core("a block is cached under the name of the block before it")
def publish_under_the_parents_name(patch: Patch) -> None:
    publish_then = patch.original("BlockPool.publish")

    def publish(self: BlockPool, keys: list[Key], parents: list[Key], blocks: list[int]) -> None:
        publish_then(self, keys[:-1], parents[:-1], blocks[1:])

    patch.set("BlockPool.publish", publish)


@core("sibling choices are given a block for the end of the prompt, but nothing is copied into it")
def forget_the_copy_for_siblings(patch: Patch) -> None:
    build_then = patch.original("StepBuilder.build")

    def build(self: StepBuilder) -> StepPlan:
        self.copies.clear()
        return build_then(self)

    patch.set("StepBuilder.build", build)


@core("the block at the end of the prompt is copied for a sibling from the wrong one")
def copy_backwards(patch: Patch) -> None:
    patch.set("Copy", lambda source, target: Copy(target, source), used_by="Admission.start")


@core("a full cache hit computes nothing at all, so the first token is drawn from the one before")
def trust_a_full_hit(patch: Patch) -> None:
    find_then = patch.original("PrefixLookup.find")

    def find(self: PrefixLookup, request: Request) -> PrefixHit:
        hit = find_then(self, request)
        whole = hit.copy_from is None and hit.computed and hit.computed == request.tokens_at_start - 1
        return msgspec.structs.replace(hit, computed=hit.computed - 1) if whole else hit

    patch.set("PrefixLookup.find", find)


@core("a block is published under a key that another block has: the key finds the later one, and both say that it is theirs")
def name_two_blocks_alike(patch: Patch) -> None:
    def publish(self: PrefixIndex, keys: Sequence[Key], parents: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        for key, parent, block in zip(keys, parents, blocks, strict=True):
            self._block_of[key], self._key_of[block], self._parent_of[block] = block, key, parent
            self._children[parent] = self._children.get(parent, 0) + 1
            if self.journal is not None:
                self.journal.changed(key, True)
        return list(blocks)

    patch.set("PrefixIndex.publish", publish)


# ── core: tokens, ends and bills ─────────────────────────────────────────────────────────────────────────────────────────


@core("token 0 is taken for no token")
def drop_token_zero(patch: Patch) -> None:
    append_then = patch.original("Slots.append")

    def append(self: Slots, rows: Int64s, tokens: np.ndarray) -> None:
        append_then(self, rows[tokens != 0], tokens[tokens != 0])

    patch.set("Slots.append", append)


@core("a stop token inside a burst is not seen")
def see_stops_only_first_in_a_burst(patch: Patch) -> None:
    def append_all(self: StepSettling, result: StepResult, rows: Int64s, at: Int64s) -> Any:
        firsts, counts = settling._firsts_of(result, rows), result.counts[rows]
        stopped = self._append(at, result.tokens[firsts])
        for nth in range(1, self._burst):
            going = ((counts > nth) & ~stopped).nonzero()[0]
            self._slots.append(at[going], result.tokens[firsts[going] + nth])
        return np.where(stopped, 1, counts).astype(np.int32), stopped

    patch.set("_append_all", append_all)


@core("max_tokens is off by one")
def generate_one_token_more(patch: Patch) -> None:
    limit_then = patch.original("_limit")

    def limit(self: Worker, submission: Submission) -> int:
        return min(self.config.sequence_tokens_max, limit_then(self, submission) + 1)

    patch.set("_limit", limit)


@core("requests end twice")
def end_a_request_twice(patch: Patch) -> None:
    settle_then = patch.original("StepSettling.settle")

    def settle(self: StepSettling, result: StepResult) -> Settled:
        settled = settle_then(self, result)
        return msgspec.structs.replace(settled, ended=tuple(ended for ended in settled.ended for _ in range(2)))

    patch.set("StepSettling.settle", settle)


@core("the stop token is delivered but not counted in the usage")
def leave_the_stop_token_out_of_the_usage(patch: Patch) -> None:
    end_then = patch.original("RequestEnding.end")

    def end(self: RequestEnding, request: Request, reason: FinishReason, move: Move) -> EndedRequest:
        ended = end_then(self, request, reason, move)
        if reason is FinishReason.STOP and move is Move.FINISH:
            return msgspec.structs.replace(ended, generated_tokens=ended.generated_tokens - 1)
        return ended

    patch.set("RequestEnding.end", end)


@core("tokens after a stop string are counted in the usage")
def lose_where_the_answer_was_cut(patch: Patch) -> None:
    order_then = patch.original("Scheduler.order_stop")

    def order_stop(
        self: Scheduler, serial: Serial, reason: FinishReason, now_us: int, keep: int | None = None
    ) -> EndedRequest | None:
        del keep
        return order_then(self, serial, reason, now_us)

    patch.set("Scheduler.order_stop", order_stop)


@core("an answer that ran into max_tokens is said to have stopped by itself")
def say_stop_for_length(patch: Patch) -> None:
    end_then = patch.original("RequestEnding.end")

    def end(self: RequestEnding, request: Request, reason: FinishReason, move: Move) -> EndedRequest:
        return end_then(self, request, FinishReason.STOP if reason is FinishReason.LENGTH else reason, move)

    patch.set("RequestEnding.end", end)


@core("cached prompt tokens are billed as computed")
def bill_cached_tokens_as_computed(patch: Patch) -> None:
    charge_then = patch.original("Billing.start")

    def charge(self: Billing, request: Request, found: int, now_us: int) -> None:
        charge_then(self, request, found, now_us)
        if request.epoch == 1:
            request.computed_ever = 0

    patch.set("Billing.start", charge)


@core("after a restart, what the cache has of prompt and answer is told as cached prompt tokens")
def bill_own_outputs_as_cached(patch: Patch) -> None:
    charge_then = patch.original("Billing.start")

    def charge(self: Billing, request: Request, found: int, now_us: int) -> None:
        charge_then(self, request, found, now_us)
        request.bill.cached_tokens = found

    patch.set("Billing.start", charge)


@core("log-probabilities of a prompt keep the number of their row in the step, which in the delivery is a stranger's")
def give_prompt_logprobs_to_another_row(patch: Patch) -> None:
    with_then = patch.original("StepSettling._with_prompts")

    def with_prompts(self: StepSettling, step: InFlightStep, result: StepResult, live: Int64s, delivery: Any) -> Any:
        (serials, *others), prompts = with_then(self, step, result, live, delivery)
        row_of = {int(step.rows.serials[item.row]): item.row for item in result.prompt_logprobs}
        last = len(serials) - 1
        moved = [msgspec.structs.replace(item, row=min(last, row_of[int(serials[item.row])])) for item in prompts]
        return (serials, *others), tuple(moved)

    patch.set("StepSettling._with_prompts", with_prompts)


@core("a prompt whose log-probabilities are asked for is taken from the cache: those of its cached part never come")
def find_a_prompt_to_be_scored_in_the_cache(patch: Patch) -> None:
    find_then = patch.original("PrefixLookup.find")

    def find(self: PrefixLookup, request: Request) -> PrefixHit:
        asked = request.submission
        sampling = msgspec.structs.replace(asked.sampling, prompt_logprobs=None)
        request.submission = msgspec.structs.replace(asked, sampling=sampling)
        try:
            hit: PrefixHit = find_then(self, request)
            return hit
        finally:
            request.submission = asked

    patch.set("PrefixLookup.find", find)


# ── core: the queue, cancelling and the door ─────────────────────────────────────────────────────────────────────────────


@core("sibling choices are never let into the queue")
def never_release_followers(patch: Patch) -> None:
    patch.set("release_followers", lambda self, leader: None)


@core("a cancelled sibling is still counted as waiting, until the queue is full of nobody")
def count_cancelled_siblings_as_waiting(patch: Patch) -> None:
    stop_then = patch.original("Scheduler._stop")

    def stop(self: Scheduler, request: Request, reason: FinishReason) -> EndedRequest | None:
        held_back = self._queue._held_back
        waits = request.slot is None
        ended = stop_then(self, request, reason)
        if waits:
            self._queue._held_back = held_back
        return ended

    patch.set("Scheduler._stop", stop)


@core("a request cancelled in the queue stays in it, and starts when its turn comes")
def leave_cancelled_requests_in_the_queue(patch: Patch) -> None:
    patch.set("WaitingQueue.remove", _remove_only_the_head)


def _remove_only_the_head(self: WaitingQueue, request: Request) -> None:
    if self.head is request:
        del self._places[0]


@core("cancelling a request while its prompt is computed does nothing")
def ignore_a_cancel_while_prefilling(patch: Patch) -> None:
    order_then = patch.original("Scheduler.order_stop")

    def order_stop(
        self: Scheduler, serial: Serial, reason: FinishReason, now_us: int, keep: int | None = None
    ) -> EndedRequest | None:
        request = self.running.requests.get(serial)
        if request is not None and request.phase is Phase.RUNNING_PREFILL:
            return None
        return order_then(self, serial, reason, now_us, keep)

    patch.set("Scheduler.order_stop", order_stop)


@core("a cancelled prefill keeps its place among the prefills, and is computed on")
def prefill_what_was_cancelled(patch: Patch) -> None:
    def order_stop(self: RunningSet, request: Request, move: Move) -> None:
        slot = self.slot_of(request)
        self.move(request, move)
        self.stopping.append(slot)

    patch.set("RunningSet.order_stop", order_stop)


@core("a cancelled request ends at once, and its slot is forgotten")
def forget_the_slot_of_a_cancelled_request(patch: Patch) -> None:
    def order_end(self: RequestEnding, request: Request, reason: FinishReason) -> None:
        running = self._running
        request.ends_as = reason
        slot = running.slot_of(request)
        running.slots.discarded[slot] = True
        self._queue.release_followers(request)
        if slot in running.prefilling:
            running.prefilling.remove(slot)
        if request.phase is not Phase.PREEMPTING:
            running.move(request, Move.ORDER_STOP)

    patch.set("RequestEnding.order_end", order_end)


@core("after a pass that could plan nothing, none is due any more")
def never_be_due_after_an_idle_pass(patch: Patch) -> None:
    deadline_then = patch.original("Worker.next_deadline")
    patch.set("Worker.next_deadline", lambda self: None if self._planned_out else deadline_then(self))


@core("requests of a front end that is gone run on")
def run_on_for_a_lost_front_end(patch: Patch) -> None:
    patch.set("_stop_all", lambda self: [])


@core("a draining instance accepts requests as before")
def accept_while_draining(patch: Patch) -> None:
    handle_then = patch.original("Worker.handle")

    def handle(self: Worker, event: Event, now_us: int) -> list[Effect]:
        effects = handle_then(self, event, now_us)
        self._draining = False
        return effects

    patch.set("Worker.handle", handle)


@core("a drain ends what is open instead of waiting for it")
def kill_open_requests_in_a_drain(patch: Patch) -> None:
    handle_then = patch.original("Worker.handle")

    def handle(self: Worker, event: Event, now_us: int) -> list[Effect]:
        effects = handle_then(self, event, now_us)
        return effects + self._stop_all() if isinstance(event, Drain) else effects

    patch.set("Worker.handle", handle)


@core("the queue takes more than it may")
def ignore_the_bound_of_the_queue(patch: Patch) -> None:
    refusal_then = patch.original("_refusal")

    def refusal(self: Worker, group: tuple[Submission, ...]) -> Any:
        found = refusal_then(self, group)
        return None if found is not None and found.code == "queue_full" else found

    patch.set("_refusal", refusal)


@core("of a group that does not fit, the first choice is kept in the queue though the group is refused")
def refuse_half_a_group(patch: Patch) -> None:
    submit_then = patch.original("_submit")

    def submit(self: Worker, event: Submit) -> Any:
        answer = submit_then(self, event)
        if getattr(answer, "refusal", None) is not None and answer.refusal.code == "queue_full":
            first = event.group[0]
            self.scheduler.enqueue(first, self._limit(first), self._now_us)
        return answer

    patch.set("_submit", submit)


# ── wire: connections ────────────────────────────────────────────────────────────────────────────────────────────────────


@wire("the tag of a frame covers nothing, and flipped bits get through")
def check_no_tag_of_a_frame(patch: Patch) -> None:
    patch.set("_body_tag", lambda key, head, payload: bytes(TAG_BYTES))


@wire("the number of a frame is not looked at, and a frame that somebody repeats is delivered twice")
def check_no_frame_number(patch: Patch) -> None:
    patch.set("_is_due", lambda self, number: True)


@wire("frames may be missing before the one that comes, and nobody notices that somebody took them out")
def skip_missing_frames(patch: Patch) -> None:
    def is_due(self: Seal, number: int) -> bool:
        if number < self._opened:
            return False
        self._opened = number
        return True

    patch.set("_is_due", is_due)


@wire("both directions of a connection have one key, and a frame sent back to its sender is taken for an answer")
def seal_both_directions_with_one_key(patch: Patch) -> None:
    derived_then = patch.original("_derived")

    def derived(self: Seal, what: str, side: SealSide) -> Any:
        return derived_then(self, what, SealSide.CONNECTOR if what == "frames" else side)

    patch.set("_derived", derived)


@wire("every connection has the same nonce, and a recorded one can be played again")
def reuse_the_nonce(patch: Patch) -> None:
    init_then = patch.original("Seal.__init__")

    def init(self: Seal, side: SealSide, key: bytes, name: str, nonce: bytes, frame_bytes_max: int) -> None:
        init_then(self, side, key, name, bytes(len(nonce)), frame_bytes_max)

    patch.set("Seal.__init__", init)


@wire("whatever comes where a proof is due is taken for one")
def take_any_proof(patch: Patch) -> None:
    patch.set("_proves", lambda self, proof: True)


@wire("a side counts as proved as soon as it has said its name")
def believe_a_hello(patch: Patch) -> None:
    patch.set("Seal.is_proved", property(lambda self: self._peer is not None))


@wire("a process under our own name is let in")
def take_our_own_name(patch: Patch) -> None:
    greet_then = patch.original("_greet")

    def greet(self: Seal, hello: bytes, name: bytes) -> None:
        ours, self._name = self._name, ""
        greet_then(self, hello, name)
        self._name = ours

    patch.set("_greet", greet)


@wire("what has come of a frame is delivered, though the rest is still on its way")
def deliver_half_frames(patch: Patch) -> None:
    take_then = patch.original("_take_frame")

    def take(self: Seal, frames: list[bytes]) -> Any:
        if take_then(self, frames):
            return True
        if len(self._buffer) > OVERHEAD_BYTES:
            frames.append(bytes(self._buffer[OVERHEAD_BYTES - TAG_BYTES :]))
            self._buffer.clear()
            self._opened += 1
        return False

    patch.set("_take_frame", take)


@wire("the numbers of frames go on in the next connection, which the other side begins at 0")
def carry_numbers_into_the_next_connection(patch: Patch) -> None:
    init_then, seal_then = patch.original("Seal.__init__"), patch.original("Seal.seal")
    sealed: dict[str, int] = {}

    def init(self: Seal, side: SealSide, key: bytes, name: str, nonce: bytes, frame_bytes_max: int) -> None:
        init_then(self, side, key, name, nonce, frame_bytes_max)
        self._sealed = sealed.get(name, 0) if side is SealSide.CONNECTOR else 0

    def seal(self: Seal, frame: bytes) -> Any:
        made = seal_then(self, frame)
        sealed[self._name] = self._sealed
        return made

    patch.set("Seal.__init__", init)
    patch.set("Seal.seal", seal)


@wire("frames that come in one piece with the end of the handshake are lost")
def lose_what_came_with_the_proof(patch: Patch) -> None:
    receive_then = patch.original("SealedStream.receive")

    def receive(self: SealedStream, data: bytes, now_us: int) -> Any:
        received = receive_then(self, data, now_us)
        return received._replace(frames=[]) if received.opened else received

    patch.set("SealedStream.receive", receive)


@wire("a sign of life is passed on as if it were a message")
def pass_on_signs_of_life(patch: Patch) -> None:
    take_then = patch.original("take_into")

    def take_into(self: Seal, data: bytes, frames: list[bytes]) -> None:
        take_then(self, data, frames)
        frames[:] = [frame or b"\0" for frame in frames]

    patch.set("take_into", take_into)


@wire("a sign of life does not count as one, and an idle peer is given up")
def hear_no_sign_of_life(patch: Patch) -> None:
    receive_then = patch.original("SealedStream.receive")

    def receive(self: SealedStream, data: bytes, now_us: int) -> Any:
        before_us = self._heard_us
        received = receive_then(self, data, now_us)
        if not (received.opened or received.frames):
            self._heard_us = before_us
        return received

    patch.set("SealedStream.receive", receive)


@wire("an idle side gives no sign of life, and healthy instances are given up")
def send_no_sign_of_life(patch: Patch) -> None:
    tick_then = patch.original("SealedStream.tick")

    def tick(self: SealedStream, now_us: int) -> Any:
        silent_us = self._config.silent_us
        if silent_us is None or now_us - self._heard_us < silent_us:
            self._sent_us = now_us
        return tick_then(self, now_us)

    patch.set("SealedStream.tick", tick)


@wire("a side that nobody hears of any more is never given up")
def never_notice_silence(patch: Patch) -> None:
    tick_then = patch.original("SealedStream.tick")

    def tick(self: SealedStream, now_us: int) -> Any:
        self._heard_us = now_us
        return tick_then(self, now_us)

    patch.set("SealedStream.tick", tick)


@wire("a handshake may take for ever, and who connected to a process that then died waits for it")
def wait_for_ever_for_a_proof(patch: Patch) -> None:
    tick_then = patch.original("SealedStream.tick")

    def tick(self: SealedStream, now_us: int) -> Any:
        if self._stage is ConnectionStage.UNPROVED:
            self._began_us = now_us
            return None
        return tick_then(self, now_us)

    patch.set("SealedStream.tick", tick)


@wire("nobody counts what the other side leaves unread")
def ignore_what_is_unread(patch: Patch) -> None:
    patch.set("SealedStream.unread", lambda self, waiting_bytes, now_us: None)


@wire("a connection that is over goes on sending")
def send_after_the_end(patch: Patch) -> None:
    end_then = patch.original("SealedStream.end")

    def end(self: SealedStream, fault: str | None, reason: str) -> Any:
        ended = end_then(self, fault, reason)
        if ended is not None and ended.was is ConnectionStage.OPEN and fault is not None:
            self._stage = ConnectionStage.OPEN
            return None
        return ended

    patch.set("SealedStream.end", end)


@wire("connections that are over are counted as open, until no more are taken")
def count_connections_that_ended(patch: Patch) -> None:
    patch.set("AcceptedStreams.ended", lambda self, connection: connection in self._open)


@wire("an instance or router never takes a second connection: after the first loss it is there and serves nobody")
def take_one_connection_only(patch: Patch) -> None:
    opened_then = patch.original("AcceptedStreams.opened")
    taken: set[int] = set()

    def opened(self: Any, connection: Any) -> Any:
        if id(self) in taken and not self._open:
            return False
        taken.add(id(self))
        return opened_then(self, connection)

    patch.set("AcceptedStreams.opened", opened)


@wire("a peer is spoken to before it has accepted our registration")
def speak_before_being_registered(patch: Patch) -> None:
    receive_then = patch.original("_receive_registration")

    def receive(self: PeerSession, frame: bytes, unfit: Any) -> Any:
        self._is_accepted = True
        return receive_then(self, frame, unfit)

    patch.set("_receive_registration", receive)


@wire("what the worker said in one session with a peer is sent in the next one")
def speak_in_the_next_session(patch: Patch) -> None:
    began_then = patch.original("KnownSessions.began")
    last: dict[int, int] = {}

    def began(self: KnownSessions, session: int) -> None:
        began_then(self, session)
        last[id(self)] = session

    def of(self: KnownSessions, peer: Any) -> int | None:
        return last.get(id(self))

    patch.set("KnownSessions.began", began)
    patch.set("KnownSessions.of", of)


@wire("log-probabilities are those of another token")
def misread_logprobs(patch: Patch) -> None:
    lines_then = patch.original("logprob_lines")
    patch.set("logprob_lines", lambda item: [(value + 1, top) for value, top in lines_then(item)])


@wire("a step loses its log-probabilities on the way")
def lose_logprobs(patch: Patch) -> None:
    init_then = patch.original("DecodedRows.__init__")

    def init(self: DecodedRows, output: StepOutput) -> None:
        init_then(self, output)
        self.logprobs = {}

    patch.set("DecodedRows.__init__", init)


# ── wire: the desk ───────────────────────────────────────────────────────────────────────────────────────────────────────


@wire("an end that comes together with tokens is lost")
def lose_an_end_that_comes_with_tokens(patch: Patch) -> None:
    step_then = patch.original("_step")

    def step(self: RequestTable, output: StepOutput) -> Any:
        heard = set(DecodedRows(output).serials)
        return step_then(
            self, msgspec.structs.replace(output, ended=tuple(e for e in output.ended if e.serial not in heard))
        )

    patch.set("_step", step)


@wire("what was accepted for a client that had left is not cancelled")
def cancel_nothing_for_abandoned_tickets(patch: Patch) -> None:
    accepted_then = patch.original("RequestTable._accepted")

    def accepted(self: RequestTable, ticket: int, serials: tuple[int, ...]) -> desking.TableNews:
        return desking.TableNews(accepted_then(self, ticket, serials).news, [])

    patch.set("RequestTable._accepted", accepted)


@wire("clients that left are told of the loss of their instance, though they have ended")
def tell_the_loss_to_those_who_left(patch: Patch) -> None:
    patch.set("wire._reported", list)


@wire("requests that were told to stop are forgotten when their instance is lost, and never end")
def forget_stopping_requests_at_a_loss(patch: Patch) -> None:
    heard_then = patch.original("wire._reported")

    def heard(book: dict[int, EntryState]) -> list[int]:
        return [key for key in heard_then(book) if book[key] is not EntryState.STOPPING]

    patch.set("wire._reported", heard)


@wire("groups that wait for their answer are forgotten when their instance is lost")
def forget_tickets_at_a_loss(patch: Patch) -> None:
    lose_then = patch.original("RequestTable.lose")
    patch.set("RequestTable.lose", lambda self, reason: [end for end in lose_then(self, reason) if end.ticket is None])


@wire("the choices of a group change places when it is accepted")
def swap_the_choices_of_a_group(patch: Patch) -> None:
    accepted_then = patch.original("RequestTable._accepted")

    def accepted(self: RequestTable, ticket: int, serials: tuple[int, ...]) -> desking.TableNews:
        return accepted_then(self, ticket, serials[::-1])

    patch.set("RequestTable._accepted", accepted)


@wire("an end of a request from before the reconnection is taken for a breach of protocol")
def stumble_over_ends_of_a_former_session(patch: Patch) -> None:
    ends_then = patch.original("_ends")

    def ends(self: RequestTable, ended: tuple[EndedRequest, ...]) -> dict[int, EndedRequest]:
        before, self._first_serial = self._first_serial, 0
        try:
            return ends_then(self, ended)
        finally:
            self._first_serial = before

    patch.set("_ends", ends)


@wire("a client that has stopped reading its answer hears nothing more of it, not even the end")
def hear_nothing_after_a_stop(patch: Patch) -> None:
    step_then = patch.original("_step")

    def step(self: RequestTable, output: StepOutput) -> Any:
        stopping = [serial for serial, state in self._serials.items() if state is EntryState.STOPPING]
        took = step_then(self, output)
        for serial in stopping if took.step is not None else ():
            took.step.ended.pop(serial, None)
        return took

    patch.set("_step", step)


# ── wire: messages and dispatch ──────────────────────────────────────────────────────────────────────────────────────────


@wire("the rows of a step change places on the wire")
def swap_the_rows_of_a_step(patch: Patch) -> None:
    init_then = patch.original("DecodedRows.__init__")

    def init(self: DecodedRows, output: StepOutput) -> None:
        init_then(self, output)
        self.serials.sort(reverse=True)

    patch.set("DecodedRows.__init__", init)


@wire("of a burst of tokens only the first travels")
def send_one_token_a_row(patch: Patch) -> None:
    init_then = patch.original("DecodedRows.__init__")

    def init(self: DecodedRows, output: StepOutput) -> None:
        init_then(self, output)
        begins = np.cumsum([0, *self.counts])[:-1].tolist()
        self.tokens = [self.tokens[at] for at in begins]
        self.counts = [1] * len(self.counts)

    patch.set("DecodedRows.__init__", init)


def _altered(patch: Patch, alter: Callable[[Submission], Submission]) -> None:
    """Let the front end change every submission that it sends."""
    patch.set("Submit", lambda ticket, group: Submit(ticket, tuple(map(alter, group))), used_by="RequestTable.submit")


@wire("the seed is lost on the wire, and nobody gets the same answer twice")
def lose_the_seed(patch: Patch) -> None:
    def alter(item: Submission) -> Submission:
        return msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, seed=0))

    _altered(patch, alter)


@wire("all choices of a group are sampled as the first")
def lose_the_choice(patch: Patch) -> None:
    def alter(item: Submission) -> Submission:
        return msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, choice=0))

    _altered(patch, alter)


@wire("only one stop token travels with a request")
def send_one_stop_token(patch: Patch) -> None:
    def alter(item: Submission) -> Submission:
        only = item.sampling.stop_token_ids[:1]
        return msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, stop_token_ids=only))

    _altered(patch, alter)


@wire("min_tokens is lost on the wire")
def lose_min_tokens(patch: Patch) -> None:
    def alter(item: Submission) -> Submission:
        return msgspec.structs.replace(item, sampling=msgspec.structs.replace(item.sampling, min_tokens=0))

    _altered(patch, alter)


@wire("the tenant's salt is lost on the wire, and tenants share their prefixes")
def lose_the_salt(patch: Patch) -> None:
    _altered(patch, lambda item: msgspec.structs.replace(item, salt=b""))


@wire("followers find no prompt with their leader, and are refused")
def lose_the_prompt_of_followers(patch: Patch) -> None:
    filled_in_then = patch.original("with_shared_prompts")

    def filled_in(group: tuple[Submission, ...]) -> tuple[Submission, ...]:
        return tuple(
            item if item.leader is None else msgspec.structs.replace(item, prompt=item.prompt[:0])
            for item in filled_in_then(group)
        )

    patch.set("with_shared_prompts", filled_in)


def _ends_altered(patch: Patch, alter: Callable[[EndedRequest], EndedRequest]) -> None:
    """Let the codec change every end of a request on its way."""
    encode_then = messages._encoder.encode

    class Altering:
        def encode(self, message: object) -> bytes:
            if isinstance(message, StepOutput):
                message = msgspec.structs.replace(message, ended=tuple(map(alter, message.ended)))
            return encode_then(message)

    patch.set("_encoder", Altering(), used_by="encode_from_engine")


@wire("the usage in the last message says the tokens of that step, not of the request")
def count_only_the_last_step(patch: Patch) -> None:
    _ends_altered(patch, lambda end: msgspec.structs.replace(end, generated_tokens=min(1, end.generated_tokens)))


@wire("computed and recomputed tokens change places in the bill on the wire")
def swap_columns_of_the_bill(patch: Patch) -> None:
    def alter(end: EndedRequest) -> EndedRequest:
        bill = end.bill
        swapped = msgspec.structs.replace(bill, cached_tokens=bill.computed_tokens, computed_tokens=bill.cached_tokens)
        return msgspec.structs.replace(end, bill=swapped)

    _ends_altered(patch, alter)


def _orders_altered(patch: Patch, alter: Callable[[Any], Any]) -> None:
    """Let the codec change every order on its way."""
    decode_then = messages._to_engine.decode

    class Altering:
        def decode(self, frame: bytes) -> Any:
            return alter(decode_then(frame))

    patch.set("_to_engine", Altering(), used_by="decode_to_engine")


@wire("a stop string is passed on one token too late")
def cut_one_token_too_late(patch: Patch) -> None:
    _orders_altered(patch, lambda it: StopAt(it.serial, it.keep + 1) if isinstance(it, StopAt) else it)


@wire("a cancel reaches the engine as a stop, and a client that left is billed for a finished answer")
def dispatch_a_cancel_as_a_stop(patch: Patch) -> None:
    _orders_altered(patch, lambda it: StopAt(it.serial, 0) if isinstance(it, Cancel) else it)


@wire("a cancel names the request after the one it means")
def cancel_the_neighbour(patch: Patch) -> None:
    _orders_altered(patch, lambda it: Cancel(it.serial + 1) if isinstance(it, Cancel) else it)


@wire("the end of a request that was still waiting is not told")
def keep_withdrawals_to_ourselves(patch: Patch) -> None:
    patch.set("ended_output", lambda _ended, gauges, drafts: messages.gauges_output(gauges, drafts))


@wire("a refusal is answered to ticket 0")
def refuse_the_wrong_ticket(patch: Patch) -> None:
    refused_then = patch.original("wire.refused")
    patch.set("wire.refused", lambda ticket, refusal: refused_then(0, refusal))


# ── what a reader of the laws thought they might not see ─────────────────────────────────────────────────────────────────


@wire("an instance that has served before is never taken for ready again")
def believe_only_the_first_ready(patch: Patch) -> None:
    take_then = patch.original("RequestTable.take")

    def take(self: RequestTable, message: Any) -> Any:
        if isinstance(message, messages.ReadyMessage) and message.gauges.steps:
            return desking.TableNews([], [])
        return take_then(self, message)

    patch.set("RequestTable.take", take)


@core("an answer that drew a stop token ends as `length`, one that ran to its limit as `stop`")
def swap_the_reasons(patch: Patch) -> None:
    end_then = patch.original("RequestEnding.end")
    other = {FinishReason.STOP: FinishReason.LENGTH, FinishReason.LENGTH: FinishReason.STOP}

    def end(self: RequestEnding, request: Request, reason: FinishReason, move: Move) -> EndedRequest:
        return end_then(self, request, other.get(reason, reason), move)

    patch.set("RequestEnding.end", end)


@core("the queue is full before it is full")
def count_a_group_twice(patch: Patch) -> None:
    refusal_then = patch.original("_refusal")

    def refusal(self: Worker, group: tuple[Submission, ...]) -> Any:
        found = refusal_then(self, group)
        if found is None and self.scheduler.waiting + 2 * len(group) > self.config.waiting_max:
            return Refusal(RefusalCode.QUEUE_FULL, "the queue is full", 1)
        return found

    patch.set("_refusal", refusal)


@wire("a damaged key file is taken for a key")
def believe_any_key(patch: Patch) -> None:
    def read_key(data: bytes) -> bytes | None:
        secret = data[12 : 12 + keyfile.KEY_BYTES]
        return secret if len(secret) == keyfile.KEY_BYTES else None

    patch.set("read_key", read_key)


@wire("of an abandoned group only the first choice is cancelled; the others run on for nobody")
def cancel_the_first_choice_only(patch: Patch) -> None:
    accepted_then = patch.original("RequestTable._accepted")

    def accepted(self: RequestTable, ticket: int, serials: tuple[int, ...]) -> Any:
        took = accepted_then(self, ticket, serials)
        return desking.TableNews(took.news, took.orders[:1])

    patch.set("RequestTable._accepted", accepted)


@core("when the front end is gone, what runs runs on")
def stop_only_the_waiting_orphans(patch: Patch) -> None:
    def stop_all(self: Worker) -> list[Effect]:
        serials = [request.serial for request in self.scheduler.requests() if request.slot is None]
        return [effect for serial in serials for effect in self._stop(serial, FinishReason.ABORT, None)]

    patch.set("_stop_all", stop_all)


@core("the bill counts the time in the queue from the beginning of the world")
def bill_the_clock(patch: Patch) -> None:
    charge_then = patch.original("Billing.start")

    def charge(self: Billing, request: Request, found: int, now_us: int) -> None:
        charge_then(self, request, found, now_us)
        request.bill.queue_us += now_us

    patch.set("Billing.start", charge)


@core("a cancel is lost on a request that is just yielding; it comes back and runs to its end")
def never_cancel_the_yielding(patch: Patch) -> None:
    stop_then = patch.original("Scheduler.order_stop")

    def order_stop(self: Scheduler, serial: Serial, reason: FinishReason, now_us: int, keep: int | None = None) -> Any:
        request = self.running.requests.get(serial)
        if request is not None and request.phase is Phase.PREEMPTING:
            return None
        return stop_then(self, serial, reason, now_us, keep)

    patch.set("Scheduler.order_stop", order_stop)


@core("a cancel is lost while a step is in flight")
def cancel_only_when_idle(patch: Patch) -> None:
    stop_then = patch.original("Worker._stop")

    def stop(self: Worker, serial: Serial, reason: FinishReason, keep: int | None) -> list[Effect]:
        return [] if self.scheduler.in_flight else stop_then(self, serial, reason, keep)

    patch.set("Worker._stop", stop)


@wire("the accepting side checks a proof and does not answer with its own, so the other side never opens")
def never_answer_a_proof(patch: Patch) -> None:
    take_then = patch.original("_take_proof")

    def take_proof(self: Seal) -> Any:
        taken = take_then(self)
        if self._side is SealSide.ACCEPTOR:
            self._outgoing = b""
        return taken

    patch.set("_take_proof", take_proof)


# ── snapshots ──────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a snapshot forgets in which order slots became free, and a replay takes others than the engine did")
def forget_the_order_of_free_slots(patch: Patch) -> None:
    fields_then = patch.original("Slots.snapshot_fields")

    def snapshot_fields(self: Slots) -> dict[str, object]:
        return fields_then(self) | {"_empty": sorted(self._empty)}

    patch.set("Slots.snapshot_fields", snapshot_fields)


@core("a snapshot forgets what steps in flight may still yield, and a replay plans more than there is room for")
def forget_what_is_pending(patch: Patch) -> None:
    fields_then = patch.original("Slots.snapshot_fields")

    def snapshot_fields(self: Slots) -> dict[str, object]:
        return fields_then(self) | {"pending": np.zeros_like(self.pending)}

    patch.set("Slots.snapshot_fields", snapshot_fields)


@wire("a snapshot forgets the order of what is used least recently, and a replay drops others than the engine did")
def forget_the_order_of_dictionaries(patch: Patch) -> None:
    def put(made: dict[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
        for key, value in sorted(zip(keys, values, strict=True), key=repr):
            made[key] = value  # noqa: PERF403  of a Counter, update would add

    patch.set("snapshot._put", put)
