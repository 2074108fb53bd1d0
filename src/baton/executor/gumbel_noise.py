"""Noise that is a function, not a stream: (seed, choice, position, token id) → one Gumbel number, the same everywhere.

Owns the hash and the logarithm behind it. Promises that the noise of a token depends on these four numbers alone: not on
the batch, the row, the device, the number of threads or how often a sequence was restarted. For that, the integer part
wraps identically on all devices, and the real part uses only operations that IEEE 754 rounds exactly: a library's `log`
may round differently in the tail of a vector than in its middle.

    (seed, choice) ──mix64──▶ stream            once a slot, on the host
    stream, position ──mix64──▶ (slope, offset)  once a row, on the host
    slope · token + offset ──mix32──▶ y          once a token, on the device; y in [0, 2³¹)
    (y + ½) / 2³¹ ──▶ share in (0, 1)            a small share is a large noise
    −ln(−ln(1 − share)) ──▶ noise                only for tokens that can still win
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

UInt64s = npt.NDArray[np.uint64]

SHARES = 1 << 31
"""How many values a hash can take."""

_WORD = (1 << 64) - 1
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_LOG_2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_ODD_INVERSES = tuple(1.0 / n for n in range(17, 0, -2))
"""1/17 … 1/1: the series of artanh. Its remainder for |s| < 0.172 is below 1e-15."""


@dataclass(frozen=True, slots=True)
class RowKeys:
    """What a row contributes to its hashes: int32 [rows, 1] each, on the device; the slope is odd."""

    slope: torch.Tensor
    offset: torch.Tensor

    def of(self, rows: torch.Tensor | slice) -> RowKeys:
        return RowKeys(self.slope[rows], self.offset[rows])


def noise_stream(seed: int, choice: int) -> int:
    """The 64-bit name of one choice's stream. Seeds count modulo 2⁶⁴, so -1 and 2⁶⁴-1 are the same seed."""
    of_seed = _mix64(np.array([seed & _WORD], dtype=np.uint64))
    return int(_mix64(of_seed + _STRIDE * np.array([(choice & _WORD) + 1], dtype=np.uint64))[0])


def row_keys(streams: UInt64s, positions: npt.NDArray[np.int64], device: torch.device) -> RowKeys:
    mixed = _mix64(streams + _STRIDE * (positions.astype(np.uint64) + np.uint64(1)))
    halves = mixed.view(np.int32).reshape(-1, 2)
    keys = torch.from_numpy(halves).to(device)
    return RowKeys(slope=keys[:, :1] | 1, offset=keys[:, 1:].contiguous())


def hashes(tokens: torch.Tensor, keys: RowKeys) -> torch.Tensor:
    """int32 in [0, 2³¹), in the shape that `tokens` (int32) and the keys broadcast to."""
    mixed = tokens * keys.slope
    return hash_products(mixed, torch.empty_like(mixed), keys)


def hash_products(mixed: torch.Tensor, spare: torch.Tensor, keys: RowKeys) -> torch.Tensor:
    """Turn `slope · token` into hashes in place; `spare` is overwritten.

    `slope · token + offset` with a random odd slope makes each pair of tokens independent; the rounds after it break up
    the arithmetic progression. The shifts keep the sign, so `x ^= x >> n` clears the top bit: that is what leaves the
    last result non-negative without another pass over the vocabulary.
    """
    mixed.add_(keys.offset)
    torch.bitwise_right_shift(mixed, 16, out=spare)
    mixed.bitwise_xor_(spare).mul_(0x7FEB352D)
    torch.bitwise_right_shift(mixed, 15, out=spare)
    mixed.bitwise_xor_(spare).mul_(0x6C8E9CF5)
    torch.bitwise_right_shift(mixed, 16, out=spare)
    return mixed.bitwise_xor_(spare)


def gumbel(hashed: torch.Tensor) -> torch.Tensor:
    """The noise of each hash, in float64, between -3.1 and 22.2."""
    share = hashed.to(torch.float64).add_(0.5).div_(SHARES)
    return exact_log(exact_log(1.0 - share).neg_()).neg_()


def exact_log(x: torch.Tensor) -> torch.Tensor:
    """ln of positive float64 numbers, by operations that every device rounds alike: bit-equal wherever it is computed."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _ROOT_HALF
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = torch.where(low, exponent - 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, _ODD_INVERSES[0])
    for inverse in _ODD_INVERSES[1:]:
        series.mul_(square).add_(inverse)
    return series.mul_(s).mul_(2.0).add_(exponent.to(torch.float64) * _LOG_2)


def _mix64(x: UInt64s) -> UInt64s:
    """A bijection of 64-bit words in which each input bit moves about half of the output bits. Wraps around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
