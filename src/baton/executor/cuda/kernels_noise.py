"""The noise of `executor.gumbel_noise` inside kernels, bit for bit: (stream, position, token) → one Gumbel number.

Integers wrap as they do there, and the real part uses the same operations in the same order. Kernels that call `gumbel`
must be launched with `enable_fp_fusion=False`: a multiplication fused with an addition is rounded once instead of twice.
"""

import triton
import triton.language as tl

STREAM_STRIDE: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)
ROOT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
SHARE_LEAST: tl.constexpr = tl.constexpr(2.0**-32)


@triton.jit
def row_key(stream, position):
    """(slope, offset), the slope odd: what a row contributes to its hashes. The stream is the 64-bit name of a slot's."""
    mixed = stream.to(tl.uint64, bitcast=True) + (position.to(tl.uint64) + 1) * STREAM_STRIDE
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    slope = mixed.to(tl.uint32).to(tl.int32, bitcast=True) | 1
    offset = (mixed >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    return slope, offset


@triton.jit
def hash_of(token, slope, offset):
    """In [0, 2³¹)."""
    mixed = token * slope + offset
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x6C8E9CF5
    return mixed ^ (mixed >> 16)


@triton.jit
def noise_most(hashed):
    """log2 of a number that e^noise does not pass, in float32 and without a logarithm.

    Noise is -ln(-ln(1 - share)), which is at most -ln(share). The share (hash + ½) / 2³¹ is rounded down to 2⁻²³ by putting
    its upper bits into the mantissa of a number between 1 and 2. Of share = 2^e (1 + f), log2 is at least e + f, and that is
    what the bits of the number say when they are read as a whole number of 2⁻²³.
    """
    share = ((hashed >> 8) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    bits = tl.maximum(share, SHARE_LEAST).to(tl.int32, bitcast=True)
    return (0x3F800000 - bits).to(tl.float32) * (2.0**-23)


@triton.jit
def gumbel(hashed):
    """The noise of each hash, in float64."""
    share = (hashed.to(tl.float64) + 0.5) * (2.0**-31)
    return -exact_log(-exact_log(1.0 - share))


@triton.jit
def exact_log(x):
    """ln of positive normal float64 numbers, rounded as `noise.exact_log` rounds."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    low = mantissa < ROOT_HALF
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    exponent = tl.where(low, exponent - 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * (1.0 / 17) + 1.0 / 15
    for n in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / n
    return series * s * 2.0 + exponent.to(tl.float64) * LOG_2
