"""Who guesses tokens on the device: the proposers of `executor.drafts`, as kernels that a captured step can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.core.errors import InvariantViolated
from baton.executor.cuda.kernels_ngram import propose_ngrams
from baton.executor.drafts import DraftProposer, NaiveProposer, NgramProposer

Propose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(slots, drafts, counts): fill in what each slot may go on with. Row i of the drafts are those of the i-th slot."""


def propose_on_device(proposer: DraftProposer, tokens: torch.Tensor, known: torch.Tensor, drafts_max: int) -> Propose | None:
    """`tokens` [slots, context] and `known` [slots] are read at every step. None where nothing is ever guessed."""
    if not drafts_max or isinstance(proposer, NaiveProposer):
        return None
    if not isinstance(proposer, NgramProposer):
        raise InvariantViolated(f"{proposer}: there is no kernel that guesses like this")
    least, most = proposer.ngram_min, proposer.ngram_max

    def propose(named: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor) -> None:
        rows = len(named)
        table = drafts[: rows * drafts_max].view(rows, drafts_max)
        propose_ngrams(tokens, known, named, least, most, table, counts[:rows])

    return propose
