"""The laws of a world: what clients and operators were promised, checked while it runs.

Owns the verdict. A broken promise is a `LawBroken` with the law's name; so is a law of the core, and an error that our own
code raised. The laws of the core are checked on the worker that was touched: a cheap one after each event, all of them every
64 events, when a phase ends, and after every event when a failure is replayed.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence

from baton.core.errors import BatonError, InvariantViolated, Refusal, RefusalCode
from baton.core.laws import LAWS
from baton.core.request import FinishReason, Submission
from baton.core.worker import Worker
from baton.executor.scripted import undisturbed
from baton.sim.faults import MAY_LOSE_AN_INSTANCE
from baton.wire.desk import Lost
from baton.wire.messages import WireEnded

AUDIT_EVERY = 64

ENDS_ONCE = "every request ends exactly once"
SAME_TOKENS = "a client's tokens are those of an undisturbed run"
TRUE_END = "the end says what was delivered, and why"
TRUE_BILL = "the bill adds up"
DESERVED_REFUSAL = "only what cannot be served now is refused"
DESERVED_LOSS = "nobody loses an instance that was never gone"
DESERVED_ERROR = "nobody pays for a disagreement that never was"
LIVENESS = "after healing, every open request ends in time"
DEADLOCK = "while a request is open, something is due"
NOTHING_HELD = "nothing stays held when nobody is left"
OWN_PREFIXES = "a cached prefix was asked for before, by the same tenant"
QUEUE_BOUND = "the queue holds no more than it may"
LEDGER_SUMS = "the ledger sums to the pool"
OWN_CHECKS = "our own code found no fault"


class LawBroken(BatonError):
    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
        self.what = what


class Judge:
    def __init__(self, classes: Sequence[str], vocabulary: int, always_audit: bool = False) -> None:
        self.ends: Counter[str] = Counter()
        """How requests ended, over the whole world."""
        self.moves: Counter[str] = Counter()
        """How often each transition of a request was taken, over all lives of all workers."""
        self.disagreements = 0
        self._asked: Counter[tuple[bytes, tuple[int, ...]]] = Counter()
        """How many submissions begin with these tokens, or may in the end, by salt."""
        self._classes = classes
        self._vocabulary = vocabulary
        self._audit_every = 1 if always_audit else AUDIT_EVERY
        self._audit_in = self._audit_every

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def look_at(self, worker: Worker) -> None:
        """After each event of this worker."""
        gauges = worker.scheduler.pool.gauges()
        if gauges.free + gauges.evictable + gauges.running != worker.config.blocks:
            raise LawBroken(LEDGER_SUMS, f"{gauges} in a pool of {worker.config.blocks}")
        if not worker.is_idle and worker.next_deadline() is None:
            raise LawBroken(DEADLOCK, "no pass is due")
        most = worker.config.waiting_max + worker.config.slots  # whoever must yield goes back into a full queue too
        if worker.scheduler.waiting > most:
            raise LawBroken(QUEUE_BOUND, f"{worker.scheduler.waiting} wait, {worker.config.waiting_max} may")
        self._audit_in -= 1
        if not self._audit_in:
            self._audit_in = self._audit_every
            self.audit(worker)

    def audit(self, worker: Worker) -> None:
        for name, law in LAWS.items():
            try:
                law(worker.scheduler)
            except InvariantViolated as error:
                raise LawBroken(name, str(error)) from error

    def bury(self, worker: Worker) -> None:
        """A worker's life is over: its transitions count."""
        for (phase, move), times in worker.scheduler.moves().items():
            self.moves[f"{phase.name} ─{move.value}→"] += times

    def nothing_held(self, worker: Worker, where: str) -> None:
        gauges = worker.gauges()
        held = gauges.running, gauges.waiting, gauges.blocks.running
        if any(held):
            raise LawBroken(NOTHING_HELD, f"{where} still has {held} running, waiting, blocks")

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def expected(self, submission: Submission, tokens: int) -> list[int]:
        """What the client of a new submission will get."""
        outputs = undisturbed(submission.prompt, submission.sampling, tokens, self._vocabulary)
        whole = (*submission.prompt.tolist(), *outputs)
        self._asked.update((submission.salt, whole[:upto]) for upto in range(1, len(whole) + 1))
        return outputs

    def tokens(self, name: str, before: int, new: Sequence[int], expected: Sequence[int]) -> None:
        if list(new) != list(expected[before : before + len(new)]):
            raise LawBroken(SAME_TOKENS, f"{name} got {list(new)} at {before}, not {expected[before : before + len(new)]}")

    def ended(self, name: str, ended: WireEnded, expected: int, got: int, keep: int | None, left: bool) -> None:
        """Of an answer of `expected` tokens the client got some, cut it at `keep`, or `left`."""
        self.ends[ended.reason] += 1
        match FinishReason(ended.reason):
            case FinishReason.ABORT:
                if not left:
                    raise LawBroken(TRUE_END, f"{name} was aborted, but its client stayed")
            case FinishReason.ERROR:
                if "device" not in self._classes:
                    raise LawBroken(DESERVED_ERROR, f"{name} ended with an error")
            case FinishReason.STOP | FinishReason.LENGTH:
                wanted = (expected,) if keep is None else (expected, min(keep, expected))
                if ended.generated_tokens not in wanted or (keep is None and not left and got != ended.generated_tokens):
                    raise LawBroken(
                        TRUE_END, f"{name}: {ended.generated_tokens} tokens ended it, {got} came, {wanted} wanted"
                    )

    def bill(self, name: str, submission: Submission, ended: WireEnded, preemptions_max: int) -> None:
        bill = ended.bill
        if min(bill.queue_us, bill.prefill_us, bill.decode_us, bill.recomputed_tokens, bill.computed_tokens) < 0:
            raise LawBroken(TRUE_BILL, f"{name}: {bill}")
        if bill.cached_tokens >= len(submission.prompt) or bill.preemptions > preemptions_max:
            raise LawBroken(TRUE_BILL, f"{name}, {len(submission.prompt)} tokens in the prompt: {bill}")
        found = tuple(submission.prompt[: bill.cached_tokens].tolist())
        if found and self._asked[submission.salt, found] < 2:  # the first is its own
            raise LawBroken(OWN_PREFIXES, f"{name} found {len(found)} tokens that nobody of its tenant has asked for")
        if submission.max_tokens is not None and ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._whole_bill(name, submission, ended, submission.max_tokens)

    def _whole_bill(self, name: str, submission: Submission, ended: WireEnded, tokens_max: int) -> None:
        """Of an answer that is complete. Only the last token is never fed; tokens past a stop string may have been."""
        prompt, fed = len(submission.prompt), ended.bill.cached_tokens + ended.bill.computed_tokens
        least = prompt + ended.generated_tokens - 1
        if not least <= fed <= (least if ended.reason is FinishReason.LENGTH else prompt + tokens_max - 1):
            raise LawBroken(TRUE_BILL, f"{name}: {fed} tokens fed, at least {least} had to be: {ended}")
        all_came = ended.generated_tokens == tokens_max
        if all_came != (ended.reason is FinishReason.LENGTH) and not (all_came and submission.sampling.stop_token_ids):
            raise LawBroken(TRUE_END, f"{name}: {ended.generated_tokens} of {tokens_max} tokens, but {ended.reason}")

    def refused(self, name: str, refusal: Refusal, impossible: bool) -> None:
        self.ends[f"refused: {refusal.code}"] += 1
        for_now = refusal.code in (RefusalCode.QUEUE_FULL, RefusalCode.DRAINING)
        if impossible == for_now and refusal.code is not RefusalCode.DRAINING:
            raise LawBroken(DESERVED_REFUSAL, f"{name}: {refusal}")
        if refusal.code is RefusalCode.DRAINING and "rolling-restart" not in self._classes:
            raise LawBroken(DESERVED_REFUSAL, f"{name}: {refusal}")

    def lost(self, name: str, end: Lost) -> None:
        self.ends["lost"] += 1
        if not any(drawn in MAY_LOSE_AN_INSTANCE for drawn in self._classes):
            raise LawBroken(DESERVED_LOSS, f"{name}: {end.reason}")
        if not end.retryable or not end.reason:
            raise LawBroken(TRUE_END, f"{name} lost its instance and is not told that it may try again: {end}")


def judged(work: Callable[[], None]) -> LawBroken | None:
    """Run something; whatever our code raises in it breaks a law. A broken law is the finding, not an accident to hide."""
    try:
        work()
    except LawBroken as broken:
        return broken
    except (BatonError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f"{frame.name} ({frame.lineno})" for frame in reversed(frames)), "?")
        return LawBroken(OWN_CHECKS, f"{type(error).__name__} in {where}: {error}")
    return None
