"""Placement of a request: the instance that decodes it and, if others prefill for that one, the instance that prefills it.

The cost of a place is counted in tokens to prefill before the first token: its own beyond the longest known prefix, those
already placed there, and weights for the choices that run there and for missing room. Deterministic: ties go to the instance
that was chosen least recently, then to the first name; draws are hashes of (seed, count).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.engine.request import RequestId
from baton.core.routing.config import RouterConfig, RoutingPolicy
from baton.core.routing.events import Instance, Session
from baton.core.routing.fleet_members import FleetMember
from baton.core.routing.prefix_directory import PrefixDirectory

MISSING = 2
"""Cost per token that must be prefilled there: other requests wait for it too."""
OPEN_TOKENS = 32
"""Cost in tokens of each choice open at an instance."""
QUEUED_TOKENS = 512
"""Additional cost in tokens of each choice beyond its slots."""
POOL_TOKENS = 4096
"""Penalty in tokens when the pool lacks room now, added to the missing tokens."""


@dataclass(frozen=True, slots=True)
class PromptToPlace:
    """Known tokens, prefilled once for all choices that share them."""

    leader: RequestId
    tokens: int
    keys: Sequence[bytes]
    """Keys of its full blocks; empty if the policy does not read them."""


@dataclass(frozen=True, slots=True)
class PlacementDemand:
    prompts: tuple[PromptToPlace, ...]
    longest: int
    """Tokens of the longest sequence it may become."""
    avoid: tuple[Instance, ...]
    """Instances to avoid while there is another one; the last of them most."""
    prefills_in_place: bool = False
    """The instance that decodes it prefills it as well."""
    begun: bool = False
    """It has run at an instance: it waits for one that can hold it."""
    yielded_at: tuple[Instance, ...] = ()
    """Instances that had no room for it: it moves only to one that has. The last of them may still have its KV cached."""


@dataclass(frozen=True, slots=True)
class ChosenPlacement:
    member: FleetMember
    prefills: tuple[tuple[FleetMember, int], ...]
    """For each prompt: the instance that prefills it, and the number of uncached tokens."""


Known = list[dict[Session, int]]
"""For each prompt: by instance, the number of leading tokens that it has cached."""


class Placement:
    def __init__(self, config: RouterConfig, holdings: PrefixDirectory, seed: int) -> None:
        self._config = config
        self._holdings = holdings
        self._seed = seed
        self._draws = 0
        self._choosings = 0

    @property
    def reads_keys(self) -> bool:
        return self._config.policy is RoutingPolicy.CACHE_AWARE

    def has_room(self, member: FleetMember) -> bool:
        return len(member.choices) < self._config.ahead * member.facts.slots

    def choose(
        self, wanted: PlacementDemand, holders: list[FleetMember], prefillers: Sequence[FleetMember]
    ) -> ChosenPlacement | None:
        """Choose one of the instances that can hold it. None: every candidate has too much queued already."""
        if not any(map(self.has_room, holders)):
            return None
        known = self._known(wanted, holders[0].facts.block_size)
        able = [member for member in self._candidates(wanted, holders, known) if self.has_room(member)]
        if not able:
            return None
        if wanted.prefills_in_place:
            prefillers = ()
        member = self._pick(wanted, able, prefillers, known)
        prefills = []
        for prompt, found in zip(wanted.prompts, known, strict=True):
            prefiller = self._prefiller(prompt, member, prefillers, found)
            prefills.append((prefiller, _missing(prompt, member, prefiller, found)))
        self._choosings += 1
        for chosen in (member, *(prefiller for prefiller, _ in prefills)):
            chosen.used = self._choosings
        return ChosenPlacement(member, tuple(prefills))

    def _candidates(self, wanted: PlacementDemand, holders: list[FleetMember], known: Known) -> list[FleetMember]:
        """The instances it may go to. After it had to yield: those that have room for it; if none has, the one where it was,
        since elsewhere it would have to yield again, and its KV would have to be computed again."""
        members = _avoiding(holders, wanted.avoid)
        if not wanted.yielded_at:
            return members
        roomy = [member for member in members if self.has_room(member) and has_blocks(member, wanted, known)]
        if self._config.preempt_retry_exclude_decode:
            last = wanted.yielded_at[-1]
            roomy = [m for m in roomy if m.name not in wanted.yielded_at] or [m for m in roomy if m.name != last]
        return roomy or [member for member in members if member.name == wanted.yielded_at[-1]] or members

    def _known(self, wanted: PlacementDemand, block_size: int) -> Known:
        found = []
        for prompt in wanted.prompts:
            blocks = self._holdings.longest(prompt.keys) if self.reads_keys else {}
            # The last token is always computed: its logits choose the next one.
            found.append({session: min(depth * block_size, prompt.tokens - 1) for session, depth in blocks.items()})
        return found

    # ── the policies ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pick(
        self, wanted: PlacementDemand, able: list[FleetMember], prefillers: Sequence[FleetMember], known: Known
    ) -> FleetMember:
        match self._config.policy:
            case RoutingPolicy.CACHE_AWARE:
                return min(able, key=lambda m: (self._cost(wanted, m, prefillers, known), m.used, m.name))
            case RoutingPolicy.POWER_OF_TWO:
                two = [self._drawn(able), self._drawn(able)]
                return min(two, key=lambda m: (len(m.choices) / m.facts.slots, m.used, m.name))
            case RoutingPolicy.ROUND_ROBIN:
                return min(able, key=lambda m: (m.used, m.name))
            case RoutingPolicy.RANDOM:
                return self._drawn(able)

    def _cost(self, wanted: PlacementDemand, member: FleetMember, prefillers: Sequence[FleetMember], known: Known) -> int:
        prefill = missing_here = 0
        for prompt, found in zip(wanted.prompts, known, strict=True):
            prefiller = self._prefiller(prompt, member, prefillers, found)
            prefill += prefiller.prefill_tokens + MISSING * _missing(prompt, member, prefiller, found)
            missing_here += prompt.tokens - found.get(member.session, 0)
        beyond = max(0, len(member.choices) + 1 - member.facts.slots)
        return prefill + len(member.choices) * OPEN_TOKENS + beyond * QUEUED_TOKENS + _short(member, missing_here)

    def _prefiller(
        self, prompt: PromptToPlace, member: FleetMember, prefillers: Sequence[FleetMember], found: dict[Session, int]
    ) -> FleetMember:
        """The instance that prefills: the decoding one itself, unless it has others to do that."""
        if not (member.role.takes and prefillers):
            return member
        return min(
            prefillers, key=lambda g: (g.prefill_tokens + MISSING * _missing(prompt, member, g, found), g.used, g.name)
        )

    def _drawn(self, able: list[FleetMember]) -> FleetMember:
        self._draws += 1
        digest = hashlib.blake2b(f"{self._seed}/{self._draws}".encode(), digest_size=8).digest()
        return able[int.from_bytes(digest, "little") % len(able)]


def _missing(prompt: PromptToPlace, member: FleetMember, prefiller: FleetMember, found: dict[Session, int]) -> int:
    return prompt.tokens - max(found.get(member.session, 0), found.get(prefiller.session, 0))


def _short(member: FleetMember, missing_tokens: int) -> int:
    short = _missing_blocks(member, missing_tokens)
    return POOL_TOKENS + short * member.facts.block_size if short > 0 else 0


def _missing_blocks(member: FleetMember, missing_tokens: int) -> int:
    """Blocks that its pool lacks for these tokens, by its last report and what was placed there since."""
    size, ledger = member.facts.block_size, member.ledger
    if not ledger.total_blocks:
        return 0  # it has not reported its pool yet
    return -(-missing_tokens // size) + member.promised_blocks - ledger.free_blocks - ledger.evictable_blocks


def has_blocks(member: FleetMember, wanted: PlacementDemand, known: Known) -> bool:
    """Whether its pool has blocks for all known tokens, and nobody waits there for blocks already."""
    missing = sum(prompt.tokens - found.get(member.session, 0) for prompt, found in zip(wanted.prompts, known, strict=True))
    return not member.ledger.waiting and _missing_blocks(member, missing) <= 0


def holding(servers: Sequence[FleetMember], wanted: PlacementDemand) -> list[FleetMember]:
    """The instances whose context holds the request. If there is none, those with the longest context, which will refuse it
    with the reason; for a request that has begun: none."""
    fits = [m for m in servers if min(m.facts.context_tokens, m.facts.blocks * m.facts.block_size) >= wanted.longest]
    if fits or not servers or wanted.begun:
        return fits
    most = max(member.facts.context_tokens for member in servers)
    return [member for member in servers if member.facts.context_tokens == most]


def _avoiding(members: list[FleetMember], avoid: tuple[Instance, ...]) -> list[FleetMember]:
    others = [member for member in members if member.name not in avoid]
    return others or [member for member in members if member.name != avoid[-1]] or members if avoid else members
