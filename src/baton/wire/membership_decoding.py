"""What an instance's words mean to a router: values of `core.routing`, made from checked messages.

An instance may be broken. What would hurt the router or a client (a token that is none, log-probabilities that belong to no
token, a negative count, serials given twice) is a WireError here and nothing else happens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from baton.core.engine.prefix import KEY_BYTES
from baton.core.engine.records import Bill
from baton.core.engine.request import Submission
from baton.core.routing.events import ChoiceEnd, Facts, HeldChoice, Instance, Ledger, Names, PhaseNote, Sign
from baton.core.routing.identity import ChoiceAttempt
from baton.wire.bounds import INT32_MAX, INT63_MAX
from baton.wire.engine_messages import (
    LogprobLine,
    WireBill,
    WireEnded,
    WireError,
    WireGauges,
    WireLogprobs,
    fault_of,
    logprob_lines,
    numbers,
    tokens_of,
)
from baton.wire.router_messages import Beat, HeldGroup, HeldLine, Join, check_tokens, checked_group


def facts_of(join: Join) -> Facts:
    return Facts(
        name=Instance(join.name),
        incarnation=join.incarnation,
        role=join.role,
        fingerprint=join.fingerprint,
        url=join.url,
        peer_address=join.peer_address,
        slots=join.slots,
        blocks=join.blocks,
        block_size=join.block_size,
        context_tokens=join.context_tokens,
        vocabulary=join.vocabulary,
        pid=join.pid,
    )


def sign_of(beat: Beat, attempts: Mapping[int, ChoiceAttempt]) -> Sign:
    """`places`: by serial, where a request is in the router's book; notes of others are left out."""
    names = Names(beat.fresh, _keys(beat.named), _keys(beat.forgotten))
    notes = tuple(
        PhaseNote(attempts[serial], phase, ago_us) for serial, phase, ago_us in beat.notes if serial in attempts
    )  # fmt: skip
    return Sign(_ledger_of(beat.gauges), beat.engine_silent_us, beat.computing, names, notes)


def _keys(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))


def _ledger_of(item: WireGauges) -> Ledger:
    told = (*msgspec.structs.astuple(item), *msgspec.structs.astuple(item.storage))
    numbers = [number for number in told if isinstance(number, int | float)]
    if not all(0 <= number <= INT63_MAX for number in numbers) or not math.isfinite(item.reserve_ratio):
        raise WireError("gauges that no engine can have")
    if not 0 <= item.handovers.made <= INT63_MAX:
        raise WireError(f"{item.handovers.made} hand-overs")
    return Ledger(
        running=item.running,
        waiting=item.waiting,
        free=item.free_blocks,
        evictable=item.evictable_blocks,
        used=item.running_blocks,
        leased=item.leased_blocks,
        receiving=item.receiving_blocks,
        leaving=item.leaving_blocks,
        host_blocks=item.storage.host_rows,
        host_used=item.storage.host_used,
        steps=item.steps,
        preemptions=item.preemptions_for_others + item.preemptions_of_self,
        handovers=item.handovers.made,
        prefix_queries=item.prefix_queries,
        prefix_hits=item.prefix_hits,
    )


def end_of(item: WireEnded) -> ChoiceEnd:
    if not 0 <= item.generated_tokens <= INT32_MAX:
        raise WireError(f"an end after {item.generated_tokens} tokens")
    return ChoiceEnd(item.reason, item.generated_tokens, _bill_of(item.bill), fault_of(item.fault))


def _bill_of(item: WireBill) -> Bill:
    if not all(0 <= number <= INT63_MAX for number in msgspec.structs.astuple(item)):
        raise WireError("a bill with a number that nothing can cost")
    return Bill(**msgspec.structs.asdict(item))


def tokens_left(submission: Submission, context_tokens: int) -> int:
    """How many tokens an attempt may still yield."""
    longest = context_tokens - len(submission.prompt)
    most = longest if submission.max_tokens is None else submission.max_tokens
    return most - len(submission.generated)


# ── held groups ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def held_of(message: HeldGroup, join: Join) -> list[HeldChoice]:
    group = checked_group(message.group, join.vocabulary)
    places = [line.place for line in message.lines]
    if len(frozenset(places)) != len(places) or max(places, default=0) >= len(group):
        raise WireError(f"a group of {len(group)} is held at the places {places[:8]}")
    return [_held_choice(message, line, group[line.place], join) for line in message.lines]


def _held_choice(message: HeldGroup, line: HeldLine, submission: Submission, join: Join) -> HeldChoice:
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
        cached_tokens=checked_cached(line.cached_tokens),
        end=None if line.ended is None else end_of(line.ended),
    )


def _extras(line: HeldLine, counts: list[int], vocabulary: int) -> tuple[object, ...]:
    if not line.logprobs:
        return ()  # an executor may have none
    rows: list[list[LogprobLine]] = [[] for _ in counts]
    for item in line.logprobs:
        if not 0 <= item.row < len(rows) or rows[item.row]:
            raise WireError(f"log-probabilities of row {item.row} of {len(rows)}")
        rows[item.row] = checked_lines(item, counts[item.row], vocabulary)
    if [len(row) for row in rows] != counts:
        raise WireError(f"tokens of serial {line.serial} without their log-probabilities")
    return tuple(item for row in rows for item in row)


def checked_cached(cached_tokens: int | None) -> int | None:
    if cached_tokens is not None and not 0 <= cached_tokens <= INT32_MAX:
        raise WireError(f"{cached_tokens} cached tokens")
    return cached_tokens


def checked_lines(item: WireLogprobs, count: int, vocabulary: int) -> list[LogprobLine]:
    lines = logprob_lines(item)
    check_lines(lines, count, vocabulary)
    return lines


def check_lines(lines: list[LogprobLine], count: int, vocabulary: int) -> None:
    """One for each token, and of ids that are tokens."""
    if len(lines) != count:
        raise WireError(f"log-probabilities of {len(lines)} tokens for {count}")
    for _, top in lines:
        if not all(0 <= token < vocabulary for token, _ in top):
            raise WireError(f"log-probabilities of a token that is none of a vocabulary of {vocabulary}")
