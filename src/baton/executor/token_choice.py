"""Choosing one token a row from shaped logits: the greatest, or a draw among those that top-k, top-p and min-p leave.

Owns the arithmetic of choosing; knows nothing of slots or requests. Everything is a tensor on the logits' device.

Promises
- A row's token depends on that row alone: never on its neighbours, its place in the batch, or the number of threads.
  Sums whose rounding could depend on their order are sums of whole numbers; logarithms are our own (see `noise`).
- Tokens rank by falling value, equal values by rising id. Where several tokens are equally good, the lowest id wins.
- top-k keeps the k first by rank; top-p then keeps those before which less than p of what top-k kept lies (the smallest
  set that reaches p, the one that crosses included, never empty); min-p keeps those with at least min-p times the greatest
  probability. Shares are counted in units of 2⁻⁴⁰, so tokens rarer than that weigh nothing.
- Broken logits choose too: NaN counts as -inf, +inf as the greatest finite number, and a row without any finite value as
  if all its values were equal.

A draw is a race: token i arrives at E_i / p_i, where E_i = -ln(1 - share_i) ≥ share_i is hashed noise. Arrivals are first
bounded from below by share_i / p_i for the whole vocabulary, cheaply; exact noise is computed only for those few that the
bound does not exclude. The exact finish compares value + Gumbel noise in float64, so a rounding in the bound changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from baton.executor.gumbel_noise import SHARES, RowKeys, gumbel, hash_products, hashes
from baton.executor.scratch_buffers import ScratchBuffers

BLOCK = 64
"""Columns are padded to blocks of this many: the best block is found first, then the best within it."""
_SHARE_UNITS = float(1 << 40)
_SLACK = 1.001
"""Covers the float32 rounding of the lower bounds, which is a thousand times smaller."""


DRAW_ELEMENTS = 1 << 22
"""The most rows × vocabulary to hand to one draw: bounds the memory that it takes."""
_RACE_ELEMENTS_CPU = 3 << 18

Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TruncationLimits:
    """What truncation asks of each row, as float64 or int64 [rows, 1] on the device. Neutral values cut nothing."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    """At least 1 where top-k applies at all."""
    top_p: torch.Tensor
    """inf where everything stays."""
    floor: torch.Tensor
    """ln(min-p): the least value below a greatest value of 0; -inf where everything stays."""
    has_top_p: bool
    has_floor: bool
    top_k_most: int


def finite_logits(logits: torch.Tensor) -> torch.Tensor:
    """The same tensor where each row's maximum is finite, as in a sound model; a repaired copy otherwise."""
    if bool(torch.isfinite(logits.amax(dim=-1)).all()):
        return logits
    repaired = logits.nan_to_num(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)
    hopeless = repaired.amax(dim=-1, keepdim=True) == -math.inf
    return repaired.masked_fill_(hopeless, 0.0)


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: each row's greatest value. Needs `finite_logits`."""
    by_block = _blocks(_padded(logits))
    block = by_block.amax(dim=2).argmax(dim=1)
    rows = torch.arange(len(logits), device=logits.device)
    return by_block[rows, block].argmax(dim=1).add_(block * BLOCK)


def draw_from_all(logits: torch.Tensor, keys: RowKeys, cuts: TruncationLimits, scratch: ScratchBuffers) -> torch.Tensor:
    """int64 [rows]: draws where neither top-k nor top-p applies."""
    finalists = [race.finalists(first_row) for first_row, race in _races(logits, keys, cuts, scratch)]
    rows, ids, values = (torch.cat(column) for column in zip(*finalists, strict=True))
    return _finish(rows, ids, values, keys)


def draw_from_nucleus(logits: torch.Tensor, keys: RowKeys, cuts: TruncationLimits, scratch: ScratchBuffers) -> torch.Tensor:
    """int64 [rows]: draws where top-p applies but not top-k."""
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for first_row, race in _races(logits, keys, cuts, scratch):
        part = chosen[first_row : first_row + len(race.values)]
        part.copy_(race.winners())
        _pull_into_nucleus(part, race, cuts.top_p[first_row : first_row + len(part)], scratch)
    return chosen


def draw_from_top_k(logits: torch.Tensor, keys: RowKeys, cuts: TruncationLimits, scratch: ScratchBuffers) -> torch.Tensor:
    """int64 [rows]: draws where top-k applies to every row."""
    values = _tempered(logits, cuts.temperature, scratch)
    ids, ranked = top_tokens(values, cuts.top_k, cuts.top_k_most)
    stays = (torch.arange(ids.shape[1], device=ids.device) < cuts.top_k) & (ranked > -math.inf)
    kept = stays & (ranked >= cuts.floor) if cuts.has_floor else stays
    if cuts.has_top_p:
        units = _units(_softmax(values, scratch).gather(1, ids)).masked_fill_(~stays, 0.0)
        before = units.cumsum(dim=1) - units
        kept = kept & (before < _to_reach(cuts.top_p, units))
    rows, columns = kept.nonzero(as_tuple=True)
    return _finish(rows, ids[rows, columns], ranked[rows, columns], keys)


def top_tokens(values: torch.Tensor, count: torch.Tensor, count_most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, values), ranked, of at least the `count` [rows, 1] first of each row; -inf pads the rows to the same length.

    Which of several equal values `torch.topk` takes is not defined, so it only says above which value to look: all those
    are collected in order of id and sorted stably. The k-th greatest block bounds the k-th greatest value from below, so
    the blocks' maxima suffice unless there are too few of them.
    """
    by_block = _blocks(_padded(values))
    tops = by_block.amax(dim=2)
    among = tops if count_most <= tops.shape[1] else values
    least = among.topk(count_most, dim=1).values.gather(1, count - 1).clamp_(min=torch.finfo(values.dtype).min)
    rows, ids = _cells(torch.ge, by_block, tops, least)
    per_row = torch.bincount(rows, minlength=len(values))
    columns = torch.arange(len(rows), device=rows.device) - (per_row.cumsum(0) - per_row)[rows]
    shape = (len(values), max(count_most, int(per_row.max())))
    listed = values.new_full(shape, -math.inf)
    listed[rows, columns] = values[rows, ids]
    listed_ids = ids.new_zeros(shape)
    listed_ids[rows, columns] = ids
    ranked, order = listed.sort(dim=1, descending=True, stable=True)
    return listed_ids.gather(1, order), ranked


@dataclass(frozen=True, slots=True)
class _Race:
    """Lower bounds of arrival, and what is needed to finish exactly; all [rows, padded vocabulary]."""

    arrivals: torch.Tensor
    """In units of 2⁻³¹; inf takes no part."""
    values: torch.Tensor
    shares: torch.Tensor
    keys: RowKeys

    def of(self, rows: torch.Tensor) -> _Race:
        arrivals, values, shares = (table.index_select(0, rows) for table in (self.arrivals, self.values, self.shares))
        return _Race(arrivals, values, shares, self.keys.of(rows))

    def winners(self) -> torch.Tensor:
        return _finish(*self.finalists(), self.keys)

    def finalists(self, first_row: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, ids, values): the one with the least bound, and those whose bound lies below its arrival.

        None of the others can win. Rows are counted from `first_row`.
        """
        by_block = _blocks(self.arrivals)
        bounds = by_block.amin(dim=2)
        limit = self._pace(by_block, bounds.argmin(dim=1))
        rows, ids = _cells(torch.le, by_block, bounds, limit)
        return rows + first_row, ids, self.values[rows, ids]

    def _pace(self, by_block: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """float32 [rows, 1]: when the one with the least bound arrives, with slack."""
        rows = torch.arange(len(block), device=block.device)
        token = (block * BLOCK + by_block[rows, block].argmin(dim=1)).unsqueeze(1)
        share = hashes(token.to(torch.int32), self.keys).to(torch.float64).add_(0.5).div_(SHARES)
        arrival = share.neg_().log1p_().mul_(-SHARES * _SLACK).div_(self.shares.gather(1, token))
        return arrival.to(torch.float32)


def _races(
    logits: torch.Tensor, keys: RowKeys, cuts: TruncationLimits, scratch: ScratchBuffers
) -> Iterator[tuple[int, _Race]]:
    """(first row, race) for some rows after others; a race's tables are valid until the next is asked for.

    The vocabulary is passed over some twenty times: on a CPU, in pieces that stay in its caches.
    """
    width = _whole_blocks(logits.shape[1])
    tokens = torch.arange(width, dtype=torch.int32, device=logits.device)
    step = max(1, (_RACE_ELEMENTS_CPU if logits.device.type == "cpu" else DRAW_ELEMENTS) // width)
    for first in range(0, len(logits), step):
        part = slice(first, first + step)
        values = _tempered(logits[part], cuts.temperature[part], scratch)
        shape = (len(values), width)
        shares = _softmax(values, scratch)
        own = keys.of(part)
        products = torch.mul(tokens, own.slope, out=scratch.take("products", shape, torch.int32))
        hashed = hash_products(products, scratch.take("spare", shape, torch.int32), own)
        arrivals = scratch.take("arrivals", shape, torch.float32).copy_(hashed).add_(0.5).div_(shares)
        if cuts.has_floor:
            floor = cuts.floor[part].to(values.dtype)
            arrivals.div_(torch.ge(values, floor, out=scratch.take("mask", shape, torch.float32)))
        yield first, _Race(arrivals, values, shares, own)


def _pull_into_nucleus(chosen: torch.Tensor, race: _Race, top_p: torch.Tensor, scratch: ScratchBuffers) -> None:
    """Redraw, in place, the rows whose token lies outside their top-p set, until none does.

    The winner among all tokens that lies in the set is the winner of the set, so most rows need no second look. One that
    lies outside shows that it and all ranked after it are outside too: they leave the race. Each redraw removes at least
    one token and the first by rank is always inside, so this ends, after a few rounds in practice.
    """
    rows = _perhaps_outside(chosen, race, top_p, scratch)
    race = race.of(rows)
    units = _units(race.shares)
    needed = _to_reach(top_p[rows], units)
    while len(rows) > 0:
        ahead = _ahead(race.values, chosen[rows].unsqueeze(1), scratch)
        before = (units * ahead).sum(dim=1, keepdim=True)
        outside = (before >= needed).squeeze(1).nonzero().squeeze(1)
        race.arrivals.div_(ahead)
        rows, race, units, needed = rows[outside], race.of(outside), units.index_select(0, outside), needed[outside]
        chosen[rows] = race.winners()


def _perhaps_outside(chosen: torch.Tensor, race: _Race, top_p: torch.Tensor, scratch: ScratchBuffers) -> torch.Tensor:
    """Rows not plainly inside: a cheap sum, whose rounding the slack covers, spares most rows the exact one."""
    value = race.values.gather(1, chosen.unsqueeze(1))
    mask = scratch.take("mask", (len(chosen), race.values.shape[1]), torch.float32)
    reached = torch.ge(race.values, value, out=mask).mul_(race.shares).sum(dim=1, keepdim=True)
    return (reached * _SLACK >= top_p).squeeze(1).nonzero().squeeze(1)


def _ahead(values: torch.Tensor, token: torch.Tensor, scratch: ScratchBuffers) -> torch.Tensor:
    """1 for those that rank before the row's token, 0 for it and those after.

    As numbers: a CPU compares five times faster into float32 than into booleans, and dividing by 0 makes inf.
    """
    shape = (len(values), values.shape[1])
    value = values.gather(1, token)
    tokens = torch.arange(shape[1], dtype=torch.float32, device=values.device)
    tied = torch.eq(values, value, out=scratch.take("mask", shape, torch.float32))
    spare = scratch.take("spare mask", shape, torch.float32)
    tied.mul_(torch.lt(tokens, token.to(torch.float32), out=spare))
    return tied.add_(torch.gt(values, value, out=spare))


def _cells(
    compare: Compare, by_block: torch.Tensor, bounds: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, ids) of all cells that compare true with their row's limit, by row, then id; looks only into blocks whose
    bound does."""
    near_rows, near_blocks = compare(bounds, limit).nonzero(as_tuple=True)
    near, column = compare(by_block[near_rows, near_blocks], limit[near_rows]).nonzero(as_tuple=True)
    return near_rows[near], near_blocks[near] * BLOCK + column


def _finish(rows: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, keys: RowKeys) -> torch.Tensor:
    """The exact end of the race between the listed tokens: the greatest value + noise, among equals the lowest id."""
    count = len(keys.slope)
    scores = gumbel(hashes(ids.to(torch.int32).unsqueeze(1), keys.of(rows))).squeeze(1).add_(values)
    best = scores.new_full((count,), -math.inf).scatter_reduce_(0, rows, scores, "amax")
    first = scores == best[rows]
    nobody = ids.new_full((count,), torch.iinfo(torch.int64).max)
    return nobody.scatter_reduce_(0, rows[first], ids[first], "amin")


def _tempered(logits: torch.Tensor, temperature: torch.Tensor, scratch: ScratchBuffers) -> torch.Tensor:
    """Values to draw by: 0 at each row's maximum, below 0 elsewhere, padded to whole blocks. Needs `finite_logits`."""
    rows, vocabulary = logits.shape
    values = scratch.take("values", (rows, _whole_blocks(vocabulary)), logits.dtype)
    inside = values[:, :vocabulary]
    torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=inside)
    inside.div_(temperature.to(logits.dtype))
    values[:, vocabulary:] = -math.inf
    return values


def _softmax(values: torch.Tensor, scratch: ScratchBuffers) -> torch.Tensor:
    """Probabilities in float32. torch computes them row by row, in an order that depends on the row's length alone."""
    shares = scratch.take("shares", (len(values), values.shape[1]), torch.float32)
    return torch.softmax(values, dim=-1, dtype=torch.float32, out=shares)


def _units(shares: torch.Tensor) -> torch.Tensor:
    """Probabilities as whole numbers of 2⁻⁴⁰, in float64: sums of them are exact, in whatever order."""
    return shares.to(torch.float64).mul_(_SHARE_UNITS).floor_()


def _to_reach(top_p: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """How many units suffice. At least one, so that the first token by rank is always inside."""
    return (top_p * units.sum(dim=1, keepdim=True)).clamp_(min=1.0)


def _whole_blocks(columns: int) -> int:
    return columns + -columns % BLOCK


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Whole blocks, so that every row starts at the same alignment; the padding never wins."""
    missing = _whole_blocks(values.shape[1]) - values.shape[1]
    return torch.nn.functional.pad(values, (0, missing), value=-math.inf) if missing else values


def _blocks(padded: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, BLOCK], a view."""
    return padded.view(len(padded), padded.shape[1] // BLOCK, BLOCK)
