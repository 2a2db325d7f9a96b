"""Scales and codes of one block of a matrix: by absmax, or by a search for the smallest error.

An element x of a group with scale s is stored as the code q whose value is nearest to x / s, and
read as q s. For integers of b bits that is clip(round(x / s), -2^(b-1), 2^(b-1) - 1); for E2M1 the
nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties go to the even code in both.

- absmax: s = max |x| / ((2^b - 1) / 2), as compressed-tensors has it; E2M1: the power of two that
  puts max |x| between 3.5 and 7 (OCP MX 1.0 with its rounding of the maximum).
- search: the s with the smallest sum over the group of h_k (x_k - q_k s)^2, h_k the importance of
  input k (1, or the mean square of what it receives): RATIOS multiples of the absmax scale are
  tried, then s = sum(h x q) / sum(h q^2), the best scale for the codes found, REFINEMENTS times.
  The absmax scale is among them and only improvements are kept: no group is worse than by absmax.

A scale is rounded to the type it is stored as before codes are chosen for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cpumoe._core import Error
from cpumoe.quantize.target import Target

Floats = NDArray[np.float32]
Method = Literal["absmax", "search"]
ScaleType = Literal["bf16", "fp16", "fp32"]

RATIOS = 24
REFINEMENTS = 2
# Exponents beside the absmax one that a search tries for E2M1.
_SHIFTS = (-1, 1, -2)

# Elements worked on at a time: x and one temporary in fp32 stay in a 1 MiB second-level cache.
_BLOCK = 1 << 16
# Up to this group size the groups lie side by side (inputs x groups), so that inner loops are long.
_WIDEST_SIDE_BY_SIDE = 256

_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
# Smallest scale of each type: normal where the type has fp32's range.
_TINIEST = {"bf16": 2.0**-126, "fp16": 2.0**-24, "fp32": 2.0**-126}
_LARGEST = {"bf16": 3.3895314e38, "fp16": 65504.0, "fp32": 3.4028235e38}

# 2 |value| of E2M1 -> code without its sign.
_E2M1 = np.zeros(13, np.uint8)
_E2M1[[0, 1, 2, 3, 4, 6, 8, 12]] = np.arange(8)


def scale_dtype(kind: ScaleType) -> np.dtype[np.generic]:
    """The numpy type of stored scales."""
    dtype: np.dtype[np.generic] = np.dtype(_DTYPES[kind])
    return dtype


@dataclass(frozen=True, slots=True)
class Quantised:
    """Of a block [n, K]. codes: uint8 [n, K], integers plus 2^(bits - 1). scales: fp32 [n, groups].

    error, power: sum of (x - value)^2 and of x^2, in float64. weighted: both, times h.
    """

    codes: NDArray[np.uint8]
    scales: Floats
    error: float
    power: float
    weighted: tuple[float, float]


class _Block:
    """Groups of a block, laid out for long inner loops, and the buffers of a search."""

    def __init__(self, x: Floats, importance: Floats | None, target: Target) -> None:
        self.target = target
        rows, width = x.shape
        size = target.group or width
        grouped = x.reshape(-1, size)
        self.axis = 0 if size <= _WIDEST_SIDE_BY_SIDE else 1
        self.x = np.ascontiguousarray(grouped.T) if self.axis == 0 else grouped
        self.h: Floats | None = None
        if importance is not None:
            h = np.broadcast_to(importance.reshape(1, -1, size), (rows, width // size, size))
            flat = h.reshape(-1, size)
            self.h = np.ascontiguousarray(flat.T if self.axis == 0 else flat)
        self.work = np.empty_like(self.x)
        self.codes = np.empty_like(self.x)

    def total(self, values: Floats) -> Floats:
        """Sum over each group."""
        return np.add.reduce(values, axis=self.axis, keepdims=True, dtype=np.float32)

    def choose(self, scale: Floats) -> Floats:
        """codes <- values of the codes (integers, or E2M1) nearest to x / scale."""
        q = self.codes
        np.divide(self.x, scale, out=q)
        if self.target.floating:
            round_e2m1(q)
        else:
            np.rint(q, out=q)
            np.clip(q, np.float32(self.target.low), np.float32(self.target.high), out=q)
        return q

    def error(self, scale: Floats) -> Floats:
        """Weighted squared error of each group with the scale; leaves the codes in `codes`."""
        self.choose(scale)
        t = self.work
        np.multiply(self.codes, scale, out=t)
        np.subtract(t, self.x, out=t)
        np.multiply(t, t, out=t)
        if self.h is not None:
            np.multiply(t, self.h, out=t)
        return self.total(t)

    def best_for_codes(self) -> Floats:
        """sum(h x q) / sum(h q^2) of each group, 0 where all codes are 0."""
        t = self.work
        np.multiply(self.codes, self.x if self.h is None else self.x * self.h, out=t)
        dividend = self.total(t)
        np.multiply(self.codes, self.codes, out=t)
        if self.h is not None:
            np.multiply(t, self.h, out=t)
        divisor = self.total(t)
        return np.divide(dividend, divisor, out=np.zeros_like(divisor), where=divisor > 0)


def round_e2m1(y: Floats) -> None:
    """y <- the nearest value of E2M1, ties to the even code, at most 6, in place."""
    size = np.abs(y)
    np.minimum(size, np.float32(6), out=size)
    step = np.where(size < 2, np.float32(0.5), np.float32(1))
    step[size >= 4] = 2
    np.divide(size, step, out=size)
    np.rint(size, out=size)
    np.multiply(size, step, out=size)
    np.copysign(size, y, out=y)


def round_scale(scale: Floats, kind: ScaleType) -> Floats:
    """The scale as it is stored: positive, finite, of the type's precision; as fp32."""
    bounded = np.clip(scale, np.float32(_TINIEST[kind]), np.float32(_LARGEST[kind]))
    return bounded.astype(_DTYPES[kind]).astype(np.float32)


def _power_of_two(exponent: NDArray[np.int32]) -> Floats:
    """2^exponent with the exponent within E8M0 (and fp32's normal range)."""
    return np.ldexp(np.float32(1), np.clip(exponent, -126, 127)).astype(np.float32)


def _absmax(top: Floats, target: Target, kind: ScaleType) -> Floats:
    """Absmax scale of groups whose largest magnitude is `top`; 1 where that is 0."""
    if target.floating:
        # top = mantissa 2^exponent with the mantissa in [0.5, 1).
        mantissa, exponent = np.frexp(top)
        scale = _power_of_two(exponent - 3 + (mantissa >= 0.875))
    else:
        scale = round_scale(top / np.float32((target.high - target.low) / 2), kind)
    return np.where(top > 0, scale, np.float32(1))


def _search(block: _Block, start: Floats, kind: ScaleType) -> Floats:
    """The best scale of each group, `start` unless another one has a smaller error."""
    best = start.copy()
    least = block.error(best)

    def keep(scale: Floats) -> None:
        error = block.error(scale)
        better = error < least
        np.copyto(best, scale, where=better)
        np.copyto(least, error, where=better)

    if block.target.floating:
        for shift in _SHIFTS:
            keep(round_scale(start * np.float32(2.0**shift), "fp32"))
        return best
    for ratio in np.linspace(*block.target.clip, RATIOS, dtype=np.float32):
        keep(round_scale(start * ratio, kind))
    for _ in range(REFINEMENTS):
        block.choose(best)
        wanted = block.best_for_codes()
        keep(np.where(wanted > 0, round_scale(wanted, kind), best))
    return best


def _quantise_block(
    x: Floats, target: Target, kind: ScaleType, method: Method, importance: Floats | None
) -> Quantised:
    rows, width = x.shape
    size = target.group or width
    block = _Block(x, importance, target)
    top = np.max(np.abs(block.x, out=block.work), axis=block.axis, keepdims=True)
    scale = _absmax(top, target, kind)
    if method == "search":
        scale = _search(block, scale, kind)
    q = block.choose(scale)
    difference = (q * scale - block.x).astype(np.float64)
    values = block.x.astype(np.float64)
    np.square(difference, out=difference)
    np.square(values, out=values)
    error, power = float(difference.sum()), float(values.sum())
    weighted = (error, power)
    if block.h is not None:
        weighted = (float((difference * block.h).sum()), float((values * block.h).sum()))
    if target.floating:
        codes = _E2M1[(np.abs(q) * 2).astype(np.uint8)]
        codes |= np.signbit(q).astype(np.uint8) << 3
    else:
        codes = (q - np.float32(target.low)).astype(np.uint8)
    codes = codes.T if block.axis == 0 else codes
    return Quantised(
        np.ascontiguousarray(codes).reshape(rows, width),
        scale.reshape(rows, width // size),
        error,
        power,
        weighted,
    )


def quantise(
    x: Floats,
    target: Target,
    *,
    scales: ScaleType = "bf16",
    method: Method = "search",
    importance: Floats | None = None,
) -> Quantised:
    """Codes and scales of `x` (fp32 [n, K], K a multiple of the group).

    importance: fp32 [K], h of the module's docstring; must not be negative.
    Raises Error when x holds a NaN or an infinity.

    Source: the module's docstring; the absmax scales and the rounding are those of
    compressed-tensors 0.20 (`calculate_qparams`, `quantize`).

    Example:
        >>> import numpy as np
        >>> from cpumoe.quantize.target import find_target
        >>> found = quantise(np.arange(-16, 16, dtype=np.float32)[None], find_target("int4_g32"))
        >>> found.scales, found.codes[0, :4].tolist()
        (array([[2.]], dtype=float32), [0, 0, 1, 2])
    """
    if not np.isfinite(x).all():
        raise Error("quantize: weights must be finite numbers; got NaN or infinity")
    rows = max(1, _BLOCK // x.shape[1])
    with np.errstate(over="ignore"):  # an error that overflows is infinite, and never the smallest
        parts = [
            _quantise_block(x[at : at + rows], target, scales, method, importance)
            for at in range(0, x.shape[0], rows)
        ]
    if len(parts) == 1:
        return parts[0]
    return Quantised(
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.scales for p in parts]),
        sum(p.error for p in parts),
        sum(p.power for p in parts),
        (sum(p.weighted[0] for p in parts), sum(p.weighted[1] for p in parts)),
    )


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [n, K] as bytes [n, K bits / 8], the first in the lowest bits.

    This is the little-endian image of compressed-tensors' int32 words, and of MXFP4's nibbles.
    """
    if bits == 8:
        return codes
    per = 8 // bits
    parts = codes.reshape(codes.shape[0], -1, per)
    packed = parts[:, :, 0].copy()
    for i in range(1, per):
        packed |= parts[:, :, i] << np.uint8(bits * i)
    return packed


def stored_scales(scales: Floats, target: Target, kind: ScaleType) -> NDArray[np.generic]:
    """Scales as they are written: the model's dtype, or exponents plus 127 as bytes."""
    if not target.floating:
        return scales.astype(_DTYPES[kind])
    _, exponent = np.frexp(scales)
    return (exponent - 1 + 127).astype(np.uint8)
