"""The sampler of an executor: turns rows of logits into tokens, each row by the wishes of the slot it belongs to.

Owns what every slot asks for (rewritten whole by `start`) and what its penalties remember. Does not know of plans, blocks
or models. How a token is chosen is in `draw`, the noise in `noise`, the memory of penalties in `penalties`.

Order: repetition penalty, presence and frequency penalties, logit bias, the ban on stop tokens before `min_tokens`; then
the greatest value where temperature is 0, else temperature, top-k, top-p, min-p and a keyed draw.

Promises
- The token at a position depends on the row's logits, the slot's wishes and the tokens before it: not on the batch, the
  order of rows, or whether the sequence was stopped and started again with its outputs.
- Several rows of one slot in one call (drafts) are drawn in the order given, each conditioned on the ones before it. What
  was recorded past the position of a later call is forgotten.
- Log-probabilities are those of the raw logits, before penalties, bias and temperature. They are finite: whatever is less
  likely than e⁻⁹⁹⁹⁹ is reported as -9999, as the OpenAI API does.
- Logits that are not finite never stop anything (see `draw`), and the tensor that is passed in is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.core.engine.plan import Logprobs
from baton.core.engine.request import Sampling, Tokens
from baton.core.errors import InvariantViolated
from baton.executor.gumbel_noise import RowKeys, noise_stream, row_keys
from baton.executor.penalties import SlotPenalties, penalises
from baton.executor.scratch_buffers import ScratchBuffers
from baton.executor.token_choice import (
    DRAW_ELEMENTS,
    TruncationLimits,
    argmax_tokens,
    draw_from_all,
    draw_from_nucleus,
    draw_from_top_k,
    finite_logits,
    top_tokens,
)

Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Draw = Callable[[torch.Tensor, RowKeys, TruncationLimits, ScratchBuffers], torch.Tensor]

LOGPROB_LEAST = -9999.0
_TEMPERATURE_LEAST, _TEMPERATURE_MOST = 1e-6, 1e6
"""Colder is greedy in all but name, hotter uniform; beyond, float32 overflows."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    tokens: Tokens
    """[rows]"""
    logprobs: tuple[Logprobs, ...]
    """For the rows whose slot asks for them; `row` is the index of the row in the call."""


class Sampler:
    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._draw_rows = max(1, DRAW_ELEMENTS // vocabulary)
        self._scratch = ScratchBuffers(device)
        self._penalties = SlotPenalties(slots, vocabulary, device)
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._banned: dict[int, torch.Tensor] = {}
        self._occupied = np.zeros(slots, dtype=np.bool_)
        self._plain = np.zeros(slots, dtype=np.bool_)
        """Greedy, with nothing to shape: an argmax of the logits as they come."""
        self._greedy = np.zeros(slots, dtype=np.bool_)
        self._reports = np.zeros(slots, dtype=np.bool_)
        self._alternatives = np.zeros(slots, dtype=np.int64)
        self._stream = np.zeros(slots, dtype=np.uint64)
        self._temperature = np.ones(slots)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._top_p = np.full(slots, math.inf)
        self._floor = np.full(slots, -math.inf)
        self._ban_ends = np.zeros(slots, dtype=np.int64)
        """The first position at which stop tokens may be drawn."""

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        """Rewrite everything of the slot. `tokens` past the prompt are outputs of an earlier stay: penalties count them."""
        self.stop(slot)
        greedy = sampling.temperature == 0
        self._occupied[slot] = True
        self._greedy[slot] = greedy
        self._reports[slot] = sampling.logprobs is not None
        self._alternatives[slot] = min(sampling.logprobs or 0, self._vocabulary)
        self._stream[slot] = noise_stream(sampling.seed, sampling.choice)
        self._temperature[slot] = min(max(sampling.temperature, _TEMPERATURE_LEAST), _TEMPERATURE_MOST)
        self._top_k[slot] = sampling.top_k if 0 < sampling.top_k < self._vocabulary else 0
        self._top_p[slot] = sampling.top_p if sampling.top_p < 1 else math.inf
        self._floor[slot] = math.log(min(sampling.min_p, 1.0)) if sampling.min_p > 0 else -math.inf
        self._ban_ends[slot] = prompt_tokens + sampling.min_tokens if sampling.stop_token_ids else 0
        if sampling.stop_token_ids:
            self._banned[slot] = self._ids(sampling.stop_token_ids)
        if sampling.logit_bias:
            bias = dict(sampling.logit_bias)
            values = torch.tensor(tuple(bias.values()), dtype=torch.float64, device=self._device)
            self._bias[slot] = (self._ids(tuple(bias)), values)
        if penalises(sampling):
            self._penalties.start(slot, tokens, prompt_tokens, sampling)
        shapes = penalises(sampling) or bool(sampling.logit_bias) or self._ban_ends[slot] > 0
        self._plain[slot] = greedy and not shapes

    def stop(self, slot: int) -> None:
        """Forget the slot. Stopping an empty one changes nothing."""
        self._occupied[slot] = False
        self._bias.pop(slot, None)
        self._banned.pop(slot, None)
        self._penalties.stop(slot)

    def sample(self, logits: torch.Tensor, slots: Slots, positions: Int64s) -> SampledTokens:
        """One token for each row of `logits` [rows, vocabulary], to stand at `positions` of the sequences in `slots`."""
        if not self._occupied[slots].all():
            raise InvariantViolated(f"rows of empty slots: {slots[~self._occupied[slots]].tolist()}")
        if len(slots) == 0:
            return SampledTokens(np.empty(0, dtype=np.int32), ())
        tokens = self._tokens(logits, slots, positions)
        return SampledTokens(tokens.to(torch.int32).cpu().numpy(), self._logprobs(logits, slots, tokens))

    def _tokens(self, logits: torch.Tensor, slots: Slots, positions: Int64s) -> torch.Tensor:
        if self._plain[slots].all():
            return argmax_tokens(finite_logits(logits))
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for rows in self._waves(slots):
            at = self._index(rows)
            tokens[at] = self._choose(_rows_of(logits, rows), slots[rows], positions[rows])
        return tokens

    def _waves(self, slots: Slots) -> Iterator[Int64s]:
        """Rows to draw at once: all of them, unless a slot with penalties has several, each of which changes the next."""
        wave = np.zeros(len(slots), dtype=np.int64)
        seen: dict[int, int] = {}
        for row in np.flatnonzero(self._penalties.held[slots]).tolist():
            slot = int(slots[row])
            wave[row] = seen.get(slot, 0)
            seen[slot] = int(wave[row]) + 1
        for number in range(int(wave.max()) + 1):
            yield np.flatnonzero(wave == number)

    def _choose(self, logits: torch.Tensor, slots: Slots, positions: Int64s) -> torch.Tensor:
        shaped = finite_logits(self._shaped(logits, slots, positions))
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        greedy = self._greedy[slots]
        if greedy.any():
            rows = np.flatnonzero(greedy)
            tokens[self._index(rows)] = argmax_tokens(_rows_of(shaped, rows))
        for draw, mine in self._draws(slots):
            for begin in range(0, len(mine), self._draw_rows):
                rows = mine[begin : begin + self._draw_rows]
                keys = row_keys(self._stream[slots[rows]], positions[rows], self._device)
                drawn = draw(_rows_of(shaped, rows), keys, self._cuts(slots[rows]), self._scratch)
                tokens[self._index(rows)] = drawn
        held = np.flatnonzero(self._penalties.held[slots])
        if len(held) > 0:
            self._penalties.record(slots[held], positions[held], tokens[self._index(held)])
        return tokens

    def _shaped(self, logits: torch.Tensor, slots: Slots, positions: Int64s) -> torch.Tensor:
        """The logits after penalties, bias and bans: a copy if any row has any, else the very tensor."""
        penalised = np.flatnonzero(self._penalties.held[slots])
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in self._bias] if self._bias else []
        banned = np.flatnonzero(positions < self._ban_ends[slots]).tolist()
        if len(penalised) == 0 and not biased and not banned:
            return logits
        shaped = logits.clone()
        if len(penalised) > 0:
            self._penalties.apply(shaped, penalised, slots[penalised], positions[penalised])
        for row in biased:
            ids, values = self._bias[int(slots[row])]
            shaped[row, ids] += values.to(shaped.dtype)
        for row in banned:
            shaped[row, self._banned[int(slots[row])]] = -math.inf
        return shaped

    def _draws(self, slots: Slots) -> Iterator[tuple[Draw, Int64s]]:
        """Which rows to draw in which way."""
        drawn = ~self._greedy[slots]
        leading = self._top_k[slots] > 0
        nucleus = self._top_p[slots] < math.inf
        yield draw_from_all, np.flatnonzero(drawn & ~leading & ~nucleus)
        yield draw_from_nucleus, np.flatnonzero(drawn & ~leading & nucleus)
        yield draw_from_top_k, np.flatnonzero(drawn & leading)

    def _cuts(self, slots: Slots) -> TruncationLimits:
        top_k, top_p, floor = self._top_k[slots], self._top_p[slots], self._floor[slots]
        return TruncationLimits(
            temperature=torch.from_numpy(self._temperature[slots]).to(self._device).unsqueeze(1),
            top_k=torch.from_numpy(top_k).to(self._device).unsqueeze(1),
            top_p=torch.from_numpy(top_p).to(self._device).unsqueeze(1),
            floor=torch.from_numpy(floor).to(self._device).unsqueeze(1),
            has_top_p=bool((top_p < math.inf).any()),
            has_floor=bool((floor > -math.inf).any()),
            top_k_most=int(top_k.max()),
        )

    def _logprobs(self, logits: torch.Tensor, slots: Slots, tokens: torch.Tensor) -> tuple[Logprobs, ...]:
        rows = np.flatnonzero(self._reports[slots])
        if len(rows) == 0:
            return ()
        at = self._index(rows)
        counts = self._alternatives[slots[rows]]
        every = torch.log_softmax(finite_logits(_rows_of(logits, rows)), dim=-1).clamp_(min=LOGPROB_LEAST)
        chosen = every.gather(1, tokens[at].unsqueeze(1)).to(torch.float32).cpu().numpy()
        at_least_one = np.maximum(counts, 1)
        ids, top = top_tokens(every, self._index(at_least_one).unsqueeze(1), int(at_least_one.max()))
        top_ids = ids.to(torch.int32).cpu().numpy()
        tops = top.to(torch.float32).cpu().numpy()
        return tuple(
            Logprobs(row=row, chosen=chosen[i], top_ids=top_ids[i : i + 1, :count], top=tops[i : i + 1, :count])
            for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True))
        )

    def _index(self, rows: Int64s) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _ids(self, tokens: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self._device)


def _rows_of(table: torch.Tensor, rows: Int64s) -> torch.Tensor:
    """The given rows, in rising order: a view where they are neighbours, which in most steps they are."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return table[first : last + 1]
    return table.index_select(0, torch.from_numpy(rows).to(table.device))
