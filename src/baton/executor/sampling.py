"""The sampler of an executor: draws a token from each row of logits by the sampling parameters of the row's slot.

Owns the parameters of every slot (replaced by `start`) and the shapers of logits. Knows nothing of plans, blocks or models.
`token_choice` chooses tokens, `gumbel_noise` makes the noise, `penalties` and `logit_shapers` change logits.

Order: repetition penalty, presence and frequency penalties, logit bias, the ban on stop tokens before `min_tokens`, allowed
tokens, bad words, the mask of the constraint; then the maximum where temperature is 0, else temperature, top-k, top-p, min-p
and a keyed draw.

Promises
- The token at a position depends on the row's logits, the slot's parameters and the tokens before it: not on the batch, the
  order of rows, or whether the sequence was stopped and started again with its outputs.
- Several rows of one slot in one call (drafts) are drawn in the order given, each conditioned on the ones before it. Tokens
  recorded past the position of a later call are forgotten.
- Log-probabilities are those of the raw logits, before penalties, bias and temperature. They are finite: probabilities
  below e⁻⁹⁹⁹⁹ are reported as -9999, as the OpenAI API does.
- Logits that are not finite raise no error (see `token_choice`), and the tensor that is passed in is not changed. A row with
  allowed tokens, bad words or a constraint draws only what these permit, whatever its logits; where they permit nothing, the
  row fails.
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
from baton.executor.constraints.compiled_cache import NO_CONSTRAINTS, CompiledConstraints
from baton.executor.constraints.slot_matchers import SlotMatchers
from baton.executor.drafts import DraftTokens
from baton.executor.gumbel_noise import RowKeys, noise_stream, row_keys
from baton.executor.logit_shapers import (
    AllowedTokens,
    BadWords,
    ConstraintMasks,
    LogitBias,
    LogitShaper,
    RestrictingShaper,
    StopTokenBan,
    shapes_logits,
)
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
"""Limits of the temperature: colder is practically greedy, hotter uniform; beyond them float32 overflows."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    tokens: Tokens
    """[rows]"""
    logprobs: tuple[Logprobs, ...]
    """For the rows whose slot requests them; `row` is the index of the row in the call."""
    failed: tuple[int, ...] = ()
    """Rows for which no token may be drawn; what `tokens` has for them means nothing."""


class Sampler:
    def __init__(
        self, slots: int, vocabulary: int, device: torch.device, compiled: CompiledConstraints = NO_CONSTRAINTS
    ) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._draw_rows = max(1, DRAW_ELEMENTS // vocabulary)
        self._scratch = ScratchBuffers(device)
        self._constraints = ConstraintMasks(slots, vocabulary, device, compiled)
        self._restricting: tuple[RestrictingShaper, ...] = (
            AllowedTokens(slots, vocabulary, device), BadWords(slots, vocabulary, device), self._constraints,
        )  # fmt: skip
        self._shapers: tuple[LogitShaper, ...] = (
            SlotPenalties(slots, vocabulary, device), LogitBias(slots, device), StopTokenBan(slots, device),
            *self._restricting,
        )  # fmt: skip
        self._restricted = np.zeros(slots, dtype=np.bool_)
        """Slots for which some tokens may never be drawn."""
        self._occupied = np.zeros(slots, dtype=np.bool_)
        self._plain = np.zeros(slots, dtype=np.bool_)
        """Slots that take the argmax of the raw logits."""
        self._greedy = np.zeros(slots, dtype=np.bool_)
        self._reports = np.zeros(slots, dtype=np.bool_)
        self._alternatives = np.zeros(slots, dtype=np.int64)
        self._stream = np.zeros(slots, dtype=np.uint64)
        self._temperature = np.ones(slots)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._top_p = np.full(slots, math.inf)
        self._floor = np.full(slots, -math.inf)

    def start(self, slot: int, tokens: Tokens, prompt_tokens: int, sampling: Sampling) -> None:
        """Replace all state of the slot. `tokens` past the prompt are its earlier outputs."""
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
        for shaper in self._shapers:
            shaper.start(slot, tokens, prompt_tokens, sampling)
        self._restricted[slot] = sampling.is_restricted
        self._plain[slot] = greedy and not (penalises(sampling) or shapes_logits(sampling))

    def stop(self, slot: int) -> None:
        """Forget the slot. Stopping an empty one changes nothing."""
        self._occupied[slot] = False
        for shaper in self._shapers:
            shaper.stop(slot)

    def close(self) -> None:
        """Release threads."""
        self._constraints.matchers.close()

    @property
    def matchers(self) -> SlotMatchers:
        """For a caller that draws constrained rows itself: it prepares masks, and records what it has drawn."""
        return self._constraints.matchers

    @property
    def constrained(self) -> npt.NDArray[np.bool_]:
        """[slots]: whether the slot has a constraint."""
        return self._constraints.matchers.held

    def forced(self, slot: int, position: int, most: int) -> list[int]:
        """Tokens that the constraint of the slot forces from a position on, at most so many."""
        return self._constraints.matchers.forced(slot, position, most)

    def prepare(self, slots: Slots, positions: Int64s, drafts: DraftTokens) -> None:
        """Announce the next call of `sample`, so that masks are computed meanwhile. It draws at these positions of distinct
        slots, and after each of the drafts. Without a constraint this costs nothing; with one and drafts it is required."""
        if len(slots):
            self._constraints.prepare(slots, positions, drafts)

    def late(self, slots: Slots, patient: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which of the slots that were announced sit the call out, of those that may: their masks are not there."""
        return self._constraints.matchers.late(slots, patient)

    def sample(self, logits: torch.Tensor, slots: Slots, positions: Int64s) -> SampledTokens:
        """One token for each row of `logits` [rows, vocabulary], to stand at `positions` of the sequences in `slots`."""
        if not self._occupied[slots].all():
            raise InvariantViolated(f"rows of empty slots: {slots[~self._occupied[slots]].tolist()}")
        if len(slots) == 0:
            return SampledTokens(np.empty(0, dtype=np.int32), ())
        self._constraints.begin(slots, positions)
        failed: list[int] = []
        tokens = self._tokens(logits, slots, positions, failed)
        logprobs = self._logprobs(logits, slots, tokens)
        return SampledTokens(tokens.to(torch.int32).cpu().numpy(), logprobs, tuple(sorted(failed)))

    def _tokens(self, logits: torch.Tensor, slots: Slots, positions: Int64s, failed: list[int]) -> torch.Tensor:
        if self._plain[slots].all():
            return argmax_tokens(finite_logits(logits))
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for rows in self._waves(slots):
            at = self._index(rows)
            tokens[at], hopeless = self._choose(_rows_of(logits, rows), slots[rows], positions[rows])
            failed += rows[hopeless].tolist()
        return tokens

    def _waves(self, slots: Slots) -> Iterator[Int64s]:
        """Rows to draw together: all, unless a slot has several and each depends on what is drawn for the one before."""
        wave = np.zeros(len(slots), dtype=np.int64)
        seen: dict[int, int] = {}
        in_turn = np.logical_or.reduce([shaper.in_turn[slots] for shaper in self._shapers])
        for row in np.flatnonzero(in_turn).tolist():
            slot = int(slots[row])
            wave[row] = seen.get(slot, 0)
            seen[slot] = int(wave[row]) + 1
        for number in range(int(wave.max()) + 1):
            yield np.flatnonzero(wave == number)

    def _choose(self, logits: torch.Tensor, slots: Slots, positions: Int64s) -> tuple[torch.Tensor, list[int]]:
        """The tokens of rows, and the rows for which none may be drawn."""
        concerned = [shaper.concerned(slots, positions) for shaper in self._shapers]
        shaped, failed = self._shaped(logits, slots, positions, concerned)
        shaped = finite_logits(shaped)
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
        for shaper, rows in zip(self._shapers, concerned, strict=True):
            if len(rows) > 0:
                shaper.record(slots[rows], positions[rows], tokens[self._index(rows)])
        return tokens, failed

    def _shaped(
        self, logits: torch.Tensor, slots: Slots, positions: Int64s, concerned: list[Int64s]
    ) -> tuple[torch.Tensor, list[int]]:
        """The logits after all shapers: a copy if any row is concerned, else the same tensor. And the failed rows."""
        if not any(len(rows) for rows in concerned):
            return logits, []
        shaped = logits.clone()
        for shaper, rows in zip(self._shapers, concerned, strict=True):
            if len(rows) > 0:
                shaper.shape(shaped, rows, slots[rows], positions[rows])
        return shaped, self._save_restricted(logits, shaped, slots, positions)

    def _save_restricted(self, logits: torch.Tensor, shaped: torch.Tensor, slots: Slots, positions: Int64s) -> list[int]:
        """Give restricted rows without a finite value one for each permitted token. Returns those that have none."""
        rows = np.flatnonzero(self._restricted[slots])
        if not len(rows):
            return []
        failed = [int(row) for row in rows if self._constraints.has_failed(int(slots[row]), int(positions[row]))]
        finite = torch.isfinite(_rows_of(shaped, rows).amax(dim=-1)).cpu().numpy()
        for row in rows[~finite].tolist():
            permitted = self._permitted(int(slots[row]), int(positions[row]), logits.shape[1])
            values = shaped[row].nan_to_num(nan=-math.inf, posinf=torch.finfo(shaped.dtype).max, neginf=-math.inf)
            values = values.masked_fill_(~permitted, -math.inf)
            if not bool(permitted.any()):
                failed += [] if row in failed else [row]
                self._constraints.note_failed(int(slots[row]), int(positions[row]))
            elif bool(values.max() == -math.inf):
                values = torch.zeros_like(values).masked_fill_(~permitted, -math.inf)
            shaped[row] = values
        return failed

    def _permitted(self, slot: int, position: int, columns: int) -> torch.Tensor:
        permitted = np.ones(self._vocabulary, dtype=np.bool_)
        for shaper in self._restricting:
            left = shaper.permitted(slot, position)
            if left is not None:
                permitted &= left
        padded = np.pad(permitted, (0, columns - self._vocabulary))
        return torch.from_numpy(padded).to(self._device)

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


def _rows_of(table: torch.Tensor, rows: Int64s) -> torch.Tensor:
    """The given rows, which ascend: a view where they are contiguous, as in most steps."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return table[first : last + 1]
    return table.index_select(0, torch.from_numpy(rows).to(table.device))
