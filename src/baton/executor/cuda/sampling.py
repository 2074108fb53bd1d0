"""The sampler of the CUDA executor: one token a row, chosen on the device, without a word from the host.

Owns what every slot asks for, as a row of words on the device, and the memory that choosing takes, allocated once: a draw
can be captured in a CUDA graph. Knows nothing of plans, blocks or models. How a token is chosen is in `kernels_sample`.

Promises
- The tokens are those of `sampling.Sampler` for the same logits, as float32, and the same wishes: exactly, except where the
  rounding of a sum alone decides whether a token is inside top-p.
- A row's token does not depend on the other rows, nor on how many there are, nor on the mode (if it suffices).
- What changes the logits before the choice (penalties, bias, bans) and log-probabilities are not done here: `needs_host`
  says when they are wanted, and then `sampling.Sampler` goes on with the same noise.
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
from baton.executor.gumbel_noise import noise_stream
from baton.executor.penalties import penalises

Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

CHUNK = 2048
"""Tokens that one program surveys. The choice does not depend on it, but for the rounding of sums."""
GROUP = 2
"""Chunks that are looked through at a time, to have enough reads under way."""
VOCABULARY_MAX = 1 << 20
_WORDS = 5
_TEMPERATURE_LEAST, _TEMPERATURE_MOST = 1e-6, 1e6
"""As in `sampling.Sampler`: colder is greedy in all but name, hotter uniform; beyond, float32 overflows."""


class SamplingMode(IntEnum):
    """How much the slots of a batch ask for. A greater mode serves slots that ask for less, only slower."""

    GREEDY = 0
    ALL = 1
    """Some slots draw, from the whole vocabulary."""
    CUTS = 2
    """Some slots draw from what top-k, top-p or min-p leave."""


class DeviceSampler:
    """Row `slots` of its table, one past the last slot, is greedy for ever: rows that pad a batch may name it."""

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
        self._lists = torch.zeros((rows_max, self._chunks_padded), dtype=torch.int32, device=device)

    def start(self, slot: int, sampling: Sampling) -> None:
        """Rewrite everything of the slot, in the order of the current stream: steps launched before keep what was."""
        mode = _mode_of(sampling, self._vocabulary)
        self._modes[slot] = mode
        self._host[slot] = _changes_logits(sampling) or sampling.logprobs is not None
        words = torch.from_numpy(_words_of(sampling, mode, self._vocabulary))
        if self._wishes.is_cuda:
            # From pageable memory the copy would wait for the stream.
            words = words.pin_memory()
        self._wishes[slot].copy_(words, non_blocking=True)

    def mode_of(self, slots: Slots) -> SamplingMode:
        """The least mode that serves all of these slots."""
        return SamplingMode(int(self._modes[slots].max(initial=SamplingMode.GREEDY)))

    def needs_host(self, slots: Slots) -> bool:
        """Whether some slot asks for penalties, bias, bans or log-probabilities."""
        return bool(self._host[slots].any())

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, mode: SamplingMode
    ) -> None:
        """One token for each row of `logits` [rows, at least the vocabulary], to stand at `positions` of the sequences in
        `slots`: all int32 [rows], as is `out`, which takes the tokens. The mode must suffice for the slots."""
        rows = self._checked(logits, slots, positions, out)
        shared = (logits, self._wishes, slots, positions, self._peaks, self._bounds, self._weights)
        kind = {
            "CHUNK": self._chunk,
            "DRAWS": mode >= SamplingMode.ALL,
            "CUTS": mode >= SamplingMode.CUTS,
            "enable_fp_fusion": False,
        }
        survey[(self._chunks, rows)](*shared, self._vocabulary, logits.stride(0), **kind, num_warps=4)
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


def _changes_logits(sampling: Sampling) -> bool:
    bans = bool(sampling.stop_token_ids) and sampling.min_tokens > 0
    return penalises(sampling) or bool(sampling.logit_bias) or bans


def _words_of(sampling: Sampling, mode: SamplingMode, vocabulary: int) -> Int64s:
    """As `kernels_sample` reads them; real numbers by their bits."""
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
    """The least float32 value that min-p leaves. `draw` rounds ln(min-p) to float32 where there is no top-k, and compares
    in float64 where there is: then it is the next float32 that is not below."""
    if sampling.min_p <= 0:
        return -math.inf
    exact = math.log(min(sampling.min_p, 1.0))
    rounded = np.float32(exact)
    if top_k > 0 and float(rounded) < exact:
        rounded = np.nextafter(rounded, np.float32(math.inf))
    return float(rounded)
