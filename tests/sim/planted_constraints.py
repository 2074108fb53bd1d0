"""Bugs of constrained answers, planted in the scripted executor and its matchers. See `planted`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from baton.core.engine.plan import Int64s, RowOutcome, Start, StepResult
from baton.core.engine.request import NO_TOKENS, Sampling, Submission, Tokens
from baton.core.engine.running_set import RunningSet
from baton.core.engine.settling import Bools, StepSettling
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.step_rows import InFlightStep
from baton.core.routing.attempts import Attempts
from baton.core.routing.routed_request import RoutedChoice
from baton.executor.constraints.contract import Matcher
from baton.executor.scripted import ScriptedExecutor, _Decoded, _Slot
from tests.sim.planted import bug
from tests.sim.planted_tiers import BUGS as BUGS
from tests.support.planting import Patch

core, executor = partial(bug, "core"), partial(bug, "executor")


@executor("a preempted answer is masked as if it began anew: a second opening brace in the middle of a JSON object")
def forget_outputs_when_a_matcher_is_rebuilt(patch: Patch) -> None:
    def matcher_of(self: ScriptedExecutor, start: Start) -> Matcher | None:
        constraint = start.sampling.constraint
        return None if constraint is None else self.constraints.matcher(constraint, NO_TOKENS)

    def take(self: ScriptedExecutor, slot: _Slot, token: int) -> None:
        if slot.matcher is not None:
            slot.matcher.consume(token)
        slot.tokens.append(token)

    patch.set("ScriptedExecutor._matcher_of", matcher_of)
    patch.set("ScriptedExecutor._take", take)


@core("who starts again does so with the first token of its answer counted as prompt: its matcher cannot follow the others")
def rebuild_a_matcher_without_the_first_token(patch: Patch) -> None:
    start_then = patch.original("RunningSet.start_row")

    def start_row(self: RunningSet, step: StepBuilder, slot: int, tokens: Tokens, computed: int) -> None:
        start_then(self, step, slot, tokens, computed)
        if len(self.occupant(slot).outputs):
            start = step.starts.pop()
            step.starts.append(replace(start, prompt_tokens=start.prompt_tokens + 1))

    patch.set("RunningSet.start_row", start_row)


@executor("a bad word is compared with as many tokens as it has, not with one less: of several tokens none is ever found")
def find_no_bad_word_of_several_tokens(patch: Patch) -> None:
    permits_then = patch.original("_permits")

    def permits(sampling: Sampling, outputs: Sequence[int], vocabulary: int, matcher: Matcher | None) -> Any:
        found = tuple(w for w in sampling.bad_words if len(w) == 1 or tuple(outputs[-len(w) :]) == w[:-1])
        return permits_then(msgspec.structs.replace(sampling, bad_words=found), outputs, vocabulary, matcher)

    patch.set("_permits", permits)


@executor("a slot is used again and keeps the grammar of the answer before: an answer in a stranger's schema")
def keep_the_matcher_of_a_reused_slot(patch: Patch) -> None:
    make_then = patch.original("ScriptedExecutor._matcher_of")

    def matcher_of(self: ScriptedExecutor, start: Start) -> Matcher | None:
        made = make_then(self, start)
        kept: dict[int, Matcher] = vars(self).setdefault("matchers of the bug", {})
        return made if made is None else kept.setdefault(start.slot, made)

    def take(self: ScriptedExecutor, slot: _Slot, token: int) -> None:
        if slot.matcher is not None:
            slot.matcher.consume(token)
        slot.tokens.append(token)

    patch.set("ScriptedExecutor._matcher_of", matcher_of)
    patch.set("ScriptedExecutor._take", take)


@executor("the mask is that of the position before, as when drafts are masked one row too early")
def mask_one_position_late(patch: Patch) -> None:
    def take(self: ScriptedExecutor, slot: _Slot, token: int) -> None:
        late: dict[int, int] = vars(self).setdefault("tokens of the bug", {})
        before = late.get(id(slot))
        late[id(slot)] = token
        if slot.matcher is not None and before is not None:
            slot.matcher.consume(before)
        slot.tokens.append(token)

    patch.set("ScriptedExecutor._take", take)


@executor("a row that sits a step out takes its token all the same, and nobody is told: a hole in the answer")
def draw_while_sitting_out(patch: Patch) -> None:
    run_then = patch.original("ScriptedExecutor._run_decode")

    def run_decode(self: ScriptedExecutor, slot_id: int, epoch: int) -> _Decoded:
        outcome, tokens, known = run_then(self, slot_id, epoch)
        if outcome is RowOutcome.SAT_OUT:
            self._next_token(self._slots[slot_id])
        return outcome, tokens, known

    patch.set("ScriptedExecutor._run_decode", run_decode)


@core("a row that sat out is settled as if its token had come: its blocks are published with KV that was never computed")
def count_a_row_that_sat_out(patch: Patch) -> None:
    split_then = patch.original("StepSettling._split_broken")

    def split_broken(self: StepSettling, step: InFlightStep, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        sound, broken = split_then(self, step, result, live)
        sat_out = live[result.outcomes[live] == RowOutcome.SAT_OUT]
        self._slots.known[step.rows.slots[sat_out]] += 1
        return sound, broken

    patch.set("StepSettling._split_broken", split_broken)


@core("a row that sat out is taken for a broken one: its request ends with an error that nobody caused")
def end_a_row_that_sat_out(patch: Patch) -> None:
    def may_sit_out(self: StepSettling, step: InFlightStep, rows: Int64s) -> Bools:
        return np.zeros(len(rows), dtype=np.bool_)

    patch.set("StepSettling._may_sit_out", may_sit_out)


@core("a row that sat out stays in flight for ever: it is taken to have reached its limit, and never decodes again")
def leave_a_row_that_sat_out_pending(patch: Patch) -> None:
    split_then = patch.original("StepSettling._split_broken")

    def split_broken(self: StepSettling, step: InFlightStep, result: StepResult, live: Int64s) -> tuple[Int64s, Int64s]:
        sat_out = live[result.outcomes[live] == RowOutcome.SAT_OUT]
        split = split_then(self, step, result, live)
        self._slots.pending[step.rows.slots[sat_out]] += step.rows.allowances[sat_out]
        return split

    patch.set("StepSettling._split_broken", split_broken)


@core("a request refused for the version of its constraint never asks for the mask: it is refused by everybody for ever")
def never_ask_for_the_mask(patch: Patch) -> None:
    patch.set("Attempts._continues_under_another_version", lambda self, choice: True)


@core("an answer ends at once when only instances of other versions are left: one of its own may come back")
def give_up_for_a_version(patch: Patch) -> None:
    continues_then = patch.original("Attempts._continues_under_another_version")

    def continues(self: Attempts, choice: RoutedChoice) -> bool:
        return continues_then(self, choice) and choice.version_missing_us is None

    patch.set("Attempts._continues_under_another_version", continues)


@core("the mask to compare stays that of an earlier token: instances compare it with another place of the answer")
def keep_an_old_mask(patch: Patch) -> None:
    def sampling_of(choice: RoutedChoice, submission: Submission) -> Sampling:
        sampling, mask = submission.sampling, choice.mask
        if sampling.constraint is None or mask is None:
            return sampling
        return msgspec.structs.replace(sampling, constraint=msgspec.structs.replace(sampling.constraint, version=mask))

    patch.set("routed_request._sampling_of", sampling_of)
