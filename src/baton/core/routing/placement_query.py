"""The demand of choices that are placed together: prompts by block key, longest length, instances to avoid.

Also sets the defaults that the client left open, once, so that they are the same wherever a choice continues.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from baton.core.content_hashes import ContentHashes
from baton.core.engine.prefix import PrefixIndex
from baton.core.engine.request import RequestId, Submission, frozen_tokens
from baton.core.errors import InvariantViolated
from baton.core.routing.events import Instance
from baton.core.routing.fleet_members import FleetMembers
from baton.core.routing.placement import PlacementDemand, PromptToPlace
from baton.core.routing.routed_request import RoutedChoice, leads


class PlacementQuery:
    def __init__(self, fleet: FleetMembers, hashes: ContentHashes, reads_keys: bool) -> None:
        self._fleet = fleet
        self._hashes = hashes
        self._reads_keys = reads_keys
        self._prefix: PrefixIndex | None = None

    def of(self, batch: Sequence[RoutedChoice]) -> PlacementDemand:
        first: dict[RequestId, tuple[RoutedChoice, Submission]] = {}
        tokens: dict[RequestId, int] = {}
        longest, avoid, yielded_at = 0, list[Instance](), list[Instance]()
        in_place = any(choice.prefills_in_place for choice in batch)
        for choice in batch:
            submission = self.settled(choice)
            prompt = leads(submission)
            first.setdefault(prompt, (choice, submission))
            tokens[prompt] = tokens.get(prompt, len(submission.prompt)) + len(choice.delivered)
            longest = max(longest, len(submission.prompt) + (submission.max_tokens or 1))
            avoid += choice.unfit_at + choice.mask_refused_by
            yielded_at += choice.yielded_at
            if choice.turned_down_by is not None:
                avoid.append(choice.turned_down_by)
        prompts = [PromptToPlace(name, tokens[name], self._keys(name, *first[name])) for name in first]
        begun = batch[0].request.opened
        return PlacementDemand(tuple(prompts), longest, tuple(avoid), in_place, begun, tuple(yielded_at))

    def settled(self, choice: RoutedChoice) -> Submission:
        """Its submission with a limit, the same for all attempts: without one by the client, as much as fits anywhere."""
        submission = choice.submission
        if submission is None:
            raise InvariantViolated(f"choice {choice.index} of request {choice.request.number} waits without a submission")
        if submission.max_tokens is None:
            prompt = len(submission.prompt)
            contexts = [m.facts.context_tokens for m in self._fleet.servers if m.facts.context_tokens > prompt]
            submission = choice.submission = replace(submission, max_tokens=max(1, min(contexts, default=0) - prompt))
        return submission

    def _keys(self, name: RequestId, choice: RoutedChoice, submission: Submission) -> Sequence[bytes]:
        """Keys of its full blocks. Those of a prompt are remembered: a request may wait long and be tried often."""
        model, remembered = self._fleet.model, choice.request.keys
        if not self._reads_keys or model is None:
            return ()
        if self._prefix is None or self._prefix.fingerprint != model.fingerprint:
            self._prefix = PrefixIndex(self._hashes, model.fingerprint, 0)
        if choice.delivered:
            if choice.keys is None:
                known = np.concatenate([submission.prompt, frozen_tokens(choice.delivered)])
                choice.keys = list(self._prefix.keys_of(known, submission.salt, model.block_size)[1:])
            return choice.keys
        if name not in remembered:
            remembered[name] = list(self._prefix.keys_of(submission.prompt, submission.salt, model.block_size)[1:])
        return remembered[name]
