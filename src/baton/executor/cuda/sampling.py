"""The sampler of the CUDA executor: chooses one token per row on the device, without the host.

Owns the sampling parameters of every slot, as a row of words on the device, and the memory for choosing, allocated once: a
draw can be captured in a CUDA graph. Knows nothing of plans, blocks or models. `kernels_sample` chooses the tokens.

Promises
- The tokens are those of `sampling.Sampler` for the same float32 logits and parameters: exactly, except where the rounding
  of a sum alone decides whether a token is inside top-p.
- A row's token does not depend on the other rows, on their number, or on the mode (if it suffices).
- A row with a mask draws what that mask permits, whatever its logits. Where these permit nothing that is above the least
  finite float32, all that is permitted is drawn alike.
- Penalties, bias, bans, allowed tokens, bad words and log-probabilities are not done here: `needs_host` says when a slot
  requests them, and then `sampling.Sampler` draws with the same noise.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
import triton

from baton.core.engine.request import Sampling
from baton.core.errors import InvariantViolated
from baton.executor.cuda.kernels_sample import choose, survey
from baton.executor.cuda.masks import MaskTable
from baton.executor.gumbel_noise import noise_stream
from baton.executor.logit_shapers import shapes_beside_constraint
from baton.executor.penalties import penalises

Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

CHUNK = 2048
"""Tokens per program of `survey`. The choice does not depend on it, except for the rounding of sums."""
GROUP = 2
"""Chunks visited at a time, to have enough reads in flight."""
VOCABULARY_MAX = 1 << 20
_WORDS = 5
_TEMPERATURE_LEAST, _TEMPERATURE_MOST = 1e-6, 1e6
"""Limits of the temperature, as in `sampling.Sampler`: beyond them float32 overflows."""


class SamplingMode(IntEnum):
    """The kinds of sampling that the slots of a batch need. A greater mode also serves lesser slots, but slower."""

    GREEDY = 0
    ALL = 1
    """Some slots draw, from the whole vocabulary."""
    CUTS = 2
    """Some slots draw from what top-k, top-p or min-p leave."""


class DeviceSampler:
    """Draws tokens for slots. Row `slots` of its table, one past the last slot, is always greedy, for padding rows."""

    def __init__(self, slots: int, vocabulary: int, rows_max: int, device: torch.device) -> None:
        if vocabulary > VOCABULARY_MAX:
            raise InvariantViolated(f"a vocabulary of {vocabulary} tokens; at most {VOCABULARY_MAX} can be ranked")
        self._vocabulary = vocabulary
        self._rows_max = rows_max
        self._chunk = CHUNK
        self._chunks = -(-vocabulary // CHUNK)
        self._chunks_padded = triton.next_power_of_2(self._chunks)
        self._modes = np.zeros(slots + 1, dtype=np.int8)
        self._host = np.zeros(slots + 1, dtype=np.bool_)
        self._wishes = torch.zeros((slots + 1, _WORDS), dtype=torch.int64, device=device)
        self._peaks, self._bounds, self._weights = torch.zeros((3, rows_max, self._chunks), device=device).unbind()
        self._no_masks = MaskTable.of(1, vocabulary, 1, device)
        self._lists = torch.zeros((rows_max, self._chunks_padded), dtype=torch.int32, device=device)

    def start(self, slot: int, sampling: Sampling) -> None:
        """Replace the slot's parameters, in stream order: steps launched before use the old ones."""
        mode = _mode_of(sampling, self._vocabulary)
        self._modes[slot] = mode
        shaped = penalises(sampling) or shapes_beside_constraint(sampling)
        self._host[slot] = shaped or sampling.logprobs is not None
        words = torch.from_numpy(_words_of(sampling, mode, self._vocabulary))
        if self._wishes.is_cuda:
            # A copy from pageable memory would wait for the stream.
            words = words.pin_memory()
        self._wishes[slot].copy_(words, non_blocking=True)

    def mode_of(self, slots: Slots) -> SamplingMode:
        """The least mode that serves all of these slots."""
        return SamplingMode(int(self._modes[slots].max(initial=SamplingMode.GREEDY)))

    def needs_host(self, slots: Slots) -> bool:
        """Whether some slot needs more than a mask: penalties, bias, bans, listed tokens or log-probabilities."""
        return bool(self._host[slots].any())

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        mode: SamplingMode,
        masks: MaskTable | None = None,
    ) -> None:
        """Draw one token for each row of `logits` [rows, at least the vocabulary], at `positions` of the sequences in
        `slots`, into `out`; all three are int32 [rows]. The mode must suffice for the slots. Without `masks` no row has
        one; with them each row has the one that the table names, which must permit a token: its logits are changed."""
        rows = self._checked(logits, slots, positions, out)
        table = self._no_masks if masks is None else masks
        shared = (logits, self._wishes, slots, positions, self._peaks, self._bounds, self._weights)
        kind = {
            "CHUNK": self._chunk,
            "DRAWS": mode >= SamplingMode.ALL,
            "CUTS": mode >= SamplingMode.CUTS,
            "enable_fp_fusion": False,
        }
        survey[(self._chunks, rows)](
            *shared,
            table.entries,
            table.rows,
            table.entries.stride(0),
            self._vocabulary,
            logits.stride(0),
            **kind,
            MASKED=masks is not None,
            num_warps=4,
        )
        choose[(rows,)](
            *shared,
            self._lists,
            out,
            self._vocabulary,
            logits.stride(0),
            self._chunks,
            **kind,
            CHUNKS=self._chunks_padded,
            GROUP=GROUP,
            num_warps=8,
        )

    def _checked(self, logits: torch.Tensor, *columns: torch.Tensor) -> int:
        rows = len(logits)
        if rows > self._rows_max or logits.shape[1] < self._vocabulary or logits.stride(1) != 1:
            raise InvariantViolated(
                f"logits {tuple(logits.shape)}, strides {logits.stride()}: there is room for {self._rows_max} rows of a "
                f"vocabulary of {self._vocabulary}, side by side"
            )
        for column in columns:
            if column.shape != (rows,) or column.dtype != torch.int32 or not column.is_contiguous():
                raise InvariantViolated(f"a column of {tuple(column.shape)} {column.dtype} beside {rows} rows of logits")
        return rows


def _mode_of(sampling: Sampling, vocabulary: int) -> SamplingMode:
    if sampling.temperature == 0:
        return SamplingMode.GREEDY
    cut = _top_k_of(sampling, vocabulary) > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return SamplingMode.CUTS if cut else SamplingMode.ALL


def _words_of(sampling: Sampling, mode: SamplingMode, vocabulary: int) -> Int64s:
    """The parameters as `kernels_sample` reads them; real numbers by their bits."""
    temperature = (
        min(max(sampling.temperature, _TEMPERATURE_LEAST), _TEMPERATURE_MOST) if mode > SamplingMode.GREEDY else 0.0
    )
    top_k = _top_k_of(sampling, vocabulary)
    top_p = sampling.top_p if sampling.top_p < 1 else math.inf
    reals = np.array([temperature, top_p, _floor_of(sampling, top_k)]).view(np.int64)
    stream = np.array([noise_stream(sampling.seed, sampling.choice)], dtype=np.uint64).view(np.int64)
    return np.array([stream[0], reals[0], top_k, reals[1], reals[2]], dtype=np.int64)


def _top_k_of(sampling: Sampling, vocabulary: int) -> int:
    return sampling.top_k if 0 < sampling.top_k < vocabulary else 0


def _floor_of(sampling: Sampling, top_k: int) -> float:
    """The least float32 value that min-p keeps. `token_choice` rounds ln(min-p) to float32 without top-k, and compares in
    float64 with it: then it is the next float32 that is not below."""
    if sampling.min_p <= 0:
        return -math.inf
    exact = math.log(min(sampling.min_p, 1.0))
    rounded = np.float32(exact)
    if top_k > 0 and float(rounded) < exact:
        rounded = np.nextafter(rounded, np.float32(math.inf))
    return float(rounded)
