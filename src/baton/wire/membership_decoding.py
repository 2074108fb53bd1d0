"""Turns checked messages of an instance into values of `core.routing`.

An instance may be faulty. Values that would harm the router or a client (a token id outside the vocabulary,
log-probabilities without a token, a negative count, a serial given twice) raise a WireError.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.engine.change_journal import CachedKeysChanged
from baton.core.engine.plan import Logprobs
from baton.core.engine.request import PromptLogprobs, Submission
from baton.core.routing.events import Heartbeat, HeldChoice, Join, PhaseReport
from baton.core.routing.identity import AttemptId, ChoiceAttempt
from baton.wire.engine_messages import LogprobLine, WireError, logprob_lines, numbers, shaped_prompt, tokens_of
from baton.wire.router_messages import HeartbeatMessage, HeldChoiceMessage, HeldGroup, check_group, check_tokens, keys_of


def heartbeat_of(
    beat: HeartbeatMessage, attempts: Mapping[int, ChoiceAttempt], unanswered: AttemptId | None = None
) -> Heartbeat:
    """The heartbeat as the router takes it. `attempts` is by serial; notes of other serials are left out. `unanswered`: the
    attempt that has waited longest for an answer from there."""
    names = CachedKeysChanged(beat.fresh, keys_of(beat.named), keys_of(beat.forgotten))
    notes = tuple(
        PhaseReport(attempts[serial], phase, ago_us) for serial, phase, ago_us in beat.notes if serial in attempts
    )  # fmt: skip
    preempted = tuple((attempts[serial], count) for serial, count in beat.preempted if serial in attempts)
    return Heartbeat(
        beat.gauges, beat.engine_silent_us, beat.computing, names, notes, preempted, beat.engine_runs, beat.step_limit_us,
        beat.router_silent_us, unanswered,
    )  # fmt: skip


def tokens_left(submission: Submission, context_tokens: int) -> int:
    """Number of tokens that an attempt may still yield."""
    longest = context_tokens - len(submission.prompt)
    most = longest if submission.max_tokens is None else submission.max_tokens
    return most - len(submission.generated)


# ── held groups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def held_of(message: HeldGroup, join: Join) -> list[HeldChoice]:
    group = message.group
    check_group(group, join.vocabulary)
    places = [line.place for line in message.lines]
    if len(frozenset(places)) != len(places) or max(places, default=0) >= len(group):
        raise WireError(f"a group of {len(group)} is held at the places {places[:8]}")
    return [_held_choice(message, line, group[line.place], join) for line in message.lines]


def _held_choice(message: HeldGroup, line: HeldChoiceMessage, submission: Submission, join: Join) -> HeldChoice:
    tokens = tokens_of(line.tokens)
    check_tokens(tokens, join.vocabulary)
    counts = numbers(line.counts)
    if min(counts, default=0) < 0 or sum(counts) != len(tokens):
        raise WireError(f"{len(tokens)} tokens of serial {line.serial} are said to have come in rows of {counts[:8]}")
    if len(tokens) > tokens_left(submission, join.context_tokens):
        raise WireError(f"{len(tokens)} tokens of serial {line.serial}, which may not have so many")
    if line.ended is not None and line.ended.serial != line.serial:
        raise WireError(f"the end of serial {line.ended.serial} is told of serial {line.serial}")
    return HeldChoice(
        serial=line.serial,
        submission=submission,
        choice=message.choices[line.place],
        body_choices=message.body_choices,
        origin=message.origin,
        tokens=tuple(tokens.tolist()),
        extras=_extras(line, counts, join.vocabulary) if submission.sampling.logprobs is not None else (),
        cached_tokens=line.cached_tokens,
        end=line.ended,
        preemptions=max(line.preemptions, submission.preemptions),
        prompt_extras=_prompt_extras(line, submission, join.vocabulary),
    )


def _extras(line: HeldChoiceMessage, counts: list[int], vocabulary: int) -> tuple[object, ...]:
    if not line.logprobs:
        return ()  # an executor may compute none
    rows: list[list[LogprobLine]] = [[] for _ in counts]
    for item in line.logprobs:
        if not 0 <= item.row < len(rows) or rows[item.row]:
            raise WireError(f"log-probabilities of row {item.row} of {len(rows)}")
        rows[item.row] = checked_lines(item, counts[item.row], vocabulary)
    if [len(row) for row in rows] != counts:
        raise WireError(f"tokens of serial {line.serial} without their log-probabilities")
    return tuple(item for row in rows for item in row)


def _prompt_extras(line: HeldChoiceMessage, submission: Submission, vocabulary: int) -> tuple[PromptLogprobs, ...] | None:
    if submission.sampling.prompt_logprobs is None or not line.prompt_logprobs:
        return None
    made = tuple(map(shaped_prompt, line.prompt_logprobs))
    for item in made:
        check_prompt_lines(item, submission, vocabulary)
    return made


def check_prompt_lines(item: PromptLogprobs, submission: Submission, vocabulary: int) -> None:
    """Raise WireError unless the lines are of tokens of the prompt and every id is in the vocabulary."""
    if item.end > len(submission.prompt):
        raise WireError(f"log-probabilities up to position {item.end} of a prompt of {len(submission.prompt)} tokens")
    check_tokens(item.top_ids.reshape(-1), vocabulary)


def checked_lines(item: Logprobs, count: int, vocabulary: int) -> list[LogprobLine]:
    lines = logprob_lines(item)
    check_lines(lines, count, vocabulary)
    return lines


def check_lines(lines: list[LogprobLine], count: int, vocabulary: int) -> None:
    """Raise WireError unless there is one line per token and every id is in the vocabulary."""
    if len(lines) != count:
        raise WireError(f"log-probabilities of {len(lines)} tokens for {count}")
    for _, top in lines:
        if not all(0 <= token < vocabulary for token, _ in top):
            raise WireError("log-probabilities of a token that is not in the vocabulary")
